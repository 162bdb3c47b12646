"""How autograd, autocast and transforms meet the attention ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import op_schemas, torch_compat
from .errors import DerivativeError
from .op_calls import no_tangents


class _Arguments(NamedTuple):
    """A call of `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    causal: str
    out_order: str
    deterministic: bool
    kernel: str
    bias: Tensor | None = None
    sink: Tensor | None = None
    seqlens_q: Tensor | None = None
    seqlens_k: Tensor | None = None
    rng: Tensor | None = None
    dropout_p: float = 0.0
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    with_lse: bool = True


_OPTIONAL = (8, 9)  # where bias and sink stand


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = _Arguments(*inputs)
    out, lse = output
    extras = (call.bias, call.sink, call.seqlens_q, call.seqlens_k, call.rng)
    ctx.save_for_backward(call.q, call.k, call.v, out, lse, *extras)
    ctx.arguments = (call.scale, call.causal, call.deterministic, call.kernel)
    ctx.numbers = (call.dropout_p, call.window_left, call.window_right, call.softcap)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *extras = ctx.saved_tensors
    count = len(ctx.needs_input_grad)  # of the arguments that were given
    if grad_out is None and grad_lse is None:
        return (None,) * count
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    wanted = [i < count and ctx.needs_input_grad[i] for i in _OPTIONAL]
    saved = (grad_out, grad_lse, q, k, v, out, lse, *ctx.arguments)
    if any(wanted):
        made = op_schemas.attention_backward_all(*saved, *wanted, *extras, *ctx.numbers)
        optional = [grad if want else None for grad, want in zip(made[3:], wanted, strict=True)]
        grads = (*made[:3], *(None,) * 5, *optional)
    else:
        grads = op_schemas.attention_backward(*saved, *extras, *ctx.numbers)
    return (*grads, *(None,) * count)[:count]


def differentiable(
    name: str, setup_context: Callable[..., None], differentiate: Callable[..., Any]
) -> None:
    """Put the Autograd kernels of `name` and `name`_backward into the ops' library.

    setup_context, differentiate: as `torch.library.register_autograd` takes them.
    """
    op = getattr(torch.ops.fa_inductor, f"{name}_forward").default
    kernel = torch_compat.autograd_kernel(op, setup_context, differentiate)
    op_schemas.library.impl(name, _refusing(op, kernel, name), "Autograd", with_keyset=True)
    _without_derivative(name)


def _without_derivative(name: str, ending: str = "") -> None:
    """The Autograd kernel of a gradient op: the op, and an error instead of its derivative."""
    op = getattr(torch.ops.fa_inductor, f"{name}_gradients{ending}").default
    name = f"{name}_backward"

    def differentiate_twice(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise DerivativeError(
            f"fa_inductor.{name} has no derivative (second derivatives of attention); "
            "run this part under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )

    kernel = torch_compat.autograd_kernel(op, lambda ctx, inputs, output: None, differentiate_twice)
    checked = _refusing(op, kernel, name)
    op_schemas.library.impl(name + ending, checked, "Autograd", with_keyset=True)


def _refusing(op: Any, kernel: Any, name: str) -> Any:
    """The Autograd kernel, refusing by name what PyTorch would get wrong or explain badly.

    Forward-mode derivatives of an op without a formula would silently be zero. Where no
    derivative can be asked for, as in a compiled graph, the way down is short.
    """

    def checked(keyset: Any, *args: Any) -> Any:
        if torch_compat.no_derivative_is_taken():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        tensors = [argument for argument in args if isinstance(argument, Tensor)]
        if torch_compat.needs_functorch_gradient(tensors):
            raise DerivativeError(
                f"fa_inductor.{name} has no rule for torch.func transforms (grad, vjp, hessian); "
                "differentiate with torch.autograd, or compile: the pass leaves such code alone."
            )
        if torch_compat.has_tangent(tensors):
            raise no_tangents(name)
        return kernel(keyset, *args)

    return checked


def _cast_under_autocast(device_type: str, key: torch._C.DispatchKey) -> Any:
    """The rule of `F.scaled_dot_product_attention`: q, k, v and the mask in autocast's dtype."""

    def cast(tensor: Any, dtype: torch.dtype) -> Any:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible and tensor.device.type == device_type else tensor

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            arguments = [cast(q, dtype), cast(k, dtype), cast(v, dtype), *rest]
            if len(rest) > 5 and rest[5] is not None:
                arguments[8] = cast(rest[5], dtype)
            return op_schemas.attention(*arguments)

    return kernel


def register() -> None:
    """Put the Autograd and Autocast kernels into the ops' library."""
    differentiable("attention", _setup_context, _differentiate)
    _without_derivative("attention", "_all")
    for device_type in ("cuda", "cpu"):
        key = f"Autocast{device_type.upper()}"
        autocast = _cast_under_autocast(device_type, getattr(torch._C.DispatchKey, key))
        op_schemas.library.impl("attention", autocast, key)
