"""What the ops for variable lengths ask of their arguments, the same for fake and real tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from . import op_checks
from .errors import DtypeError, ShapeError
from .op_memory import fresh, lse_dtype, optional_gradient
from .varlen_problem import VarlenCall

CAUSAL_KINDS = ("none", "bottom_right")
_OP = "fa_inductor.attention_varlen"


def check_call(call: VarlenCall) -> None:
    """Raise unless the metadata of the tensors and the numbers form an attention problem."""
    q, k, v = (tuple(tensor.shape) for tensor in call[:3])
    described = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip("qkv", call[:3], strict=True))
    if any(len(shape) != 3 for shape in (q, k, v)):
        raise ShapeError(f"{_OP} takes (T, H, D) tensors, got {described}.")
    if q[2] != k[2] or k[:2] != v[:2]:
        raise ShapeError(
            f"{_OP} needs q (Tq, Hq, D), k (Tk, Hkv, D) and v (Tk, Hkv, Dv), got {described}."
        )
    if q[1] % k[1] != 0 if k[1] else q[1] != 0:
        raise ShapeError(f"The {q[1]} query heads are not a multiple of the {k[1]} key heads.")
    dtypes = [tensor.dtype for tensor in call[:3]]
    if len(set(dtypes)) != 1 or dtypes[0] not in op_checks.DTYPES:
        raise DtypeError(
            f"{_OP} takes one dtype of {[str(d) for d in op_checks.DTYPES]}, "
            f"got q {dtypes[0]}, k {dtypes[1]}, v {dtypes[2]}."
        )
    sink = call.sink
    if sink is not None and (tuple(sink.shape) != (q[1],) or not sink.dtype.is_floating_point):
        raise ShapeError(f"sink must be ({q[1]},) floats, got {sink.dtype} {tuple(sink.shape)}.")
    _check_lengths(call)
    named = dict(zip(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"), call[:5], strict=True))
    op_checks.check_devices({**named, "sink": sink})
    if call.causal not in CAUSAL_KINDS:
        raise ShapeError(f"causal={call.causal!r}: expected one of {CAUSAL_KINDS}.")
    if call.softcap < 0:
        raise ShapeError(f"softcap={call.softcap}: expected 0.0 (none) or a positive number.")


def _check_lengths(call: VarlenCall) -> None:
    starts_q, starts_k = call.cu_seqlens_q, call.cu_seqlens_k
    for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
        if starts.dtype != torch.int32:
            raise DtypeError(f"{name} must be int32, got {starts.dtype}.")
        if len(starts.shape) != 1 or starts.shape[0] == 0:
            raise ShapeError(f"{name} must be (batch + 1,), got {tuple(starts.shape)}.")
    if starts_q.shape != starts_k.shape:
        raise ShapeError(
            f"cu_seqlens_q {tuple(starts_q.shape)} and cu_seqlens_k {tuple(starts_k.shape)} "
            "are of different numbers of sequences."
        )
    for name in ("max_seqlen_q", "max_seqlen_k"):
        bound = getattr(call, name)
        # A symbolic one may come from a tensor's value, of which nothing can be asked yet.
        if isinstance(bound, int) and bound < 0:
            raise ShapeError(f"{name}={bound}: expected a length, or 0 where it is not known.")


def check_gradient(
    call: VarlenCall, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """`check_call`, and that the results and their gradients fit."""
    check_call(call)
    (total, heads, _), width = call.q.shape, call.v.shape[2]
    sizes = (total, heads, width), (heads, total)
    op_checks.check_saved(call.q, (out, lse, grad_out, grad_lse), *sizes)


def outputs(call: VarlenCall) -> tuple[Tensor, Tensor]:
    """Memory for out (Tq, Hq, Dv) and lse (Hq, Tq)."""
    q, (total, heads, _) = call.q, call.q.shape
    lse = fresh(q, (heads, total), dtype=lse_dtype(q.dtype))
    return fresh(q, (total, heads, call.v.shape[2])), lse


def gradients(call: VarlenCall, sink_grad: bool) -> tuple[Tensor, ...]:
    """Memory for the gradients of q, k, v and sink, that of sink without an element if unwanted."""
    made = [fresh(tensor, tensor.shape) for tensor in call[:3]]
    return (*made, optional_gradient(call.sink, sink_grad, call.q))
