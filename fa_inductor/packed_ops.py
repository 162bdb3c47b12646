"""The custom op for q, k and v that are views of one packed tensor and are differentiated.

`torch.ops.fa_inductor.attention_packed(packed, q, k, v, scale, causal, out_order, deterministic,
kernel)` is `attention` of three views of `packed`; its gradient is one tensor, into which the
kernel writes the gradients of the three where they belong. With `attention`, autograd would put
them together afterwards: a copy of all three.

packed: a contiguous tensor with just the elements of the three views. q, k, v: each (B, H, S, D),
its four strides and its offset in elements from the first of packed, nine numbers. The rest, and
the results (out, lse), are as in `ops.py`. Gradient: packed's shape, dtype and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernels, op_autograd, op_calls, op_checks, op_memory, repairs, torch_compat
from .call_cache import Call
from .errors import ShapeError
from .op_schemas import define_four, implement
from .problem import Gradients, Inputs, Problem
from .spec import default_scale

View = Sequence[int]

_REST = "int[9] q, int[9] k, int[9] v, float? scale, str causal, "
_FORWARD = (
    f"(Tensor packed, {_REST}str out_order, bool deterministic, str kernel) -> "
    "(Tensor out, Tensor lse)"
)
_BACKWARD = (
    "(Tensor grad_out, Tensor? grad_lse, Tensor packed, Tensor out, Tensor lse, "
    f"{_REST}bool deterministic, str kernel) -> Tensor grad_packed"
)

(
    attention_packed,
    attention_packed_forward,
    attention_packed_backward,
    attention_packed_gradients,
) = define_four("attention_packed", _FORWARD, _BACKWARD)

_NONE = (None,) * 5  # bias, sink, lengths and rng: a packed call has none


def _views(packed: Tensor, *views: View) -> list[Tensor]:
    """The views of a real tensor, detached."""
    return [torch_compat.view_as(packed, v[:4], v[4:8], v[8]) for v in views]


def _fake_views(packed: Tensor, *views: View) -> list[Tensor]:
    offset = packed.storage_offset()
    return [packed.as_strided(v[:4], v[4:8], offset + v[8]) for v in views]


def _refuse_tangents(name: str, *tensors: Tensor | None) -> None:
    """Here, as the views have lost them."""
    if forward_ad._current_level >= 0:
        op_calls.refuse_tangents(name, tensors)


def _check(packed: Tensor, *views: View) -> None:
    elements = sum(b * h * s * d for b, h, s, d, *_ in views)
    if elements != packed.numel():
        raise ShapeError(
            f"packed {tuple(packed.shape)} has {packed.numel()} elements, but q, k and v have "
            f"{elements} together."
        )
    if not packed.is_contiguous():  # the views are counted from a contiguous one
        raise ShapeError(f"packed must be contiguous, got strides {packed.stride()}.")


def _forward(
    packed: Tensor,
    q: View,
    k: View,
    v: View,
    scale: float | None,
    causal: str,
    out_order: str,
    deterministic: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    _check(packed, q, k, v)
    _refuse_tangents("attention_packed", packed)
    tensors = _views(packed, q, k, v)
    arguments = (scale, causal, out_order, deterministic, kernel)
    return op_calls.attention_forward(tensors[0], tensors[1], tensors[2], *arguments)


def _forward_fake(
    packed: Tensor,
    q: View,
    k: View,
    v: View,
    scale: float | None,
    causal: str,
    out_order: str,
    deterministic: bool,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    _check(packed, q, k, v)
    inputs = Inputs(*_fake_views(packed, q, k, v))
    op_checks.check_inputs(inputs, Problem(scale or 0.0, causal), out_order)
    kernels.check_known(kernel)
    return op_memory.outputs(inputs.q, inputs.v, out_order, True)


def _gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    packed: Tensor,
    out: Tensor,
    lse: Tensor,
    q: View,
    k: View,
    v: View,
    scale: float | None,
    causal: str,
    deterministic: bool,
    kernel: str,
) -> Tensor:
    _check(packed, q, k, v)
    _refuse_tangents("attention_packed_backward", packed, grad_out, grad_lse, out, lse)
    views = (tuple(q), tuple(k), tuple(v))
    scalars = (*views, scale, causal, deterministic, kernel, grad_lse is None)
    looked_at = (packed, out, lse, grad_out) if grad_lse is None else ()
    saved = (out, lse, grad_out, grad_lse)
    ready = op_calls.calls.ready(scalars, looked_at) if looked_at else None
    if ready is not None:
        repeat, made = ready
        inputs, grads = _views(packed, *views), _views(made[0], *views)
        repeat((*inputs, *_NONE, *saved, *grads, None, None))
        return made[0]
    return _first_gradients(
        Inputs(*_views(packed, *views)),
        Problem(
            default_scale(q[3]) if scale is None else scale, causal, deterministic=deterministic
        ),
        saved,
        packed,
        views,
        kernel,
        (scalars, looked_at),
    )


def _first_gradients(
    inputs: Inputs,
    problem: Problem,
    saved: Any,
    packed: Tensor,
    views: tuple[View, View, View],
    kernel: str,
    key: tuple[Any, Sequence[Tensor]],
) -> Tensor:
    out, lse, grad_out, grad_lse = saved
    op_checks.check_gradient(inputs, problem, grad_out, grad_lse, out, lse)
    grad_packed = op_memory.fresh(packed, packed.shape, packed.stride())
    grads = Gradients(*_views(grad_packed, *views))
    readable = repairs.readable_inputs(inputs, kernel)
    if (
        readable is not inputs
        or repairs.readable_saved(saved, kernel) is not saved
        or not all(inputs.q.shape)
    ):
        made = op_calls.attention_gradients(
            *(grad_out, grad_lse, *inputs[:3], out, lse),
            *(problem.scale, problem.causal, problem.deterministic, kernel),
        )
        for grad, own in zip(grads[:3], made, strict=True):
            grad.copy_(own)
        return grad_packed
    implementation = kernels.load(kernel)
    with op_calls.device_of(packed):
        repeat = implementation.backward(problem, inputs, out, lse, grad_out, grad_lse, grads)
    scalars, looked_at = key
    if repeat is not None and looked_at:
        op_calls.calls.add(scalars, looked_at, Call(looked_at, (grad_packed,), repeat))
    return grad_packed


def _gradients_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    packed: Tensor,
    out: Tensor,
    lse: Tensor,
    q: View,
    k: View,
    v: View,
    scale: float | None,
    causal: str,
    deterministic: bool,
    kernel: str,
) -> Tensor:
    _check(packed, q, k, v)
    inputs = Inputs(*_fake_views(packed, q, k, v))
    op_checks.check_gradient(inputs, Problem(scale or 0.0, causal), grad_out, grad_lse, out, lse)
    kernels.check_known(kernel)
    return op_memory.fresh(packed, packed.shape, packed.stride())


# --- Autograd -------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed, q, k, v, scale, causal, _, deterministic, kernel = inputs
    ctx.save_for_backward(packed, *output)
    ctx.arguments = (q, k, v, scale, causal, deterministic, kernel)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    packed, out, lse = ctx.saved_tensors
    if grad_out is None and grad_lse is None:
        return (None,) * 9
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad = attention_packed_backward(grad_out, grad_lse, packed, out, lse, *ctx.arguments)
    return (grad, *(None,) * 8)


implement("attention_packed attention_packed_forward", _forward, _forward_fake)
implement("attention_packed_backward attention_packed_gradients", _gradients, _gradients_fake)
op_autograd.differentiable("attention_packed", _setup_context, _differentiate)
