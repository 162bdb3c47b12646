"""Attention over packed sequences: numbers and metadata.

Numbers are held against an oracle that takes one sequence after another in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sequence_oracle import packed
from torch import Tensor
from varlen_inputs import (
    ERROR,
    HEADS,
    NUMBERS,
    STARTS,
    arguments,
    attention_varlen,
    backward_call,
    fake_metadata,
    good_call,
    lengths,
    metadata,
    qkv,
)

from fa_inductor import varlen_ops
from helpers import clone_inputs, relative_error
from poison import poisoned

# --- Numbers --------------------------------------------------------------------------------------


def check(
    starts: tuple[Sequence[int], Sequence[int]],
    dtype: torch.dtype = torch.float32,
    *,
    with_sink: bool = False,
    **numbers: Any,
) -> None:
    """out, lse and all gradients, of a loss over both."""
    leaves = [t.requires_grad_() for t in qkv(starts[0][-1], starts[1][-1], dtype)]
    if with_sink:
        leaves.append(torch.randn(HEADS[0], dtype=dtype, requires_grad=True))
    exact = clone_inputs(*leaves, dtype=torch.float64)
    with poisoned():
        out, lse = attention_varlen(*leaves[:3], *arguments(*starts, *leaves[3:], **numbers))
    expected, expected_lse = packed(*exact[:3], *starts, *exact[3:], **numbers)
    seen = ~torch.isneginf(expected_lse)
    assert torch.equal(~torch.isneginf(lse), seen)
    tolerance = ERROR[dtype]
    with torch.no_grad():
        assert relative_error(out, expected) < tolerance
        assert relative_error(lse[seen], expected_lse[seen]) < ERROR[lse.dtype]
    weight, weight_lse = torch.randn_like(expected), torch.randn_like(expected_lse)
    with poisoned():
        loss = (out * weight.to(dtype)).sum() + (lse * weight_lse.to(lse.dtype))[seen].sum()
        grads = torch.autograd.grad(loss, leaves)
    loss = (expected * weight.to(dtype)).sum() + (expected_lse * weight_lse)[seen].sum()
    for grad, wanted in zip(grads, torch.autograd.grad(loss, exact), strict=True):
        assert grad.dtype == dtype
        assert torch.isfinite(grad).all()
        assert relative_error(grad, wanted) < 4 * tolerance


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS.keys())
def test_out_lse_and_gradients(
    starts: tuple[Sequence[int], Sequence[int]], with_sink: bool, numbers: dict[str, Any]
) -> None:
    check(starts, with_sink=with_sink, **numbers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    check(STARTS["an empty key"], dtype, with_sink=True, causal=True, window_left=3, softcap=2.0)


def test_no_sequence_sees_another() -> None:
    """NaN in one sequence stays there, forward and backward."""
    starts_q, starts_k = STARTS["unequal lengths"]
    q, k, v = qkv(10, 16)
    for tensor, (first, last) in ((q, (3, 9)), (k, (5, 9)), (v, (5, 9))):
        tensor[first:last] = float("nan")
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = attention_varlen(*leaves, *arguments(starts_q, starts_k))
    grads = torch.autograd.grad(out.sum(), leaves)
    inside = torch.zeros(10, dtype=torch.bool)
    inside[3:9] = True
    assert torch.equal(torch.isnan(out).all((1, 2)), inside)
    assert torch.equal(torch.isnan(lse).all(0), inside)
    for grad, (first, last) in zip(grads, ((3, 9), (5, 9), (5, 9)), strict=True):
        assert not torch.isnan(torch.cat([grad[:first], grad[last:]])).any()


def test_rows_of_no_sequence_give_zero() -> None:
    """What the reference kernel promises where the lengths do not add up to Tq and Tk."""
    starts_q, starts_k = [1, 4, 6], [2, 5, 6]
    leaves = [tensor.requires_grad_() for tensor in qkv(8, 9)]
    with poisoned():
        out, lse = attention_varlen(*leaves, *arguments(starts_q, starts_k))
        grads = torch.autograd.grad(out.sum(), leaves)
    outside = [0, 6, 7]
    assert (out[outside] == 0).all()
    assert torch.isneginf(lse[:, outside]).all()
    expected, _ = packed(leaves[0], leaves[1], leaves[2], starts_q, starts_k)
    torch.testing.assert_close(out[1:6].double(), expected, rtol=1e-5, atol=1e-6)
    for grad, rows in zip(grads, (outside, [0, 1, 6, 7, 8], [0, 1, 6, 7, 8]), strict=True):
        assert (grad[rows] == 0).all()


@pytest.mark.parametrize("totals", [(0, 0), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
def test_nothing_to_attend_to(totals: tuple[int, int], with_sink: bool) -> None:
    check(([0, totals[0]], [0, totals[1]]), with_sink=with_sink)


def test_rows_of_no_sequence_have_the_sink_as_their_lse() -> None:
    sink = torch.randn(4, requires_grad=True)
    q, k, v = qkv(8, 9)
    with poisoned():
        _, lse = attention_varlen(q, k, v, *arguments([1, 4, 6], [2, 5, 6], sink))
        outside = lse[:, [0, 6, 7]]
        (grad,) = torch.autograd.grad(outside.sum(), sink)
    torch.testing.assert_close(outside, sink[:, None].expand(4, 3))
    torch.testing.assert_close(grad, torch.full((4,), 3.0))


def test_no_sequence_at_all() -> None:
    leaves = [tensor.requires_grad_() for tensor in qkv(3, 4)]
    starts = lengths([0])
    with poisoned():
        rest = (starts, starts, 0, 0, None, "none", False, "reference")
        out, lse = attention_varlen(*leaves, *rest)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    assert all((grad == 0).all() for grad in grads)


def test_only_the_sink_wants_a_gradient() -> None:
    sink = torch.randn(4, requires_grad=True)
    q, k, v, *rest = good_call(sink, causal=True)
    out, _ = attention_varlen(q, k, v, *rest)
    exact = sink.detach().double().requires_grad_()
    starts = (rest[0].tolist(), rest[1].tolist())
    expected, _ = packed(q, k, v, *starts, exact, causal=True)
    (grad,) = torch.autograd.grad(out.square().sum(), sink)
    (wanted,) = torch.autograd.grad(expected.square().sum(), exact)
    assert relative_error(grad, wanted) < 1e-5


@pytest.mark.parametrize("wanted", ["out", "lse"])
def test_a_loss_over_one_output(wanted: str) -> None:
    starts = STARTS["unequal lengths"]
    leaves = [tensor.requires_grad_() for tensor in qkv(10, 16, torch.float64)]
    exact = clone_inputs(*leaves)
    index = ("out", "lse").index(wanted)
    with poisoned():
        loss = attention_varlen(*leaves, *arguments(*starts))[index].square().sum()
        grads = torch.autograd.grad(loss, leaves)
    loss = packed(*exact, *starts)[index].square().sum()
    expected = torch.autograd.grad(loss, exact, materialize_grads=True)
    torch.testing.assert_close(grads, expected)


# --- Metadata -------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    "contiguous": lambda: qkv(9, 7),
    "packed": lambda: list(torch.randn(9, 3, 4, 8).unbind(1)),
    "heads first": lambda: [torch.randn(4, 9, 8).transpose(0, 1) for _ in range(3)],
    "sliced": lambda: [torch.randn(20, 4, 11)[1:19:2, :, 1:9] for _ in range(3)],
    "expanded": lambda: [torch.randn(9, 1, 8).expand(9, 4, 8) for _ in range(3)],
    "no query": lambda: qkv(0, 7),
    "no key": lambda: qkv(9, 0),
    "bfloat16": lambda: qkv(9, 7, torch.bfloat16),
    "float64": lambda: qkv(9, 7, torch.float64),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("sink_grad", [False, True], ids=["", "sink"])
def test_fake_is_real(make: Callable[[], list[Tensor]], sink_grad: bool) -> None:
    """Shapes, strides and dtypes of all results, in memory that starts as NaN."""
    q, k, v = make()
    sink = torch.randn(4, dtype=torch.float32) if sink_grad else None
    call = (q, k, v, *arguments([0, q.shape[0]], [0, k.shape[0]], sink))
    with poisoned():
        out, lse = attention_varlen(*call)
        below = varlen_ops.attention_varlen_forward(*call)
    assert not torch.isnan(out).any()
    assert metadata((out, lse)) == metadata(below) == fake_metadata(attention_varlen, call)
    assert (out.is_contiguous(), lse.is_contiguous()) == (True, True)
    grad_out = torch.ones((), dtype=out.dtype).expand(out.shape)
    saved = (grad_out, None, q, k, v, out, lse)
    backward = (*saved, *call[3:11], sink_grad, *call[11:])
    with poisoned():
        made = varlen_ops.attention_varlen_backward(*backward)
        below = varlen_ops.attention_varlen_gradients(*backward)
    assert metadata(made) == metadata(below)
    assert metadata(made) == fake_metadata(varlen_ops.attention_varlen_backward, backward)
    assert [tuple(t.shape) for t in made[:3]] == [tuple(t.shape) for t in (q, k, v)]
    assert made[3].shape == ((4,) if sink_grad else (0,))
    assert all(tensor.is_contiguous() and not torch.isnan(tensor).any() for tensor in made)


def test_opcheck() -> None:
    """Schema, fake, autograd and dynamic AOTAutograd agree."""
    q, k, v, *rest = good_call(torch.randn(4, requires_grad=True), causal=True, window_left=2)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    with poisoned():
        torch.library.opcheck(attention_varlen, (*leaves, *rest))
        torch.library.opcheck(attention_varlen, (*leaves, *rest[:8]))
        torch.library.opcheck(varlen_ops.attention_varlen_backward, backward_call())
        torch.library.opcheck(varlen_ops.attention_varlen_backward, backward_call(False))
