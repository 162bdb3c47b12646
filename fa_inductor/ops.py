"""The custom ops that stand for attention in a compiled graph.

`torch.ops.fa_inductor.attention(q, k, v, scale, causal, out_order, deterministic, kernel, ...)`
returns (out, lse); `attention_backward(...)` the gradients of q, k and v, `attention_backward_all`
those of bias and sink too. Dynamo and Inductor never look inside; the name of the kernel is an
argument, so that a cached graph can only ever run the kernel it was compiled for. Below autograd
they become `attention_forward`, `attention_gradients` and `attention_gradients_all`.

`attention_inference(q, k, v, scale, causal, out_order, kernel, ...)` is for graphs that are never
differentiated: it takes (B, S, H, D) tensors, as FlashAttention does, and returns out alone, so. In
a compiled graph the transposes to it are free, and a call costs the CPU a third less.

Shapes: q (B, Hq, Sq, D); k (B, Hkv, Sk, D); v (B, Hkv, Sk, Dv); Hq a multiple of Hkv. What the
other arguments mean: `fa_inductor.problem.Problem` and `Inputs`.
out: (B, Hq, Sq, Dv), q's dtype, dense, dimensions in memory in the order `out_order` ("BSHD").
lse: (B, Hq, Sq), float32 (float64 for float64), contiguous, natural logarithm, the sink taken in
    and dropout not; (0,) where `with_lse` is false, and then there is no backward.
Gradients: their input's shape and dtype; those of q, k, v dense in (B, S, H, D) order, those of
    bias and sink contiguous, or (0,) where they are not asked for.

A row without a visible key gives 0, lse -inf (the sink's logit with a sink), and no gradient, as
PyTorch's own attention does since 2.5; so do rows past `seqlens_q`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import kernels, op_autograd, op_calls, op_checks, op_memory
from .op_schemas import (
    attention,
    attention_backward,
    attention_backward_all,
    attention_forward,
    attention_gradients,
    attention_gradients_all,
    attention_inference,
    implement,
)
from .problem import Inputs, Problem

__all__ = [
    "attention",
    "attention_backward",
    "attention_backward_all",
    "attention_forward",
    "attention_gradients",
    "attention_gradients_all",
    "attention_inference",
]

_EXTRAS: tuple[Any, ...] = (None, None, None, None, None, 0.0, None, None, 0.0)


def _bound(extras: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(bias, sink, seqlens_q, seqlens_k, rng), (dropout_p, window_left, window_right, softcap),
    with the defaults that PyTorch has left out."""
    full = (*extras, *_EXTRAS[len(extras) :])
    return full[:5], full[5:]


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    out_order: str,
    deterministic: bool,
    kernel: str,
    *extras: Any,
) -> tuple[Tensor, Tensor]:
    with_lse = extras[9] if len(extras) > 9 else True
    tensors, (dropout_p, left, right, softcap) = _bound(extras[:9])
    problem = Problem(scale or 0.0, causal, left, right, softcap, dropout_p, deterministic)
    op_checks.check_inputs(Inputs(q, k, v, *tensors), problem, out_order)
    kernels.check_known(kernel)
    return op_memory.outputs(q, v, out_order, with_lse)


def _inference_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    out_order: str,
    kernel: str,
    *extras: Any,
) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    full = (*extras, *_EXTRAS[len(extras) :], False)
    out, _ = _forward_fake(q, k, v, scale, causal, out_order, False, kernel, *full)
    return out.transpose(1, 2)


def _gradients_all_fake(
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
    bias_grad: bool,
    sink_grad: bool,
    *extras: Any,
) -> tuple[Tensor, ...]:
    tensors, (dropout_p, left, right, softcap) = _bound(extras)
    problem = Problem(scale or 0.0, causal, left, right, softcap, dropout_p, deterministic)
    inputs = Inputs(q, k, v, *tensors)
    op_checks.check_gradient(inputs, problem, grad_out, grad_lse, out, lse)
    op_checks.check_wanted(inputs, bias_grad, sink_grad)
    kernels.check_known(kernel)
    return (
        *op_memory.gradients(q, k, v),
        op_memory.optional_gradient(inputs.bias, bias_grad, q),
        op_memory.optional_gradient(inputs.sink, sink_grad, q),
    )


def _gradients_fake(*args: Any) -> tuple[Tensor, ...]:
    return _gradients_all_fake(*args[:11], False, False, *args[11:])[:3]


implement("attention attention_forward", op_calls.attention_forward, _forward_fake)
implement("attention_inference", op_calls.attention_inference, _inference_fake)
implement("attention_backward attention_gradients", op_calls.attention_gradients, _gradients_fake)
implement(
    "attention_backward_all attention_gradients_all",
    op_calls.attention_gradients_all,
    _gradients_all_fake,
)
op_autograd.register()
