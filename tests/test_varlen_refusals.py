"""What the op for variable lengths refuses: bad calls, and derivatives that it does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from varlen_inputs import (
    arguments,
    attention_varlen,
    backward_call,
    fake_metadata,
    good_call,
    lengths,
    qkv,
)

from fa_inductor import varlen_ops
from fa_inductor.errors import (
    DerivativeError,
    DeviceError,
    DtypeError,
    FaInductorError,
    ShapeError,
    UnknownKernelError,
)

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
