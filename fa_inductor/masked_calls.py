"""What the masked ops do with real tensors; as `op_calls.py` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import masked_checks, op_calls, repairs
from .kernels.variants import MASKED as KERNELS
from .masked_problem import MaskedCall
from .variant_calls import Variant, first_forward, first_gradients


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
    ready = op_calls.calls.ready(scalars, looked_at)
    if ready is not None:
        repeat, made = ready
        repeat((*given, *made))
        return made[0], made[1]
    call = MaskedCall(
        *(q, k, v, mask, read, list(blocks), scale, out_order, deterministic, kernel),
        sink=sink,
        softcap=softcap,
    )
    return first_forward(MASKED, call, (scalars, looked_at))


def _readable_by_kernels(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bools as bytes: FA4 has no tensors of bools."""
    return [t.view(torch.uint8) if t.dtype == torch.bool else t for t in tensors]


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
    ready = op_calls.calls.ready(scalars, looked_at)
    if ready is not None:
        repeat, made = ready
        repeat((*given, *made[:3], made[3] if sink_grad else None))
        return tuple(made)
    call = MaskedCall(
        *(q, k, v, mask, read, list(blocks), scale, "BSHD", deterministic, kernel),
        sink=sink,
        softcap=softcap,
    )
    return first_gradients(MASKED, call, saved, sink_grad, (scalars, looked_at))


def _readable(call: MaskedCall) -> MaskedCall:
    """`call` itself, or with copies in place of what its kernel cannot read."""
    dense = call.inputs.dense
    readable = repairs.readable_inputs(dense, call.kernel)
    if readable is dense:
        return call
    return call._replace(q=readable.q, k=readable.k, v=readable.v, sink=readable.sink)


MASKED = Variant(
    "attention_masked",
    MaskedCall,
    ("sink",),
    ("mask_tensors", "blocks"),
    masked_checks,
    KERNELS,
    attention_masked_forward,
    attention_masked_gradients,
    _readable,
    repairs.readable_saved,
)
