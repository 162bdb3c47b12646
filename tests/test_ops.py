"""The contract of the attention ops: schema, metadata, and what bad calls raise.

What the numbers are is held by `test_reference_kernel.py`, derivatives that exist and that do
not by `test_op_derivatives.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_inputs import LAYOUTS, ORDER_IDS, ORDERS, Inputs, arguments, qkv
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fa_inductor import ops
from fa_inductor.errors import (
    DeviceError,
    DtypeError,
    FaInductorError,
    ShapeError,
    UnknownKernelError,
)
from helpers import clone_inputs
from poison import poisoned

all_layouts = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())


def backward_arguments(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """A call of `ops.attention_backward` for what `ops.attention` gave."""
    out, lse = ops.attention(q, k, v, *arguments())
    grad_out = torch.randn(()).to(out.dtype).expand(out.shape)  # the strides of out.sum()'s
    grad_lse = torch.randn(lse.shape).to(lse.dtype)
    return grad_out, grad_lse, q, k, v, out, lse, None, "none", False, "reference"


# --- Metadata -----------------------------------------------------------------------------------


@all_layouts
def test_opcheck_of_the_forward(make: Callable[[], Inputs]) -> None:
    """Schema, fake, autograd (through both outputs) and dynamic AOTAutograd agree (GB-04)."""
    inputs = [tensor.requires_grad_() for tensor in clone_inputs(*make())]
    with poisoned():
        torch.library.opcheck(ops.attention, (*inputs, *arguments("top_left")))


@pytest.mark.parametrize("layout", ["packed", "GQA", "Dv > D", "float64", "Sk=0"])
def test_opcheck_of_the_forward_without_derivatives(layout: str) -> None:
    """What `attention` becomes below autograd promises the same metadata."""
    call = (*LAYOUTS[layout](), *arguments("top_left"))
    with poisoned():
        torch.library.opcheck(ops.attention_forward, call)
        assert metadata(ops.attention_forward(*call)) == metadata(ops.attention(*call))


@all_layouts
def test_opcheck_of_the_backward(make: Callable[[], Inputs]) -> None:
    """The gradient op is a well-formed op too, with a gradient of lse ..."""
    with poisoned():
        torch.library.opcheck(ops.attention_backward, backward_arguments(*make()))


def test_opcheck_of_the_backward_without_lse() -> None:
    """... and without."""
    call = list(backward_arguments(*qkv()))
    call[1] = None
    with poisoned():
        torch.library.opcheck(ops.attention_backward, tuple(call))


def metadata(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors]


def fake_metadata(mode: FakeTensorMode, op: Any, call: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in call]
    with mode:
        return metadata(op(*fakes))


def assert_fake_equals_real(mode: FakeTensorMode, inputs: Inputs, order: tuple[int, ...]) -> None:
    forward = (*inputs, *arguments(order=order))
    assert fake_metadata(mode, ops.attention, forward) == metadata(ops.attention(*forward))
    backward = backward_arguments(*inputs)
    real = metadata(ops.attention_backward(*backward))
    assert fake_metadata(mode, ops.attention_backward, backward) == real


@pytest.mark.parametrize("order", ORDERS, ids=ORDER_IDS)
def test_fake_strides_are_the_real_ones_in_all_orders(order: tuple[int, ...]) -> None:
    """out, lse, dq, dk and dv have the strides that tracing promised (ST-04)."""
    mode = FakeTensorMode()
    for k_order, v_order in itertools.product(ORDERS, ORDERS):
        inputs = qkv(hkv=2, dv=16, orders=(order, k_order, v_order))
        assert_fake_equals_real(mode, inputs, order)


@all_layouts
def test_fake_strides_are_the_real_ones(make: Callable[[], Inputs]) -> None:
    """The same for views, sizes of 0 and 1, grouped heads and every dtype (ST-04)."""
    mode = FakeTensorMode()
    for order in ORDERS:
        assert_fake_equals_real(mode, make(), order)


@pytest.mark.parametrize("order", ORDERS, ids=ORDER_IDS)
def test_out_lies_in_memory_as_asked(order: tuple[int, ...]) -> None:
    """out is dense in `out_order` whatever the inputs' layout is; lse is contiguous."""
    for make in LAYOUTS.values():
        q, k, v = make()
        out, lse = ops.attention(q, k, v, *arguments(order=order))
        assert out.shape == (*q.shape[:3], v.shape[3])
        assert out.permute(*order, 3).is_contiguous()
        assert (lse.shape, lse.is_contiguous()) == (q.shape[:3], True)
        assert out.dtype == q.dtype
        assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)


# --- Bad calls ----------------------------------------------------------------------------------


def call_with(**changed: Any) -> list[Any]:
    """A good call with some arguments replaced."""
    q, k, v = qkv()
    names = ("scale", "causal", "out_order", "deterministic", "kernel")
    good = {"q": q, "k": k, "v": v, **dict(zip(names, arguments(), strict=True))}
    return list({**good, **changed}.values())


def size(*shape: int) -> Tensor:
    return torch.randn(shape)


BAD_CALLS: dict[str, tuple[dict[str, Any], type[FaInductorError], str]] = {
    "rank 3": ({"q": size(4, 5, 8)}, ShapeError, r"q \(4, 5, 8\)"),
    "rank 5": ({"v": size(1, 2, 4, 6, 8)}, ShapeError, r"v \(1, 2, 4, 6, 8\)"),
    "batches differ": ({"q": size(3, 4, 5, 8)}, ShapeError, r"q \(3, 4, 5, 8\)"),
    "head dims differ": ({"q": size(2, 4, 5, 16)}, ShapeError, r"q \(2, 4, 5, 16\)"),
    "key lengths differ": ({"v": size(2, 4, 7, 8)}, ShapeError, r"v \(2, 4, 7, 8\)"),
    "key heads differ": ({"v": size(2, 2, 6, 8)}, ShapeError, r"v \(2, 2, 6, 8\)"),
    "head ratio": (
        {"k": size(2, 3, 6, 8), "v": size(2, 3, 6, 8)},
        ShapeError,
        "4 query heads are not a multiple of the 3 key",
    ),
    "no key heads": (
        {"k": size(2, 0, 6, 8), "v": size(2, 0, 6, 8)},
        ShapeError,
        "4 query heads are not a multiple of the 0 key",
    ),
    "mixed dtypes": ({"k": size(2, 4, 6, 8).half()}, DtypeError, "k torch.float16"),
    "integers": (dict.fromkeys("qkv", torch.ones(2, 4, 6, 8).long()), DtypeError, "torch.int64"),
    "complex": (dict.fromkeys("qkv", size(2, 4, 6, 8) * 1j), DtypeError, "torch.complex64"),
    "float8": (
        dict.fromkeys("qkv", size(2, 4, 6, 8).to(torch.float8_e4m3fn)),
        DtypeError,
        "torch.float8_e4m3fn",
    ),
    "two devices": ({"k": size(2, 4, 6, 8).to("meta")}, DeviceError, "cpu, meta and cpu"),
    "unknown kernel": ({"kernel": "fa5"}, UnknownKernelError, "'fa5'.*Did you mean 'fa4'"),
    "unknown causal": ({"causal": "lower"}, ShapeError, "causal='lower'.*bottom_right"),
    "order too short": ({"out_order": [0, 1, 2]}, ShapeError, r"out_order=\[0, 1, 2\]"),
    "order repeats": ({"out_order": [0, 0, 1, 3]}, ShapeError, r"out_order=\[0, 0, 1, 3\]"),
    "D not innermost": ({"out_order": [0, 1, 3, 2]}, ShapeError, r"out_order=\[0, 1, 3, 2\]"),
}
all_bad_calls = pytest.mark.parametrize(
    ("changed", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys()
)


@all_bad_calls
def test_bad_calls_name_what_is_wrong(
    changed: dict[str, Any], error: type[FaInductorError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ops.attention(*call_with(**changed))


@all_bad_calls
def test_bad_calls_fail_while_tracing_already(
    changed: dict[str, Any], error: type[FaInductorError], message: str
) -> None:
    with pytest.raises(error, match=message.replace("cpu, meta and cpu", "meta")):
        fake_metadata(FakeTensorMode(), ops.attention, tuple(call_with(**changed)))


@pytest.mark.parametrize(("sq", "sk"), [(5, 6), (6, 5)])
def test_fa4_refuses_a_mask_that_it_would_align_otherwise(sq: int, sk: int) -> None:
    """Top-left causal with unequal lengths never reaches FA4's bottom-right mask (MK-03)."""
    with pytest.raises(ShapeError, match=f"Sq {sq} and Sk {sk}"):
        ops.attention(*qkv(sq=sq, sk=sk), *arguments("top_left", kernel="fa4"))


@pytest.mark.parametrize("kernel", ["cudnn", "fa5"])
def test_the_gradient_op_knows_kernels_by_name_too(kernel: str) -> None:
    call = backward_arguments(*qkv())
    with pytest.raises(UnknownKernelError, match=kernel):
        ops.attention_backward(*call[:-1], kernel)


BAD_GRADIENT_CALLS: dict[str, tuple[dict[str, Any], type[FaInductorError], str]] = {
    "grad_out's length": ({"grad_out": size(2, 4, 1, 8)}, ShapeError, r"\(2, 4, 1, 8\)"),
    "grad_lse's batch": ({"grad_lse": size(1, 4, 5)}, ShapeError, r"\(1, 4, 5\)"),
    "lse's batch": ({"lse": size(1, 4, 5)}, ShapeError, r"\(1, 4, 5\)"),
    "out's length": ({"out": size(2, 4, 1, 8)}, ShapeError, r"\(2, 4, 1, 8\)"),
    "key lengths differ": ({"v": size(2, 4, 7, 8)}, ShapeError, r"v \(2, 4, 7, 8\)"),
    "grad_out's dtype": ({"grad_out": size(2, 4, 5, 8).double()}, DtypeError, "torch.float64"),
    "unknown causal": ({"causal": "lower"}, ShapeError, "causal='lower'.*bottom_right"),
}


@pytest.mark.parametrize(
    ("changed", "error", "message"), BAD_GRADIENT_CALLS.values(), ids=BAD_GRADIENT_CALLS.keys()
)
def test_bad_calls_of_the_gradient_op(
    changed: dict[str, Any], error: type[FaInductorError], message: str
) -> None:
    """Nothing is broadcast to fit, and no unknown mask is taken for a known one."""
    names = [argument.name for argument in ops.attention_backward._schema.arguments]
    call = dict(zip(names, backward_arguments(*qkv()), strict=True))
    with pytest.raises(error, match=message):
        ops.attention_backward(*{**call, **changed}.values())
