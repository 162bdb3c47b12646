"""The custom ops for attention whose mask is an expression over its places.

`torch.ops.fa_inductor.attention_masked(q, k, v, mask, mask_tensors, blocks, scale, out_order,
deterministic, kernel, sink, softcap)` returns (out, lse); `attention_masked_backward(...)` the
gradients of q, k, v and sink. Below autograd they become `attention_masked_forward` and
`attention_masked_gradients`, as in `ops.py`.

q, k, v, scale, out_order, kernel, sink, softcap, out, lse and gradients: as in `ops.py`.
mask: which (b, h, i, j) are visible, in the language of `fa_inductor.mask_text`.
mask_tensors: what it reads as t0, t1, ...; bool, uint8, int32 or int64.
blocks: the four results of `mask_blocks` for blocks of `masked_problem.QUERY_BLOCK` queries and
    `key_block(D)` keys, and, for a backward, its four by key. They must say what the mask says:
    a block that is not listed is never looked at. Nobody can check that without waiting for the
    GPU.

A row without a visible key gives 0, lse -inf (the sink's logit with a sink), and no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import masked_calls, masked_checks, op_autograd
from .kernels import masked
from .masked_problem import MaskedCall
from .op_schemas import define_four, implement

_MASK = "str mask, Tensor[] mask_tensors, Tensor[] blocks, float? scale, "
_EXTRAS = "Tensor? sink=None, float softcap=0.0"
_FORWARD = (
    f"(Tensor q, Tensor k, Tensor v, {_MASK}str out_order, bool deterministic, str kernel, "
    f"{_EXTRAS}) -> (Tensor out, Tensor lse)"
)
_BACKWARD = (
    "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_MASK}bool deterministic, str kernel, bool sink_grad, {_EXTRAS}) -> "
    "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sink)"
)

(
    attention_masked,
    attention_masked_forward,
    attention_masked_backward,
    attention_masked_gradients,
) = define_four("attention_masked", _FORWARD, _BACKWARD)

_SINK = MaskedCall._fields.index("sink")


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = MaskedCall(*args)
    masked_checks.check_call(call)
    masked.check_masked(call.kernel)
    return masked_checks.outputs(call)


def _gradients_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: str,
    mask_tensors: list[Tensor],
    blocks: list[Tensor],
    scale: float | None,
    deterministic: bool,
    kernel: str,
    sink_grad: bool,
    *extras: Any,
) -> tuple[Tensor, ...]:
    numbers = (mask, mask_tensors, blocks, scale, "BSHD", deterministic, kernel)
    call = MaskedCall(q, k, v, *numbers, *extras)
    masked_checks.check_gradient(call, grad_out, grad_lse, out, lse)
    masked.check_masked(call.kernel)
    return masked_checks.gradients(call, sink_grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = MaskedCall(*inputs)
    read, blocks = call.mask_tensors, call.blocks
    ctx.save_for_backward(*call[:3], *output, call.sink, *read, *blocks)
    ctx.mask, ctx.read = call.mask, len(read)
    ctx.numbers = (call.scale, call.deterministic, call.kernel)
    ctx.softcap = call.softcap
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    count = len(ctx.needs_input_grad)  # of the arguments that were given
    if grad_out is None and grad_lse is None:
        return (None,) * count
    q, k, v, out, lse, sink, *others = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    sink_grad = count > _SINK and ctx.needs_input_grad[_SINK]
    made = attention_masked_backward(
        *(grad_out, grad_lse, q, k, v, out, lse, ctx.mask, others[: ctx.read], others[ctx.read :]),
        *(*ctx.numbers, sink_grad, sink, ctx.softcap),
    )
    grads: list[Any] = [*made[:3], *(None,) * (_SINK - 3), made[3] if sink_grad else None]
    grads[4:6] = [None] * ctx.read, [None] * (len(others) - ctx.read)  # one for each of a list
    return (*grads, *(None,) * count)[:count]


implement(
    "attention_masked attention_masked_forward",
    masked_calls.attention_masked_forward,
    _forward_fake,
)
implement(
    "attention_masked_backward attention_masked_gradients",
    masked_calls.attention_masked_gradients,
    _gradients_fake,
)
op_autograd.differentiable("attention_masked", _setup_context, _differentiate)
