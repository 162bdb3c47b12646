"""Masks that kernels evaluate themselves: what the pass puts in the graph, and that it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from fa_inductor import compile_pass
from fa_inductor.config import Config
from helpers import compile_quick, run_reported
from poison import poisoned

attend = F.scaled_dot_product_attention
LENGTH = 150


def qkv(sq: int = LENGTH, sk: int = LENGTH, hkv: int = 4) -> list[Tensor]:
    sizes = ((2, 4, sq, 8), (2, hkv, sk, 8), (2, hkv, sk, 8))
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


def padding(length: int = LENGTH) -> Tensor:
    """One sequence begins late: its first causal queries see nothing."""
    kept = torch.ones(2, length, dtype=torch.bool)
    kept[0, : length // 2] = False
    kept[1, length - 20 :] = False
    return kept


def causal(length: int) -> Tensor:
    places = torch.arange(length)
    return places[None] <= places[:, None]


def causal_and_padded(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return attend(q, k, v, causal(q.shape[2]) & kept[:, None, None])


def padded_keys(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return attend(q, k, v, kept[:, None, None].expand(-1, 1, q.shape[2], -1))


def documents(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    numbers = kept.long().cumsum(-1) // 40
    return attend(q, k, v, (numbers[:, :, None] == numbers[:, None, :])[:, None])


def added(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """As eager models hide keys; rows of nothing else are the average of all values."""
    mask = torch.where(
        causal(q.shape[2]) & kept[:, None, None], 0.0, torch.finfo(torch.float32).min
    ).to(q.dtype)
    return attend(q, k, v, mask)


def added_infinity(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    mask = torch.zeros(2, 1, 1, LENGTH, dtype=q.dtype).masked_fill(~kept[:, None, None], -torch.inf)
    return attend(q, k, v, mask)


def given(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return attend(q, k, v, kept)


def written(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """The mask is another one for each of the two: nothing that is kept may be it."""
    mask = kept[:, None, None].expand(-1, 1, q.shape[2], -1).clone()
    once = attend(q, k, v, mask)
    mask[..., 0] = False
    return attend(once, k, v, mask)


def by_hand(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    hidden = ~(causal(q.shape[2]) & kept[:, None, None])
    scores = (q @ k.mT / 3).masked_fill(hidden, torch.finfo(torch.float32).min)
    return scores.softmax(-1) @ v


def by_hand_with_heads_shared(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    k, v = (each[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (k, v))
    return by_hand(q, k, v, kept)


def by_hand_beside_a_sink(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    mask = torch.where(
        causal(q.shape[2]) & kept[:, None, None], 0.0, torch.finfo(torch.float32).min
    )
    scores = 5 * torch.tanh(q @ k.mT / 15) + mask
    sink = torch.ones(1, 4, 1, 1, dtype=q.dtype).expand(2, -1, q.shape[2], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


SITES: dict[str, Callable[..., Tensor]] = {
    fn.__name__: fn
    for fn in (
        *(causal_and_padded, padded_keys, documents, added, added_infinity, given, written),
        *(by_hand, by_hand_with_heads_shared, by_hand_beside_a_sink),
    )
}


def inputs_of(name: str) -> list[Tensor]:
    kept = padding()
    if name == "given":
        kept = kept[:, None, None] & (torch.rand(2, 1, LENGTH, LENGTH) < 0.7)
    return [*qkv(hkv=2 if "shared" in name else 4), kept]


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_as_eager(name: str, dynamic: bool) -> None:
    """Output and gradients; every site has a text, and its blocks are listed."""
    fn, (q, k, v, kept) = SITES[name], inputs_of(name)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):  # the fused ones lose gradients of rows that see nothing
        wanted = fn(*leaves, kept)
    torch._dynamo.reset()
    with poisoned():
        out, report = run_reported(compile_quick(fn, dynamic=dynamic), *leaves, kept)
        weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
        grads = torch.autograd.grad((out * weight).sum(), leaves)
    expected = torch.autograd.grad((wanted * weight).sum(), leaves)
    if name == "added":
        # Scores that are lost beside a huge number have a gradient in eager as if they were not.
        grads, expected = grads[2:], expected[2:]
    for ours, theirs in zip((out, *grads), (wanted, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert report.sites
    has_text = name != "written"
    assert all((site.spec and site.spec.formula is not None) == has_text for site in report.sites)


def ops_of(fn: Callable[..., Any], *inputs: Any) -> list[str]:
    """The names of our ops in the graph, and of `sum`."""
    names: list[str] = []

    def backend(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        compile_pass.run(gm, Config(kernels=("reference",)))
        for node in gm.graph.nodes:
            name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
            if name.startswith(("attention", "mask_blocks", "sum")):
                names.append(name)
        return aot_eager(gm, given)

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    return names


def test_one_count_for_all_layers() -> None:
    """Whichever view of the mask each has, and before the first of them."""

    def layers(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        mask = causal(LENGTH) & kept[:, None, None]
        for _ in range(3):
            q = attend(q, k, v, mask[:, :, :, :LENGTH])
        return q

    with torch.no_grad():
        names = ops_of(layers, *qkv(), padding())
    assert names == ["sum", "mask_blocks", *["attention_masked"] * 3]


def test_each_mask_has_its_own() -> None:
    """A full and a sliding mask in turn, as Gemma has them."""

    def layers(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        full = causal(LENGTH) & kept[:, None, None]
        places = torch.arange(LENGTH)
        sliding = full & (places[None] > places[:, None] - 9)
        for mask in (full, sliding, full, sliding):
            q = attend(q, k, v, mask)
        return q

    names = ops_of(layers, *(each.requires_grad_() for each in qkv()), padding())
    assert (names.count("sum"), names.count("mask_blocks")) == (2, 4)
    assert names.count("attention_masked") == 4


def test_inside_a_checkpoint() -> None:
    """The mask comes as an operand: it is read as it is, and right."""

    def layers(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        mask = causal(LENGTH) & kept[:, None, None]
        for _ in range(2):
            q = checkpoint(attend, q, k, v, mask, use_reentrant=False)
        return q

    leaves = [tensor.requires_grad_() for tensor in qkv()]
    wanted = layers(*leaves, padding())
    expected = torch.autograd.grad(wanted.sum(), leaves)
    torch._dynamo.reset()
    with poisoned():
        out, report = run_reported(compile_quick(layers), *leaves, padding())
        grads = torch.autograd.grad(out.sum(), leaves)
    for ours, theirs in zip((out, *grads), (wanted, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert ["dense" in (site.spec.mask or "") for site in report.sites if site.spec] == [True] * 2


def test_one_graph_for_many_lengths() -> None:
    """Lists of blocks follow the length, also where it is none of a whole block."""
    compiled = compile_quick(causal_and_padded, dynamic=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in (150, 128, 129, 300, 511):
        inputs = [*qkv(length, length), padding(length)]
        with poisoned():
            out = compiled(*inputs)
        torch.testing.assert_close(out, causal_and_padded(*inputs), rtol=1e-9, atol=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
