"""Attention over packed sequences: numbers, metadata, derivatives, and what bad calls raise.

Numbers are held against an oracle that takes one sequence after another in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sequence_oracle import packed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from fa_inductor import varlen_ops
from fa_inductor.errors import (
    DerivativeError,
    DeviceError,
    DtypeError,
    FaInductorError,
    ShapeError,
    UnknownKernelError,
)
from helpers import clone_inputs, relative_error
from poison import poisoned

attention_varlen = varlen_ops.attention_varlen

HEADS, DIMS = (4, 2), (8, 16)
STARTS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "unequal lengths": ([0, 3, 9, 10], [0, 5, 9, 16]),
    "more queries than keys": ([0, 6, 11], [0, 2, 5]),
    "an empty query": ([0, 3, 3, 7], [0, 4, 6, 9]),
    "an empty key": ([0, 3, 5, 9], [0, 4, 4, 7]),
    "both empty, first and last": ([0, 0, 5, 5], [0, 0, 6, 6]),
    "length 1": ([0, 1, 2, 4], [0, 1, 4, 5]),
    "one sequence": ([0, 7], [0, 9]),
}
NUMBERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "left window": {"window_left": 2},
    "window": {"window_left": 1, "window_right": 2},
    "causal window": {"causal": True, "window_left": 2},
    "softcap": {"softcap": 1.5, "causal": True},
}
# Relative errors in the norm: float32 inside, one rounding of the output for the short ones.
ERROR = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-3}


def lengths(starts: Sequence[int]) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


def longest(starts: Sequence[int]) -> int:
    return max(b - a for a, b in itertools.pairwise(starts))


def qkv(total_q: int, total_k: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    heads_q, heads_k = HEADS
    shapes = ((total_q, heads_q, DIMS[0]), (total_k, heads_k, DIMS[0]), (total_k, heads_k, DIMS[1]))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def arguments(
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    sink: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    kernel: str = "reference",
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> tuple[Any, ...]:
    """The arguments of the op after q, k and v."""
    given = (lengths(starts_q), lengths(starts_k), longest(starts_q), longest(starts_k))
    kind = "bottom_right" if causal else "none"
    return (*given, scale, kind, False, kernel, sink, window_left, window_right, softcap)


def good_call(sink: Tensor | None = None, **numbers: Any) -> tuple[Any, ...]:
    starts = STARTS["an empty key"]
    return (*qkv(9, 7), *arguments(*starts, sink, **numbers))


def backward_call(sink_grad: bool = True, **numbers: Any) -> tuple[Any, ...]:
    """A call of `attention_varlen_backward` for what `attention_varlen` gave."""
    q, k, v, *rest = good_call(torch.randn(4), **numbers)
    out, lse = attention_varlen(q, k, v, *rest)
    saved = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)
    return (*saved, *rest[:8], sink_grad, *rest[8:])


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


def metadata(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors]


def fake_metadata(op: Any, call: Sequence[Any]) -> list[tuple[Any, ...]]:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in call]
    with mode:
        return metadata(op(*fakes))


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


# --- Bad calls ------------------------------------------------------------------------------------


def size(*shape: int) -> Tensor:
    return torch.randn(shape)


BAD_CALLS: dict[str, tuple[dict[str, Any], type[FaInductorError], str]] = {
    "rank 4": ({"q": size(1, 9, 4, 8)}, ShapeError, r"q \(1, 9, 4, 8\)"),
    "head dims differ": ({"q": size(9, 4, 16)}, ShapeError, r"q \(9, 4, 16\)"),
    "key lengths differ": ({"v": size(8, 2, 16)}, ShapeError, r"v \(8, 2, 16\)"),
    "key heads differ": ({"v": size(7, 4, 16)}, ShapeError, r"v \(7, 4, 16\)"),
    "head ratio": ({"q": size(9, 3, 8)}, ShapeError, "3 query heads are not a multiple of the 2"),
    "no key heads": (
        {"k": size(7, 0, 8), "v": size(7, 0, 16)},
        ShapeError,
        "4 query heads are not a multiple of the 0",
    ),
    "mixed dtypes": ({"k": size(7, 2, 8).half()}, DtypeError, "k torch.float16"),
    "integers": (
        {"q": size(9, 4, 8).long(), "k": size(7, 2, 8).long(), "v": size(7, 2, 16).long()},
        DtypeError,
        "torch.int64",
    ),
    "two devices": ({"k": size(7, 2, 8).to("meta")}, DeviceError, "k on meta"),
    "lengths elsewhere": (
        {"cu_seqlens_q": lengths([0, 3, 5, 9]).to("meta")},
        DeviceError,
        "cu_seqlens_q on meta",
    ),
    "sink elsewhere": ({"sink": size(4).to("meta")}, DeviceError, "sink on meta"),
    "long lengths": (
        {"cu_seqlens_q": lengths([0, 3, 5, 9]).long()},
        DtypeError,
        "cu_seqlens_q must be int32, got torch.int64",
    ),
    "lengths in a column": (
        {"cu_seqlens_k": lengths([0, 4, 4, 7])[:, None]},
        ShapeError,
        r"cu_seqlens_k must be \(batch \+ 1,\), got \(4, 1\)",
    ),
    "no start": (
        {"cu_seqlens_q": lengths([]), "cu_seqlens_k": lengths([])},
        ShapeError,
        r"cu_seqlens_q must be \(batch \+ 1,\), got \(0,\)",
    ),
    "sequences": ({"cu_seqlens_k": lengths([0, 7])}, ShapeError, "different numbers of sequences"),
    "negative bound": ({"max_seqlen_k": -1}, ShapeError, "max_seqlen_k=-1"),
    "top left": ({"causal": "top_left"}, ShapeError, "causal='top_left'.*bottom_right"),
    "sink's shape": ({"sink": size(2)}, ShapeError, r"sink must be \(4,\)"),
    "sink's dtype": ({"sink": size(4).long()}, ShapeError, "sink must be .* got torch.int64"),
    "softcap": ({"softcap": -1.0}, ShapeError, "softcap=-1"),
    "unknown kernel": ({"kernel": "fa5"}, UnknownKernelError, "'fa5'.*Did you mean 'fa4'"),
    "dense kernel": ({"kernel": "cudnn"}, UnknownKernelError, "'cudnn' takes no variable lengths"),
}
all_bad_calls = pytest.mark.parametrize(
    ("changed", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys()
)
NAMES = [argument.name for argument in attention_varlen._schema.arguments]


@all_bad_calls
def test_bad_calls_name_what_is_wrong(
    changed: dict[str, Any], error: type[FaInductorError], message: str
) -> None:
    """... at run time, while tracing, and of the gradient op."""
    call = {**dict(zip(NAMES, good_call(), strict=True)), **changed}
    with pytest.raises(error, match=message):
        attention_varlen(*call.values())
    if error is not DeviceError:  # FakeTensorMode asks for one device itself
        with pytest.raises(error, match=message):
            fake_metadata(attention_varlen, list(call.values()))
    names = [argument.name for argument in varlen_ops.attention_varlen_backward._schema.arguments]
    backward = {**dict(zip(names, backward_call(), strict=True)), **changed}
    with pytest.raises(error, match=message):
        varlen_ops.attention_varlen_backward(*backward.values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grad_out": size(9, 4, 1)}, r"grad_out must be \(9, 4, 16\)"),
        ({"out": size(1, 4, 16)}, r"out must be \(9, 4, 16\)"),
        ({"lse": size(9, 4)}, r"lse must be \(4, 9\)"),
        ({"grad_lse": size(4, 1)}, r"grad_lse must be \(4, 9\)"),
        ({"grad_out": size(9, 4, 16).double()}, "grad_out must be torch.float32"),
        ({"lse": size(4, 9).double()}, "lse must be torch.float32"),
    ],
)
def test_bad_calls_of_the_gradient_op(changed: dict[str, Tensor], message: str) -> None:
    names = [argument.name for argument in varlen_ops.attention_varlen_backward._schema.arguments]
    call = {**dict(zip(names, backward_call(), strict=True)), **changed}
    with pytest.raises(FaInductorError, match=message):
        varlen_ops.attention_varlen_backward(*call.values())


def test_fa4_names_what_it_cannot_take() -> None:
    with pytest.raises(DeviceError, match="fa4 runs on CUDA tensors"):
        attention_varlen(*good_call(kernel="fa4"))
    with pytest.raises(ShapeError, match="window bounds from 0 on, got -1"):
        attention_varlen(*good_call(kernel="fa4", window_left=-1))


# --- Derivatives ----------------------------------------------------------------------------------

REST = arguments([0, 3, 9], [0, 4, 7])
KEYS, VALUES = qkv(9, 7)[1:]


def square(q: Tensor) -> Tensor:
    return attention_varlen(q, KEYS, VALUES, *REST)[0].square().sum()


def double_backward() -> Any:
    q = qkv(9, 7)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(square(q), q, create_graph=True)
    gradient.square().sum().backward()


def forward_mode() -> Any:
    q = qkv(9, 7)[0]
    return torch.func.jvp(square, (q,), (q,))


def forward_mode_without_grad() -> Any:
    with torch.no_grad():
        return forward_mode()


def forward_over_reverse() -> Any:
    call = backward_call()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(call[0], call[0])
        return varlen_ops.attention_varlen_backward(dual, *call[1:])


def hessian() -> Any:
    return torch.func.hessian(square)(qkv(9, 7)[0])


def forward_mode_below_autograd() -> Any:
    """What a compiled graph does with a dual tensor."""
    q = qkv(9, 7)[0]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        return varlen_ops.attention_varlen_forward(dual, KEYS, VALUES, *REST)


def forward_over_reverse_below_autograd() -> Any:
    call = backward_call()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(call[1], call[1])
        return varlen_ops.attention_varlen_gradients(call[0], dual, *call[2:])


@pytest.mark.parametrize(
    "derive",
    [
        double_backward,
        forward_mode,
        forward_mode_without_grad,
        forward_over_reverse,
        forward_mode_below_autograd,
        forward_over_reverse_below_autograd,
        hessian,
    ],
    ids=lambda derive: derive.__name__.replace("_", " "),
)
def test_missing_derivatives_are_refused_by_name(derive: Callable[[], Any]) -> None:
    with pytest.raises(DerivativeError, match=r"fa_inductor\.attention_varlen"):
        derive()
