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
from attention_inputs import LAYOUTS, ORDER_IDS, ORDERS, Inputs, arguments, lengths, qkv, rng
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


def backward_arguments(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Any, ...]:
    """A call of `ops.attention_backward` for what `ops.attention` gave."""
    out, lse = ops.attention(q, k, v, *arguments(), **more)
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


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_opcheck_with_bias_sink_and_window(causal: str) -> None:
    """All that can be differentiated, and numbers after it."""
    tensors = (*qkv(hkv=2), torch.randn(2, 1, 5, 6), torch.randn(4))
    q, k, v, bias, sink = (tensor.requires_grad_() for tensor in tensors)
    more = {"bias": bias, "sink": sink, "window_left": 3, "window_right": 2, "softcap": 5.0}
    with poisoned():
        torch.library.opcheck(ops.attention, (q, k, v, *arguments(causal)), more)


@pytest.mark.parametrize("asked", itertools.product((True, False), repeat=2), ids=str)
def test_opcheck_of_the_backward_of_all(asked: tuple[bool, bool]) -> None:
    """Of bias and sink where they are asked for, with sequence lengths and dropout beside."""
    more = {
        "bias": torch.randn(1, 4, 5, 6),
        "sink": torch.randn(4),
        "seqlens_k": lengths(6, 2),
        "rng": rng(1),
        "dropout_p": 0.25,
    }
    with poisoned():
        call = backward_arguments(*qkv(hkv=2), **more)
        torch.library.opcheck(ops.attention_backward_all, (*call, *asked), more)
        torch.library.opcheck(ops.attention_gradients_all, (*call, *asked), more)


def test_opcheck_of_the_backward_without_lse() -> None:
    """... and without."""
    call = list(backward_arguments(*qkv()))
    call[1] = None
    with poisoned():
        torch.library.opcheck(ops.attention_backward, tuple(call))


def metadata(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors]


def fake_metadata(mode: FakeTensorMode, op: Any, call: dict[str, Any]) -> list[tuple[Any, ...]]:
    fakes = {
        n: mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for n, arg in call.items()
    }
    with mode:
        return metadata(op(**fakes))


def assert_fake_equals_real(
    mode: FakeTensorMode, inputs: Inputs, order: tuple[int, ...], **more: Any
) -> None:
    """`more`: arguments after the kernel's name."""
    forward = {**by_name(ops.attention, (*inputs, *arguments(order=order))), **more}
    assert fake_metadata(mode, ops.attention, forward) == metadata(ops.attention(**forward))
    backward = {**by_name(ops.attention_backward, backward_arguments(*inputs)), **more}
    real = metadata(ops.attention_backward(**backward))
    assert fake_metadata(mode, ops.attention_backward, backward) == real
    for asked in itertools.product((True, False) if more else (False,), repeat=2):
        backward.update(zip(("bias_grad", "sink_grad"), asked, strict=True))
        every = metadata(ops.attention_backward_all(**backward))
        assert fake_metadata(mode, ops.attention_backward_all, backward) == every
        assert every[:3] == real


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


BIASES: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: torch.randn(2, 4, 5, 6),
    "one for all heads": lambda: torch.randn(2, 1, 5, 6),
    "a number for each row": lambda: torch.randn(1, 1, 5, 1),
    "expanded": lambda: torch.randn(1, 1, 1, 6).expand(2, 4, 5, 6),
    "transposed": lambda: torch.randn(2, 4, 6, 5).mT,
    "cut out": lambda: torch.randn(2, 4, 5, 9)[..., 1:7],
    "bfloat16": lambda: torch.randn(2, 4, 5, 6).bfloat16(),
}


@pytest.mark.parametrize("make", BIASES.values(), ids=BIASES.keys())
def test_gradients_of_bias_and_sink_are_contiguous_fake_and_real(
    make: Callable[[], Tensor],
) -> None:
    """In their input's own shape and dtype, or without an element when not asked for (ST-04)."""
    inputs, bias, sink = qkv(hkv=2, dv=16), make(), torch.randn(8)[::2]
    assert_fake_equals_real(FakeTensorMode(), inputs, ORDERS[0], bias=bias, sink=sink)
    call = (*backward_arguments(*inputs), True, True)
    grads = ops.attention_backward_all(*call, bias=bias, sink=sink)[3:]
    assert metadata(grads) == metadata((bias.contiguous(), sink.contiguous()))
    unasked = ops.attention_backward_all(*call[:-2], False, False, bias=bias, sink=sink)[3:]
    assert [grad.shape for grad in unasked] == [(0,), (0,)]


def test_without_lse() -> None:
    """The same out, no lse, and an error instead of a gradient that would need it."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv())
    call = by_name(ops.attention, (q, k, v, *arguments()))
    with poisoned():
        out, lse = ops.attention(**call, with_lse=False)
        torch.testing.assert_close(out, ops.attention(**call)[0], rtol=0, atol=0)
    assert (lse.shape, lse.dtype) == ((0,), torch.float32)
    assert fake_metadata(FakeTensorMode(), ops.attention, {**call, "with_lse": False}) == metadata(
        (out, lse)
    )
    with pytest.raises(ShapeError, match="with_lse=False"):
        out.sum().backward()


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


def call_with(**changed: Any) -> dict[str, Any]:
    """A good call, by name, with some arguments replaced or added."""
    return {**by_name(ops.attention, (*qkv(), *arguments())), **changed}


def by_name(op: Any, call: tuple[Any, ...]) -> dict[str, Any]:
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, call, strict=False))  # what has a default may be left out


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
    "two devices": (
        {"k": size(2, 4, 6, 8).to("meta")},
        DeviceError,
        "q on cpu, k on meta, v on cpu",
    ),
    "a sink elsewhere": ({"sink": size(4).to("meta")}, DeviceError, "sink on meta"),
    "unknown kernel": ({"kernel": "fa5"}, UnknownKernelError, "'fa5'.*Did you mean 'fa4'"),
    "bias of rank 2": ({"bias": size(5, 6)}, ShapeError, r"bias \(5, 6\) .* \(2, 4, 5, 6\)"),
    "bias of fewer keys": ({"bias": size(2, 4, 5, 3)}, ShapeError, r"bias \(2, 4, 5, 3\)"),
    "bias of key heads": ({"bias": size(2, 2, 5, 6)}, ShapeError, r"bias \(2, 2, 5, 6\)"),
    "bool bias": ({"bias": size(2, 4, 5, 6) > 0}, DtypeError, "bias must .* torch.bool"),
    "sink of another size": ({"sink": size(2)}, ShapeError, r"sink must be \(4,\).* \(2,\)"),
    "integer sink": ({"sink": size(4).long()}, ShapeError, "sink must .* torch.int64"),
    "lengths of another size": ({"seqlens_k": lengths(6)}, ShapeError, r"seqlens_k .* \(1,\)"),
    "long lengths": ({"seqlens_q": torch.tensor([5, 5])}, ShapeError, "seqlens_q .* torch.int64"),
    "dropout without rng": ({"dropout_p": 0.5}, ShapeError, "needs rng"),
    "dropout_p beyond 1": ({"dropout_p": 1.5, "rng": rng(0)}, ShapeError, "dropout_p=1.5"),
    "dropout_p below 0": ({"dropout_p": -0.5, "rng": rng(0)}, ShapeError, "dropout_p=-0.5"),
    "rng of another dtype": ({"rng": rng(0).int()}, ShapeError, "rng must be .* torch.int32"),
    "rng of another size": ({"rng": rng(0)[:1]}, ShapeError, r"rng must be .* \(1,\)"),
    "negative softcap": ({"softcap": -1.0}, ShapeError, "softcap=-1.0"),
    "unknown causal": ({"causal": "lower"}, ShapeError, "causal='lower'.*bottom_right"),
    "order too short": ({"out_order": "BSH"}, ShapeError, "out_order='BSH'"),
    "order too long": ({"out_order": "BSHDD"}, ShapeError, "out_order='BSHDD'"),
    "order repeats": ({"out_order": "BBHD"}, ShapeError, "out_order='BBHD'"),
    "D not innermost": ({"out_order": "BHDS"}, ShapeError, "out_order='BHDS'"),
}
all_bad_calls = pytest.mark.parametrize(
    ("changed", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys()
)


@all_bad_calls
def test_bad_calls_name_what_is_wrong(
    changed: dict[str, Any], error: type[FaInductorError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ops.attention(**call_with(**changed))


@all_bad_calls
def test_bad_calls_fail_while_tracing_already(
    changed: dict[str, Any], error: type[FaInductorError], message: str
) -> None:
    with pytest.raises(error, match=message):
        fake_metadata(FakeTensorMode(), ops.attention, call_with(**changed))


@pytest.mark.parametrize(("sq", "sk"), [(5, 6), (6, 5)])
def test_fa4_refuses_a_mask_that_it_would_align_otherwise(sq: int, sk: int) -> None:
    """Top-left causal with unequal lengths never reaches FA4's bottom-right mask (MK-03)."""
    with pytest.raises(ShapeError, match=f"Sq {sq} and Sk {sk}"):
        ops.attention(*qkv(sq=sq, sk=sk), *arguments("top_left", kernel="fa4"))
    with pytest.raises(ShapeError, match="sequence lengths"):
        ops.attention(*qkv(sk=5), *arguments("top_left", kernel="fa4"), seqlens_k=lengths(5, 3))


@pytest.mark.parametrize("kernel", ["flash", "fa5"])
def test_the_gradient_ops_know_kernels_by_name_too(kernel: str) -> None:
    call = {**by_name(ops.attention_backward, backward_arguments(*qkv())), "kernel": kernel}
    more = {"bias_grad": False, "sink_grad": False}
    with pytest.raises(UnknownKernelError, match=kernel):
        ops.attention_backward(**call)
    with pytest.raises(UnknownKernelError, match=kernel):
        ops.attention_backward_all(**call, **more)
    with pytest.raises(UnknownKernelError, match=kernel):
        fake_metadata(FakeTensorMode(), ops.attention_backward, call)


BAD_GRADIENT_CALLS: dict[str, tuple[dict[str, Any], type[FaInductorError], str]] = {
    "grad_out's length": ({"grad_out": size(2, 4, 1, 8)}, ShapeError, r"\(2, 4, 1, 8\)"),
    "grad_lse's batch": ({"grad_lse": size(1, 4, 5)}, ShapeError, r"\(1, 4, 5\)"),
    "lse's batch": ({"lse": size(1, 4, 5)}, ShapeError, r"\(1, 4, 5\)"),
    "out's length": ({"out": size(2, 4, 1, 8)}, ShapeError, r"\(2, 4, 1, 8\)"),
    "key lengths differ": ({"v": size(2, 4, 7, 8)}, ShapeError, r"v \(2, 4, 7, 8\)"),
    "grad_out's dtype": ({"grad_out": size(2, 4, 5, 8).double()}, DtypeError, "torch.float64"),
    "unknown causal": ({"causal": "lower"}, ShapeError, "causal='lower'.*bottom_right"),
    "no lse": ({"lse": size(0)}, ShapeError, r"with_lse=False|lse must be .* \(0,\)"),
    "bias of fewer keys": ({"bias": size(2, 4, 5, 3)}, ShapeError, r"bias \(2, 4, 5, 3\)"),
    "dropout without rng": ({"dropout_p": 0.5}, ShapeError, "needs rng"),
    "a sink elsewhere": ({"sink": size(4).to("meta")}, DeviceError, "sink on meta"),
}


@pytest.mark.parametrize(
    ("changed", "error", "message"), BAD_GRADIENT_CALLS.values(), ids=BAD_GRADIENT_CALLS.keys()
)
def test_bad_calls_of_the_gradient_op(
    changed: dict[str, Any], error: type[FaInductorError], message: str
) -> None:
    """Nothing is broadcast to fit, and no unknown mask is taken for a known one."""
    call = {**by_name(ops.attention_backward, backward_arguments(*qkv())), **changed}
    more = {"bias_grad": False, "sink_grad": False}
    with pytest.raises(error, match=message):
        ops.attention_backward(**call)
    with pytest.raises(error, match=message):
        ops.attention_backward_all(**call, **more)
    with pytest.raises(error, match=message):
        fake_metadata(FakeTensorMode(), ops.attention_backward_all, {**call, **more})


@pytest.mark.parametrize("name", ["bias", "sink"])
def test_a_gradient_of_what_is_not_there(name: str) -> None:
    call = by_name(ops.attention_backward, backward_arguments(*qkv()))
    call.update(bias_grad=name == "bias", sink_grad=name == "sink")
    with pytest.raises(ShapeError, match=f"{name}_grad=True needs a {name}"):
        ops.attention_backward_all(**call)
    with pytest.raises(ShapeError, match=f"{name}_grad=True needs a {name}"):
        fake_metadata(FakeTensorMode(), ops.attention_backward_all, call)
