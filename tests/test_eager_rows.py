"""Hand-written attention whose rows are masked as a whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eager_attention import HIDDEN, left_for, only_spec, qkv, randn, sink_attention
from torch import Tensor

from comparison import TOLERANCE, compare_forward, compare_with_eager, run_poisoned
from helpers import compile_quick


def masked_by(kind: str, value: float) -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        if kind == "added":
            scores = scores + torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, value)
        elif kind == "where":
            scores = torch.where(hidden, value, scores)
        else:
            scores = scores.masked_fill(hidden, value)
        return scores.softmax(-1) @ v

    return fn


@pytest.mark.parametrize("kind", ["added", "where", "masked_fill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [None, -1e30])
def test_a_row_of_a_huge_number_is_the_mean(
    kind: str, dtype: torch.dtype, value: float | None
) -> None:
    fn = masked_by(kind, torch.finfo(dtype).min if value is None else value)
    hidden = HIDDEN.clone()
    hidden[2] = True
    inputs = [*(tensor.to(dtype) for tensor in qkv()), hidden]
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else TOLERANCE
    assert compare_forward(fn, compile_quick(fn), inputs, tolerance).kernel_calls == 1
    out, _ = run_poisoned(compile_quick(fn), inputs)
    mean = inputs[2].float().mean(2)
    torch.testing.assert_close(out[:, :, 2].float(), mean, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["added", "where", "masked_fill"])
def test_gradients_beside_rows_of_the_lowest_number(kind: str) -> None:
    """Of all rows where scores are replaced. What is added leaves eager's autograd the derivative
    of scores that rounding has lost, in rows whose output depends on no query and no key: there the
    op's is 0, and only the other rows are compared."""
    attention, hidden = masked_by(kind, torch.finfo(torch.float32).min), HIDDEN.clone()
    hidden[2] = True
    rows = [0, 1, 3, 4, 5] if kind == "added" else list(range(6))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, hidden)[:, :, rows]

    assert compare_with_eager(fn, compile_quick(fn), qkv()).kernel_calls == 1


@pytest.mark.parametrize("kind", ["added", "where", "masked_fill"])
def test_a_row_of_minus_infinity_is_zero(kind: str) -> None:
    """Eager's is NaN (contract 10); all other rows are eager's."""
    fn, hidden = masked_by(kind, float("-inf")), HIDDEN.clone()
    hidden[2] = True
    inputs = [*qkv(), hidden]
    with torch.no_grad():
        out, outcome = run_poisoned(compile_quick(fn), inputs)
    expected = fn(*inputs)
    assert only_spec(outcome).bias is not None
    assert expected[:, :, 2].isnan().all()
    torch.testing.assert_close(out, expected.nan_to_num(0.0), **TOLERANCE)


def test_float16_cannot_hold_what_replaces_scores() -> None:
    fn = masked_by("masked_fill", torch.finfo(torch.float16).min)
    inputs = [*(tensor.half() for tensor in qkv()), HIDDEN]
    assert "replaced by -65504 in float16" in left_for(fn, inputs)
    fn = masked_by("masked_fill", float("-inf"))
    tolerance = {"rtol": 1e-2, "atol": 1e-2}
    outcome = compare_forward(fn, compile_quick(fn), inputs, tolerance)
    assert outcome.kernel_calls == 1


def test_replaced_scores_stay_hidden_under_a_large_bias() -> None:
    """Replaced after a bias was added, the bias is gone; replaced before, it is still added."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = (q @ k.mT + bias).masked_fill(HIDDEN, torch.finfo(torch.float32).min)
        return ((scores + bias) * 0.5).softmax(-1) @ v

    bias = randn(4, 6, 6) * 50
    bias[:, 3] = float("-inf")
    bias[:, 3, 0] = 1.0
    outcome = compare_with_eager(fn, compile_quick(fn), [*qkv(), bias])
    assert outcome.kernel_calls == 1


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e4, float("-inf")])
def test_a_row_with_a_sink_and_nothing_else(lowest: float) -> None:
    """The row is not shifted to where its own scores would count beside the sink."""
    mask = torch.zeros(6, 6).masked_fill(HIDDEN, lowest)
    mask[2] = lowest
    inputs = [*qkv(), randn(4), mask]
    outcome = compare_with_eager(sink_attention, compile_quick(sink_attention), inputs)
    assert only_spec(outcome).has_sink
    out, _ = run_poisoned(compile_quick(sink_attention), inputs)
    assert out[:, :, 2].eq(0).all()
