"""The custom ops that stand for attention in a compiled graph.

`torch.ops.fa_inductor.attention(q, k, v, scale, causal, out_order, deterministic, kernel)`
returns (out, lse); `torch.ops.fa_inductor.attention_backward(...)` its gradients. Dynamo and
Inductor never look inside; the name of the kernel is an argument, so that a cached graph can
only ever run the kernel it was compiled for. Below autograd `attention` becomes
`attention_forward`, the same without derivatives: what a compiled graph calls is not slowed
down by an autograd kernel in Python.

Shapes: q (B, Hq, Sq, D); k (B, Hkv, Sk, D); v (B, Hkv, Sk, Dv); Hq a multiple of Hkv.
out: (B, Hq, Sq, Dv), q's dtype, dense, dimensions in memory in the order `out_order`.
lse: (B, Hq, Sq), float32 (float64 for float64), contiguous, natural logarithm.
Gradients: their input's shape and dtype, dense in (B, S, H, D) order.

A row without a key (bottom-right causal with Sq > Sk, or Sk = 0) gives 0, lse -inf, and no
gradient, as PyTorch's own attention does since 2.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import kernels, op_checks, torch_compat
from .errors import DerivativeError, ShapeError
from .spec import BSHD_ORDER, default_scale
from .symbolic import Dim

NAMESPACE = "fa_inductor"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_library = torch.library.Library(NAMESPACE, "DEF")
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, float? scale, str causal, int[] out_order, "
    "bool deterministic, str kernel"
)
for _name in ("attention", "attention_forward"):
    _library.define(f"{_name}({_ARGUMENTS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, "
    "Tensor out, Tensor lse, float? scale, str causal, bool deterministic, str kernel) "
    "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    tags=_TAGS,
)
attention = torch.ops.fa_inductor.attention.default
attention_forward = torch.ops.fa_inductor.attention_forward.default
attention_backward = torch.ops.fa_inductor.attention_backward.default


# --- Allocation, the same for fake and real tensors -------------------------------------------


def _causal_for(kernel: str, causal: str, sq: int, sk: int) -> str:
    """FA4 aligns causal masks bottom-right; that is top-left when the lengths are equal."""
    if kernel == "fa4" and causal == "top_left":
        if sq != sk:
            raise ShapeError(
                f"Kernel fa4 aligns causal masks bottom-right; top_left needs Sq == Sk, got "
                f"Sq {sq} and Sk {sk}."
            )
        return "bottom_right"
    return causal


def _allocate_outputs(q: Tensor, v: Tensor, out_order: Sequence[int]) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = _empty_in_order(q, (batch, heads, length, v.shape[3]), out_order)
    return out, q.new_empty((batch, heads, length), dtype=op_checks.lse_dtype(q.dtype))


def _empty_in_order(like: Tensor, size: Sequence[Dim], order: Sequence[int]) -> Tensor:
    """A dense tensor whose dimensions lie in memory in the order `order`, outermost first."""
    stride: list[Dim] = [1] * len(order)
    step: Dim = 1
    for dim in reversed(order):
        stride[dim] = step
        step = step * size[dim]
    return like.new_empty_strided(size, stride)


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grads = [_empty_in_order(tensor, tensor.shape, BSHD_ORDER) for tensor in (q, k, v)]
    return grads[0], grads[1], grads[2]


def _no_tangents(name: str) -> DerivativeError:
    """PyTorch would take forward-mode derivatives of an op without a formula as zero."""
    return DerivativeError(
        f"fa_inductor.{name} has no forward-mode derivative (jvp); run this part under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


# --- Implementations ----------------------------------------------------------------------------


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    out_order: Sequence[int],
    deterministic: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    if torch_compat.has_tangent_below_autograd((q, k, v)):
        raise _no_tangents("attention")
    op_checks.inputs_once(*op_checks.metadata(q, k, v), causal, tuple(out_order))
    implementation = kernels.load(kernel)
    causal = _causal_for(kernel, causal, q.shape[2], k.shape[2])
    out, lse = _allocate_outputs(q, v, out_order)
    if lse.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    scale = default_scale(q.shape[3]) if scale is None else scale
    implementation.forward(q, k, v, out, lse, scale=scale, causal=causal)
    return out, lse


def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    out_order: Sequence[int],
    deterministic: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    op_checks.check_inputs(*op_checks.metadata(q, k, v), causal, out_order)
    kernels.check_known(kernel)
    return _allocate_outputs(q, v, out_order)


def _attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: str,
    deterministic: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    gradient = op_checks.gradient_metadata(grad_out, grad_lse, out, lse)
    op_checks.gradient_once(*op_checks.metadata(q, k, v), causal, gradient)
    implementation = kernels.load(kernel)
    causal = _causal_for(kernel, causal, q.shape[2], k.shape[2])
    grads = _allocate_gradients(q, k, v)
    if lse.numel() == 0 or k.shape[2] == 0:
        for grad in grads:
            grad.zero_()
        return grads
    scale = default_scale(q.shape[3]) if scale is None else scale
    implementation.backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        out,
        lse,
        *grads,
        scale=scale,
        causal=causal,
        deterministic=deterministic,
    )
    return grads


def _attention_backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: str,
    deterministic: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    gradient = op_checks.gradient_metadata(grad_out, grad_lse, out, lse)
    op_checks.check_gradient(*op_checks.metadata(q, k, v), causal, gradient)
    kernels.check_known(kernel)
    return _allocate_gradients(q, k, v)


# --- Autograd -------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, causal, _, deterministic, kernel = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.arguments = (scale, causal, deterministic, kernel)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * 8
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = attention_backward(grad_out, grad_lse, q, k, v, out, lse, *ctx.arguments)
    return (*grads, None, None, None, None, None)


def _differentiate_twice(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise DerivativeError(
        "fa_inductor.attention_backward has no derivative (second derivatives of attention); "
        "run this part under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )


def _refusing(op: Any, kernel: Any, count: int, name: str) -> Any:
    """The Autograd kernel, refusing by name what PyTorch would get wrong or explain badly.

    Forward-mode derivatives of an op without a formula would silently be zero. Where no
    derivative can be asked for, as in a compiled graph, the way down is short.
    """

    def checked(keyset: Any, *args: Any) -> Any:
        if torch_compat.no_derivative_is_taken():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        if torch_compat.needs_functorch_gradient(args[:count]):
            raise DerivativeError(
                f"fa_inductor.{name} has no rule for torch.func transforms (grad, vjp, hessian); "
                "differentiate with torch.autograd, or compile: the pass leaves such code alone."
            )
        if torch_compat.has_tangent(args[:count]):
            raise _no_tangents(name)
        return kernel(keyset, *args)

    return checked


def _cast_under_autocast(device_type: str, key: torch._C.DispatchKey) -> Any:
    """The rule of `F.scaled_dot_product_attention`: cast q, k and v to autocast's dtype."""

    def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible and tensor.device.type == device_type else tensor

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return attention(cast(q, dtype), cast(k, dtype), cast(v, dtype), *rest)

    return kernel


def _register() -> None:
    for key in ("CPU", "CUDA"):
        _library.impl("attention", _attention, key)
        _library.impl("attention_forward", _attention, key)
        _library.impl("attention_backward", _attention_backward, key)
    torch.library.register_fake(attention, _attention_fake, lib=_library)
    torch.library.register_fake(attention_forward, _attention_fake, lib=_library)
    torch.library.register_fake(attention_backward, _attention_backward_fake, lib=_library)
    first = torch_compat.autograd_kernel(attention_forward, _setup_context, _differentiate)
    second = torch_compat.autograd_kernel(
        attention_backward, lambda ctx, inputs, output: None, _differentiate_twice
    )
    _library.impl(
        "attention",
        _refusing(attention_forward, first, 3, "attention"),
        "Autograd",
        with_keyset=True,
    )
    _library.impl(
        "attention_backward",
        _refusing(attention_backward, second, 7, "attention_backward"),
        "Autograd",
        with_keyset=True,
    )
    for device_type in ("cuda", "cpu"):
        key = f"Autocast{device_type.upper()}"
        autocast = _cast_under_autocast(device_type, getattr(torch._C.DispatchKey, key))
        _library.impl("attention", autocast, key)


_register()
