"""Dropout through compiled attention: its rate, its seed, and one mask for forward and backward.

With v the identity the output is the matrix of attention weights, dropped ones being 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_specs import HOPPER
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from comparison import TOLERANCE, run_poisoned
from fa_inductor import explain
from helpers import compile_quick, compile_reference, kernels_of, run_reported
from poison import poisoned

BOTH_ROUTES = pytest.mark.parametrize("compiler", [compile_quick, compile_reference])
attend = F.scaled_dot_product_attention
Inputs = tuple[Tensor, Tensor, Tensor]


def revealing(queries: int = 32, keys: int = 32, heads: int = 4) -> Inputs:
    """q, k and a v that makes the output the weights, (2, heads, queries, keys)."""
    q, k = torch.randn(2, heads, queries, 16), torch.randn(2, heads, keys, 16)
    return q, k, torch.eye(keys).expand(2, heads, keys, keys).contiguous()


class Dropped(nn.Module):
    def __init__(self, probability: float, **options: Any) -> None:
        super().__init__()
        self.probability, self.options = probability, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, dropout_p=self.probability, **self.options)


def seeded(compiled: Callable[..., Any], inputs: Sequence[Tensor], seeds: Iterable[int]) -> Tensor:
    """The outputs of every seed, each of one run of the kernel."""
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        out, outcome = run_poisoned(compiled, inputs)
        assert outcome.kernel_calls == 1
        assert set(kernels_of(outcome.report)) <= {"reference"}
        found.append(out.detach())
    return torch.stack(found)


# --- Rate, mean and seeds (DR-01) -----------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.5, 0.1])
@BOTH_ROUTES
def test_dropout_stays_dropout_in_eval(compiler: Callable[..., Any], probability: float) -> None:
    """F.sdpa drops whatever the module's mode: the rate, the mean over seeds, and the seeds."""
    inputs = revealing()
    compiled = compiler(Dropped(probability).eval())
    dropped, whole = seeded(compiled, inputs, [*range(40), 0]), attend(*inputs)
    assert float(dropped.eq(0).float().mean()) == pytest.approx(probability, abs=0.02)
    kept = dropped != 0
    scaled = (whole / (1 - probability)).expand_as(dropped)
    torch.testing.assert_close(dropped[kept], scaled[kept], **TOLERANCE)
    # 40 seeds: the standard error of a kept weight w is w / sqrt(40), over 8192 weights.
    assert float((dropped.mean(0) - whole).mean()) == pytest.approx(0.0, abs=1e-3)
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(dropped[0], dropped[-1])


def test_weights_are_dropped_independently() -> None:
    """Neither rows, heads nor sequences share their pattern, nor one seed with the next."""
    torch.manual_seed(1)
    (dropped,) = seeded(compile_quick(Dropped(0.5)), revealing(64, 64), [5])
    pattern = dropped.eq(0).double() - 0.5
    for dim in range(4):
        others = pattern.roll(1, dim)
        # Of 32768 pairs: the standard error of their correlation is 1 / sqrt(32768).
        assert abs(float((pattern * others).mean()) * 4) < 0.03


@BOTH_ROUTES
def test_dropout_of_everything(compiler: Callable[..., Any]) -> None:
    """p = 1 gives zeros, and gradients of zero, not 0 * inf."""
    inputs = [tensor.requires_grad_() for tensor in revealing()]
    with poisoned():
        out, report = run_reported(compiler(Dropped(1.0)), *inputs)
        grads = torch.autograd.grad(out.sum(), inputs)
    assert kernels_of(report) == ["reference"]
    assert all(tensor.eq(0).all() for tensor in (out, *grads))


def graph_of(fn: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The calls of the graph that the pass makes of `fn`."""
    from fa_inductor import compile_pass
    from fa_inductor.config import Config

    calls: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compile_pass.run(gm, Config(kernels=("reference",)))
        calls.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    return calls


def test_no_dropout_draws_nothing() -> None:
    """p = 0 leaves PyTorch's generator as it was, and compiles to what is no dropout at all."""
    inputs = revealing()
    without = graph_of(lambda *x: attend(*x), *inputs)
    torch._dynamo.reset()
    assert graph_of(Dropped(0.0), *inputs) == without
    assert not any("rand" in call for call in without)
    torch._dynamo.reset()
    assert sum("randint" in call for call in graph_of(Dropped(0.5), *inputs)) == 1
    before = torch.get_rng_state()
    torch._dynamo.reset()
    out, _ = run_poisoned(compile_quick(Dropped(0.0)), inputs)
    torch.testing.assert_close(out, attend(*inputs), **TOLERANCE)
    assert torch.equal(torch.get_rng_state(), before)


# --- Forward and backward -------------------------------------------------------------------------


def dropout_gradients(weights: Tensor, kept: Tensor, inputs: Sequence[Tensor], p: float) -> Any:
    """Of the inputs, in float64, for a known pattern `kept` and the loss (out * weights).sum()."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    q, k, v = exact
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    softmax = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    out = (softmax * kept / (1 - p)) @ v
    return torch.autograd.grad((out * weights).sum(), exact)


@BOTH_ROUTES
@pytest.mark.parametrize("key_heads", [4, 2], ids=["MHA", "GQA"])
def test_the_backward_drops_what_the_forward_dropped(
    key_heads: int, compiler: Callable[..., Any]
) -> None:
    """The pattern is read from the output of an identity v; the gradients must be its."""
    q, k, _ = revealing(24, 32)
    k = k[:, :key_heads]
    v = torch.eye(32).expand(2, key_heads, 32, 32).contiguous()
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    compiled = compiler(Dropped(0.4, enable_gqa=key_heads != 4))
    for _ in range(2):
        with poisoned():
            out, _ = run_reported(compiled, *inputs)
            weights = torch.randn_like(out)
            grads = torch.autograd.grad((out * weights).sum(), inputs)
        expected = dropout_gradients(weights, out.detach() != 0, inputs, 0.4)
        for grad, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad.double(), wanted, **TOLERANCE)


def attend_twice(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return attend(q, k, v, dropout_p=0.5), attend(q, k, v, dropout_p=0.5)


@BOTH_ROUTES
def test_two_sites_drop_different_weights(compiler: Callable[..., Any]) -> None:
    """Equal calls are two draws: nothing may take one for the other."""
    inputs = [tensor.requires_grad_() for tensor in revealing()]
    with poisoned():
        (first, second), report = run_reported(compiler(attend_twice), *inputs)
    assert kernels_of(report) == ["reference"] * 2
    agree = float(first.eq(0).eq(second.eq(0)).float().mean())
    assert agree == pytest.approx(0.5, abs=0.03)


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q * 1.0, k, v, dropout_p=0.4)

    return checkpoint(block, q, k, v, use_reentrant=False)


def checkpointed_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([checkpointed(q, k, v), checkpointed(q, k, v)])


@BOTH_ROUTES
def test_the_recompute_of_a_checkpoint_draws_the_same(compiler: Callable[..., Any]) -> None:
    """Else the backward would be of another function than the forward (DR-03)."""
    inputs = [tensor.requires_grad_() for tensor in revealing(24, 32)]
    for seed in range(3):
        torch.manual_seed(seed)
        with poisoned():
            out, report = run_reported(compiler(checkpointed_twice), *inputs)
            torch.rand(100)  # what else happens between forward and backward does not matter
            weights = torch.randn_like(out)
            grads = torch.autograd.grad((out * weights).sum(), inputs)
        assert set(kernels_of(report)) <= {"reference"}
        assert not torch.equal(out[0] != 0, out[1] != 0)
        parts = [dropout_gradients(weights[i], out[i].detach() != 0, inputs, 0.4) for i in range(2)]
        for grad, *wanted in zip(grads, *parts, strict=True):
            torch.testing.assert_close(grad.double(), sum(wanted), **TOLERANCE)


def test_dropout_beside_a_mask_and_causal() -> None:
    """All three at once: hidden keys stay hidden, the rest is dropped at the rate."""
    inputs = revealing()
    mask = torch.rand(2, 1, 32, 32) > 0.3

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask & torch.ones(32, 32, dtype=torch.bool).tril(), dropout_p=0.5)

    (dropped,) = seeded(compile_quick(fn), inputs, [3])
    visible = (mask & torch.ones(32, 32, dtype=torch.bool).tril()).expand_as(dropped)
    assert dropped[~visible].eq(0).all()
    assert float(dropped[visible].eq(0).float().mean()) == pytest.approx(0.5, abs=0.03)
    whole = attend(*inputs, mask & torch.ones(32, 32, dtype=torch.bool).tril())
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * whole[kept], **TOLERANCE)


# --- PyTorch's module, pins, planning -------------------------------------------------------------


@BOTH_ROUTES
def test_multihead_attention_drops_while_training(compiler: Callable[..., Any]) -> None:
    """And only then; the mean over seeds is what it gives in evaluation."""
    module = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)
    x = torch.randn(4, 9, 16)
    compiled = compiler(lambda x: module(x, x, x, need_weights=False)[0])
    with torch.no_grad():
        expected = module.eval()(x, x, x, need_weights=False)[0]
        module.train()
        dropped = seeded(compiled, [x], [*range(200), 0])
        module.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            whole = seeded(compiled, [x], [0])[0]
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(whole, expected, **TOLERANCE)
    assert torch.equal(dropped[0], dropped[-1])
    assert not torch.equal(dropped[0], dropped[1])
    spread = dropped.std(0).mean() / 200**0.5
    assert float((dropped.mean(0) - expected).abs().mean()) < 2 * float(spread)


def test_a_pinned_site_is_kept_with_its_dropout() -> None:
    """PyTorch's own then: the very numbers of a compile without us."""

    def pinned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(q, k, v, dropout_p=0.5)

    inputs, outs = revealing(), []
    for compiled in (compile_quick(pinned), torch.compile(pinned, backend="aot_eager")):
        torch.manual_seed(0)
        out, outcome = run_poisoned(compiled, inputs)
        assert outcome.kernel_calls == 0
        outs.append(out)
        torch._dynamo.reset()
    assert torch.equal(*outs)


PINS = {
    "no pin": (),
    "cuDNN": (SDPBackend.CUDNN_ATTENTION,),
    "flash": (SDPBackend.FLASH_ATTENTION,),
}


@pytest.mark.parametrize("pins", PINS.values(), ids=PINS.keys())
def test_planning_for_hopper_takes_cudnn_for_dropout(pins: tuple[SDPBackend, ...]) -> None:
    """Unless the user has pinned another backend; FA4's reason is always given."""

    def fn(q: Tensor) -> Tensor:
        if not pins:
            return attend(q, q, q, dropout_p=0.2)
        with sdpa_kernel([*pins, SDPBackend.MATH]):
            return attend(q, q, q, dropout_p=0.2)

    for training in (False, True):
        q = torch.randn(2, 4, 128, 64, dtype=torch.bfloat16, requires_grad=training)
        (site,) = explain(fn, {"fa.kernels": ("fa4", "cudnn", "reference")}, HOPPER)(q).sites
        flash = SDPBackend.FLASH_ATTENTION in pins
        assert site.kernel == (None if flash else "cudnn")
        assert site.reasons["fa4"][0].startswith("dropout_p=0.2 > 0 (FA4 has no dropout; ")
        assert site.spec
        assert site.spec.dropout_p == 0.2
