"""What the masked ops do with real tensors; as `op_calls.py` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import masked_checks, op_calls, repairs
from .call_cache import Call
from .kernels import masked
from .masked_problem import MaskedCall
from .problem import Gradients

_Saved = tuple[Tensor, Tensor, Tensor, Tensor | None]


def attention_masked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: str,
    mask_tensors: Sequence[Tensor],
    blocks: Sequence[Tensor],
    scale: float | None,
    out_order: str,
    deterministic: bool,
    kernel: str,
    sink: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    if forward_ad._current_level >= 0:
        op_calls.refuse_tangents("attention_masked", (q, k, v, sink))
    read = _readable_by_kernels(mask_tensors)
    given = (q, k, v, sink, *read, *blocks[:4])
    looked_at = [tensor for tensor in given if tensor is not None]
    scalars = ("masked", mask, scale, out_order, deterministic, kernel, softcap, sink is None)
    known = op_calls.calls.find(scalars, looked_at)
    if known is not None:
        made = known.allocate(looked_at)
        if made is not None:
            known.repeat((*given, *made))
            op_calls.calls.repeated += 1
            return made[0], made[1]
    call = MaskedCall(
        *(q, k, v, mask, read, list(blocks), scale, out_order, deterministic, kernel),
        sink=sink,
        softcap=softcap,
    )
    out, lse, repeat = _first_forward(call)
    if repeat is not None:
        op_calls.calls.add(scalars, looked_at, Call(looked_at, (out, lse), repeat))
    return out, lse


def _readable_by_kernels(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bools as bytes: FA4 has no tensors of bools."""
    return [t.view(torch.uint8) if t.dtype == torch.bool else t for t in tensors]


def _first_forward(call: MaskedCall) -> tuple[Tensor, Tensor, op_calls.Repeat | None]:
    masked_checks.check_call(call)
    implementation = masked.load(call.kernel)
    readable = _readable(call)
    if readable is not call:
        # The copies have a metadata class of their own, which may be known already.
        return *attention_masked_forward(*readable), None
    out, lse = masked_checks.outputs(call)
    if _is_empty(call):
        return out.zero_(), op_calls.lse_without_keys(lse, call.sink), None
    inputs, visible = call.inputs, call.visible
    implementation.check(call.problem, inputs, visible)
    with op_calls.device_of(call.q):
        repeat = implementation.forward(call.problem, inputs, visible, out, lse)
    return out, lse, repeat


def attention_masked_gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: str,
    mask_tensors: Sequence[Tensor],
    blocks: Sequence[Tensor],
    scale: float | None,
    deterministic: bool,
    kernel: str,
    sink_grad: bool,
    sink: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and sink; the last without an element if not wanted."""
    saved = (out, lse, grad_out, grad_lse)
    if forward_ad._current_level >= 0:
        op_calls.refuse_tangents("attention_masked_backward", (q, k, v, sink, *saved))
    sink_grad = sink_grad and sink is not None
    read = _readable_by_kernels(mask_tensors)
    given = (q, k, v, sink, *read, *blocks[4:], *saved)
    looked_at = [tensor for tensor in given if tensor is not None]
    numbers = (mask, scale, deterministic, kernel, softcap)
    scalars = ("masked backward", sink_grad, *numbers, sink is None, grad_lse is None)
    known = op_calls.calls.find(scalars, looked_at)
    if known is not None:
        made = known.allocate(looked_at)
        if made is not None:
            known.repeat((*given, *made[:3], made[3] if sink_grad else None))
            op_calls.calls.repeated += 1
            return tuple(made)
    call = MaskedCall(
        *(q, k, v, mask, read, list(blocks), scale, "BSHD", deterministic, kernel),
        sink=sink,
        softcap=softcap,
    )
    gradients, repeat = _first_gradients(call, saved, sink_grad)
    if repeat is not None:
        op_calls.calls.add(scalars, looked_at, Call(looked_at, gradients, repeat))
    return gradients


def _first_gradients(
    call: MaskedCall, saved: _Saved, sink_grad: bool
) -> tuple[tuple[Tensor, ...], op_calls.Repeat | None]:
    out, lse, grad_out, grad_lse = saved
    masked_checks.check_gradient(call, grad_out, grad_lse, out, lse)
    implementation = masked.load(call.kernel)
    readable, readable_saved = _readable(call), repairs.readable_saved(saved, call.kernel)
    if readable is not call or readable_saved is not saved:
        out, lse, grad_out, grad_lse = readable_saved
        made = attention_masked_gradients(
            *(grad_out, grad_lse, *readable[:3], out, lse, *readable[3:7]),
            *(readable.deterministic, readable.kernel, sink_grad, readable.sink, readable.softcap),
        )
        return made, None
    made = masked_checks.gradients(call, sink_grad)
    memory = Gradients(made[0], made[1], made[2], sink=made[3] if sink_grad else None)
    if _is_empty(call):
        op_calls.zero(memory, grad_lse)
        return made, None
    inputs, visible = call.inputs, call.visible
    implementation.check(call.problem, inputs, visible)
    with op_calls.device_of(call.q):
        repeat = implementation.backward(
            call.problem, inputs, visible, out, lse, grad_out, grad_lse, memory
        )
    return made, repeat


def _is_empty(call: MaskedCall) -> bool:
    """Whether there is no query or no key."""
    return 0 in call.scores


def _readable(call: MaskedCall) -> MaskedCall:
    """`call` itself, or with copies in place of what its kernel cannot read."""
    inputs = call.inputs
    readable = repairs.readable_inputs(inputs, call.kernel)
    if readable is inputs:
        return call
    return call._replace(q=readable.q, k=readable.k, v=readable.v, sink=readable.sink)
