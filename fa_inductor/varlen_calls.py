"""What the ops for variable lengths do with real tensors; as `op_calls.py` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from . import op_calls, repairs, varlen_checks
from .kernels.variants import VARLEN as KERNELS
from .problem import Inputs, Saved
from .symbolic import Dim
from .variant_calls import Variant, first_forward, first_gradients
from .varlen_problem import VarlenCall, as_bhsd


def attention_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Dim,
    max_seqlen_k: Dim,
    scale: float | None,
    causal: str,
    deterministic: bool,
    kernel: str,
    sink: Tensor | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    if forward_ad._current_level >= 0:
        op_calls.refuse_tangents("attention_varlen", (q, k, v, sink))
    bounds, numbers = (max_seqlen_q, max_seqlen_k), (scale, causal, deterministic, kernel)
    extras = (window_left, window_right, softcap)
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k, sink)
    kind, looked_at = _looked_at(given)
    scalars = ("varlen", *bounds, *numbers, *extras, *kind)
    ready = op_calls.calls.ready(scalars, looked_at)
    if ready is not None:
        repeat, made = ready
        repeat((*given, *made))
        return made[0], made[1]
    arguments: tuple[Any, ...] = (*given[:5], *bounds, *numbers, sink, *extras)
    return first_forward(VARLEN, VarlenCall(*arguments), (scalars, looked_at))


def _looked_at(given: Sequence[Tensor | None]) -> tuple[tuple[bool, ...], list[Tensor]]:
    """The tensors whose metadata is compared, and which of `given` those are.

    One tensor that is both cu_seqlens_q and cu_seqlens_k is looked at once: PyTorch's guard on
    metadata wants different ones.
    """
    q_starts, k_starts = given[3:5]
    assert q_starts is not None
    assert k_starts is not None
    one = q_starts is k_starts
    missing = [tensor is None for tensor in given[5:]]
    kind = (one, q_starts.data_ptr() == k_starts.data_ptr(), *missing)
    places = [place for place in range(len(given)) if not (one and place == 4)]
    return kind, [tensor for place in places if (tensor := given[place]) is not None]


def attention_varlen_gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Dim,
    max_seqlen_k: Dim,
    scale: float | None,
    causal: str,
    deterministic: bool,
    kernel: str,
    sink_grad: bool,
    sink: Tensor | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and sink; the last without an element if not wanted."""
    saved = (out, lse, grad_out, grad_lse)
    given = (q, k, v, cu_seqlens_q, cu_seqlens_k, sink, *saved)
    if forward_ad._current_level >= 0:
        op_calls.refuse_tangents("attention_varlen_backward", given)
    sink_grad = sink_grad and sink is not None
    bounds, numbers = (max_seqlen_q, max_seqlen_k), (scale, causal, deterministic, kernel)
    extras = (window_left, window_right, softcap)
    kind, looked_at = _looked_at(given)
    scalars = ("varlen backward", sink_grad, *bounds, *numbers, *extras, *kind)
    ready = op_calls.calls.ready(scalars, looked_at)
    if ready is not None:
        repeat, made = ready
        repeat((*given, *made[:3], made[3] if sink_grad else None))
        return tuple(made)
    arguments: tuple[Any, ...] = (*given[:5], *bounds, *numbers, sink, *extras)
    call = VarlenCall(*arguments)
    return first_gradients(VARLEN, call, saved, sink_grad, (scalars, looked_at))


# --- Inputs that a kernel cannot read -------------------------------------------------------------


def _readable(call: VarlenCall) -> VarlenCall:
    """`call` itself, or with copies in place of what its kernel cannot read."""
    q, k, v = map(as_bhsd, call[:3])
    lengths: dict[str, Any] = {"seqlens_q": call.cu_seqlens_q, "seqlens_k": call.cu_seqlens_k}
    dense = Inputs(q, k, v, sink=call.sink, **lengths)
    readable = repairs.readable_inputs(dense, call.kernel)
    if readable is dense:
        return call
    q, k, v = map(_as_thd, readable[:3])
    lengths = {"cu_seqlens_q": readable.seqlens_q, "cu_seqlens_k": readable.seqlens_k}
    return call._replace(q=q, k=k, v=v, sink=readable.sink, **lengths)


def _readable_saved(saved: Saved, kernel: str) -> Saved:
    """The same for (out, lse, grad_out, grad_lse)."""
    out, lse, grad_out, grad_lse = saved
    dense = (as_bhsd(out), lse, as_bhsd(grad_out), grad_lse)
    readable = repairs.readable_saved(dense, kernel)
    if readable is dense:
        return saved
    out, lse, grad_out, grad_lse = readable
    return _as_thd(out), lse, _as_thd(grad_out), grad_lse


def _as_thd(tensor: Tensor) -> Tensor:
    """`as_bhsd` undone."""
    return tensor.squeeze(0).transpose(0, 1)


VARLEN = Variant(
    "attention_varlen",
    VarlenCall,
    ("cu_seqlens_q", "cu_seqlens_k", "sink"),
    (),
    varlen_checks,
    KERNELS,
    attention_varlen_forward,
    attention_varlen_gradients,
    _readable,
    _readable_saved,
)
