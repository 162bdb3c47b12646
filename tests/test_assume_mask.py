"""`fa.assume_mask`: a mask that nobody can prove, taken at the user's word, and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_attention import attend as by_hand
from eager_attention import qkv
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from comparison import compare_with_eager
from fa_inductor import compile_pass
from fa_inductor.config import Config
from fa_inductor.errors import OptionError
from helpers import compile_quick, compile_reference, kernels_of, run_reported

LENGTH = 6
LOWEST = torch.finfo(torch.float32).min
sdpa = F.scaled_dot_product_attention


def causal(length: int = LENGTH) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


MASKS: dict[str, Tensor] = {
    "bool": causal(),
    "rank 4": causal().expand(2, 1, LENGTH, LENGTH),
    "float": torch.zeros(LENGTH, LENGTH).masked_fill(~causal(), -torch.inf),
    "lowest": torch.zeros(LENGTH, LENGTH).masked_fill(~causal(), LOWEST),
}
WAYS: dict[str, Callable[..., Tensor]] = {
    "sdpa": lambda q, k, v, mask: sdpa(q, k, v, mask),
    "by hand": lambda q, k, v, mask: (
        by_hand(q, k, v, mask)
        if mask.dtype != torch.bool
        else (q @ k.mT * 8**-0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
    ),
    "checkpoint": lambda *inputs: checkpoint(sdpa, *inputs, use_reentrant=False),
    "two layers": lambda q, k, v, mask: sdpa(sdpa(q, k, v, mask), k, v, mask),
}


KEPT = [(compile_quick, way, mask) for way in WAYS for mask in MASKS]
KEPT += [(compile_reference, "two layers", "bool"), (compile_reference, "by hand", "lowest")]


@pytest.mark.parametrize(("compiler", "way", "mask"), KEPT)
def test_a_promise_that_is_kept(compiler: Callable[..., Any], way: str, mask: str) -> None:
    """The mask is no argument of the op any more, and the report says on whose word."""
    fn = WAYS[way]
    compiled = _compile(compiler, fn, "causal")
    outcome = compare_with_eager(
        lambda q, k, v: fn(q, k, v, MASKS[mask]),
        lambda q, k, v: compiled(q, k, v, MASKS[mask]),
        qkv(length=LENGTH),
    )
    for site in outcome.report.sites:
        assert site.kernel == "reference"
        assert (site.spec.causal, site.spec.mask, site.spec.bias) == ("top_left", None, None)
        assert "assumed of the mask at" in site.spec.proven
        assert "fa.assume_mask" in " ".join(site.notes)


def _compile(compiler: Callable[..., Any], fn: Callable[..., Any], kind: str) -> Any:
    if compiler is compile_quick:
        return compile_quick(fn, assume_mask=kind)
    return compile_reference(fn, **{"fa.assume_mask": kind})


def _broken_masks() -> dict[str, tuple[str, Tensor]]:
    one_more, one_less, low = causal(), causal(), torch.zeros(LENGTH, LENGTH)
    one_more[2, 3] = True
    one_less[3, 3] = False
    low.masked_fill_(~causal(), -100.0)
    return {
        "one place more": ("causal", one_more),
        "one place less": ("causal", one_less),
        "only lowered": ("causal", low),
        "a bias": ("causal", torch.randn(LENGTH, LENGTH)),
        "padding": ("causal", torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)),
        "strict": ("causal", causal().tril(-1)),
        "one hidden": ("full", one_less),
        "a float": ("full", torch.full((LENGTH, LENGTH), 0.5)),
    }


BROKEN = [(compile_quick, "sdpa", case) for case in _broken_masks()]
BROKEN += [
    (compile, way, "one place more")
    for compile in (compile_quick, compile_reference)
    for way in ("by hand", "two layers", "checkpoint")
]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("compiler", "way", "case"), BROKEN)
def test_a_promise_that_is_broken(
    compiler: Callable[..., Any], way: str, case: str, training: bool
) -> None:
    """The assertion names the option and the line."""
    kind, mask = _broken_masks()[case]
    compiled = _compile(compiler, WAYS[way], kind)
    inputs = [tensor.requires_grad_(training) for tensor in qkv(length=LENGTH)]
    with pytest.raises(RuntimeError, match=r"fa\.assume_mask.*test_assume_mask\.py:\d+"):
        compiled(*inputs, mask)


def test_a_mask_that_is_changed_before_it_is_used() -> None:
    """What is asserted is what the attention would have read."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask[2, 1] = False
        return sdpa(q, k, v, mask)

    compiled = compile_quick(fn, assume_mask="causal")
    with pytest.raises(RuntimeError, match=r"fa\.assume_mask"):
        compiled(*qkv(length=LENGTH), causal())


def test_everything_visible() -> None:
    compiled = compile_quick(WAYS["sdpa"], assume_mask="full")
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    out, report = run_reported(compiled, *(inputs := qkv(length=LENGTH)), mask)
    torch.testing.assert_close(out, sdpa(*inputs))
    (site,) = report.sites
    assert (site.spec.causal, site.spec.bias) == ("none", None)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_is_asserted_once(dynamic: bool) -> None:
    """However many layers share it."""
    asserted: list[int] = []

    def look(gm: fx.GraphModule, _: object) -> Callable[..., Any]:
        asserted.append(sum("_assert_async" in str(node.target) for node in gm.graph.nodes))
        return gm.forward

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        compile_pass.run(gm, Config(kernels=("reference",), assume_mask="causal"))
        return aot_autograd(fw_compiler=look)(gm, example_inputs)

    compiled = torch.compile(WAYS["two layers"], backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (5, 9):
        inputs = qkv(length=length)
        out = compiled(*inputs, causal(length))
        torch.testing.assert_close(out, WAYS["two layers"](*inputs, causal(length)))
    assert asserted == ([1] if dynamic else [1, 1])


def test_what_the_promise_is_not_about() -> None:
    """Masks with gradients, more keys than queries, and masks that are proven to be another."""

    def learned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, q.mean((0, 1)) @ k.mean((0, 1)).T)

    def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(LENGTH)
        return sdpa(q, k, v, (place[:, None] - place).abs() < 2)

    def longer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q[:, :, :3], k, v, k[0, 0, None, :, 0] > -9)

    for fn in (learned, window, longer):
        outcome = compare_with_eager(
            fn, compile_quick(fn, assume_mask="causal"), qkv(length=LENGTH)
        )
        assert kernels_of(outcome.report) == ["reference"]
        assert "assumed" not in (outcome.report.sites[0].spec.proven or "")


def test_a_misspelt_promise() -> None:
    with pytest.raises(OptionError, match="causal"):
        Config(assume_mask="casual")
