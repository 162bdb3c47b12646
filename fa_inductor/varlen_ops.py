"""The custom ops for attention over sequences of different lengths, packed without padding.

`torch.ops.fa_inductor.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
max_seqlen_k, scale, causal, deterministic, kernel, ...)` returns (out, lse);
`attention_varlen_backward(...)` the gradients of q, k, v and sink. Below autograd they become
`attention_varlen_forward` and `attention_varlen_gradients`, as in `ops.py`.

What the tensors are: `fa_inductor.varlen_problem.VarlenInputs`; the numbers:
`fa_inductor.problem.Problem`, with causal "none" or "bottom_right", per sequence.
out: (Tq, Hq, Dv), q's dtype, contiguous.
lse: (Hq, Tq), float32 (float64 for float64), contiguous, natural logarithm, the sink taken in.
Gradients: contiguous, of their input's shape and dtype; that of the sink (0,) if not asked for.

A row without a visible key gives 0, lse -inf (the sink's logit with a sink), and no gradient.
The bounds must hold and the lengths add up to Tq and Tk: nobody can check that without waiting
for the GPU. Autocast leaves the op alone, as it leaves FlashAttention-4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import op_autograd, varlen_calls, varlen_checks
from .kernels import varlen
from .op_schemas import define_four, implement
from .varlen_problem import VarlenCall

_REST = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float? scale, str causal, bool deterministic, str kernel, "
)
_EXTRAS = "Tensor? sink=None, int? window_left=None, int? window_right=None, float softcap=0.0"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_REST}{_EXTRAS}) -> (Tensor out, Tensor lse)"
_BACKWARD = (
    "(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_REST}bool sink_grad, {_EXTRAS}) -> "
    "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sink)"
)

(
    attention_varlen,
    attention_varlen_forward,
    attention_varlen_backward,
    attention_varlen_gradients,
) = define_four("attention_varlen", _FORWARD, _BACKWARD)

_SINK = VarlenCall._fields.index("sink")


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = VarlenCall(*args)
    varlen_checks.check_call(call)
    varlen.check_varlen(call.kernel)
    return varlen_checks.outputs(call.q, call.v)


def _gradients_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    plain, sink_grad, extras = rest[: _SINK - 3], rest[_SINK - 3], rest[_SINK - 2 :]
    call = VarlenCall(q, k, v, *plain, *extras)
    varlen_checks.check_gradient(call, grad_out, grad_lse, out, lse)
    varlen.check_varlen(call.kernel)
    return varlen_checks.gradients(call, sink_grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = VarlenCall(*inputs)
    tensors = (*call[:3], *output, call.cu_seqlens_q, call.cu_seqlens_k, call.sink)
    ctx.save_for_backward(*tensors)
    ctx.plain, ctx.extras = call[5:_SINK], call[_SINK + 1 :]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    count = len(ctx.needs_input_grad)  # of the arguments that were given
    if grad_out is None and grad_lse is None:
        return (None,) * count
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, sink = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    sink_grad = count > _SINK and ctx.needs_input_grad[_SINK]
    made = attention_varlen_backward(
        *(grad_out, grad_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *ctx.plain),
        sink_grad,
        sink,
        *ctx.extras,
    )
    grads = [*made[:3], *(None,) * (_SINK - 3), made[3] if sink_grad else None]
    return (*grads, *(None,) * count)[:count]


implement(
    "attention_varlen attention_varlen_forward",
    varlen_calls.attention_varlen_forward,
    _forward_fake,
)
implement(
    "attention_varlen_backward attention_varlen_gradients",
    varlen_calls.attention_varlen_gradients,
    _gradients_fake,
)
op_autograd.differentiable("attention_varlen", _setup_context, _differentiate)
