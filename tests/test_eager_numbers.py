"""Hand-written attention: how exact it is, its gradients and its dropout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from eager_attention import attend, left_for, only_spec, qkv, randn, repeat_kv, sink_attention
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from comparison import TOLERANCE, compare_forward, compare_with_eager, run_poisoned
from helpers import compile_quick, kernels_of, relative_error, run_reported
from poison import poisoned

# --- Dtypes ---------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return (q @ k.mT * 8**-0.5 + b).softmax(-1) @ v


def cast_up(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    scores = (q.float() @ k.float().mT) * 8**-0.5 + b
    return scores.softmax(-1).type_as(v) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return (torch.tanh(q @ k.mT / 4) * 4 + b).softmax(-1) @ v


def repeated(softmaxed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, b: softmaxed(q, repeat_kv(k[:, :2]), repeat_kv(v[:, :2]), b)


def beside_sinks(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return sink_attention(q, k, v, b[:, 0, 0], b)


# As a model has it, and the same without casts.
WAYS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "plain": (plain, plain),
    "softmax in float32": (attend, plain),
    "scores in float32": (cast_up, plain),
    "softcap": (capped, capped),
    "repeated": (repeated(attend), repeated(plain)),
    "sink": (beside_sinks, beside_sinks),
}


def with_gradients(fn: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = fn(*inputs)
    weight = torch.linspace(-1, 2, out.numel()).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("way", WAYS)
def test_no_less_exact_than_eager(way: str, dtype: torch.dtype) -> None:
    """Against float64, forward and gradients; the op may only round less."""
    fn, exact = WAYS[way]
    inputs = [tensor.to(dtype) for tensor in (*qkv(), randn(4, 6, 6))]
    truth = with_gradients(exact, [tensor.double() for tensor in inputs])
    theirs = with_gradients(fn, inputs)
    with poisoned():
        ours, report = run_reported(with_gradients, compile_quick(fn), inputs)
    assert kernels_of(report) == ["reference"]
    # In float64 the truth is no nearer to the truth than either.
    room = (16.0 if dtype == torch.float64 else 2.0) * torch.finfo(dtype).eps
    assert ours[0].stride() == theirs[0].stride()
    for got, eager_, true in zip(ours, theirs, truth, strict=True):
        assert got.dtype == eager_.dtype
        assert relative_error(got, true) <= 1.2 * relative_error(eager_, true) + room


def test_a_float32_mask_beside_low_precision_is_left_by_name() -> None:
    inputs = [*(tensor.bfloat16() for tensor in qkv()), randn(6, 6)]
    fn = lambda *x: attend(*x).float()  # noqa: E731
    outcome = compare_forward(fn, compile_quick(fn), inputs)
    assert "mask float32 (6, 6) beside a bfloat16 query" in outcome.reasons[0]


def test_under_autocast() -> None:
    """The products are taken in bfloat16, from float32 operands."""
    inputs = qkv()

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (q @ k.mT * 0.3).softmax(-1) @ v

    truth = with_gradients(lambda q, k, v: (q @ k.mT * 0.3).softmax(-1) @ v, inputs)
    theirs = with_gradients(fn, inputs)
    with poisoned():
        ours, report = run_reported(with_gradients, compile_quick(fn), inputs)
    assert kernels_of(report) == ["reference"]
    assert report.sites[0].spec.dtype == torch.bfloat16
    for got, eager_, true in zip(ours, theirs, truth, strict=True):
        assert got.dtype == eager_.dtype
        assert relative_error(got, true) <= 1.2 * relative_error(eager_, true) + 2.0**-8


# --- Gradients ------------------------------------------------------------------------------------


def test_biases_and_sinks_are_differentiated() -> None:
    """Every tensor that is added has its gradient, of its own shape."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sinks: Tensor) -> Tensor:
        mask = bias - slopes[:, None, None] * torch.arange(6)
        return sink_attention(q, k, v, sinks, mask)

    inputs = [*qkv(), randn(2, 1, 6, 6), randn(4), randn(4)]
    spec = only_spec(compare_with_eager(fn, compile_quick(fn), inputs))
    assert spec.bias_needs_grad
    assert spec.has_sink


def test_detached_weights_are_left() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).detach() @ v + q.sum() + k.sum()

    outcome = compare_with_eager(fn, compile_quick(fn), qkv())
    assert outcome.reasons == ["all: the attention weights go through detach"]


def test_scaled_queries_without_gradient() -> None:
    """The product with a number stays, as it stops gradients."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            scaled = q * 0.5
        return (scaled @ k.mT).softmax(-1) @ v + q.sum()

    assert only_spec(compare_with_eager(fn, compile_quick(fn), qkv())).scale == 1.0


def test_in_a_checkpoint() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(attend, q, k, v, use_reentrant=False)

    outcome = compare_with_eager(fn, compile_quick(fn), qkv())
    assert kernels_of(outcome.report) == ["reference"]


# --- Dropout --------------------------------------------------------------------------------------


def dropped(q: Tensor, k: Tensor, v: Tensor, train: bool) -> Tensor:
    return F.dropout((q @ k.mT).softmax(-1), 0.25, train) @ v


def test_dropout_drops_weights_at_its_rate() -> None:
    q, k = randn(2, 4, 64, 8), randn(2, 4, 64, 8)
    v = torch.eye(64).expand(2, 4, 64, 64)
    out, outcome = run_poisoned(compile_quick(dropped), (q, k, v, True))
    assert only_spec(outcome).dropout_p == 0.25
    weights = (q @ k.mT).softmax(-1)
    assert float(out.eq(0).float().mean()) == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(out[out != 0], (weights / 0.75)[out != 0], **TOLERANCE)
    torch._dynamo.reset()
    out, outcome = run_poisoned(compile_quick(dropped), (q, k, v, False))
    assert only_spec(outcome).dropout_p == 0.0
    torch.testing.assert_close(out, weights, **TOLERANCE)


def test_nothing_is_dropped_twice() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(F.dropout((q @ k.mT).softmax(-1), 1.0), 1.0) @ v

    assert left_for(fn, qkv()) == "the attention weights are dropped out twice"
