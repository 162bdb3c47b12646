"""What the ops for variable lengths do with real tensors; as `op_calls.py` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from . import op_calls, repairs, varlen_checks
from .call_cache import Call
from .kernels import varlen
from .problem import Gradients, Inputs
from .symbolic import Dim
from .varlen_problem import VarlenCall, as_bhsd

_Saved = tuple[Tensor, Tensor, Tensor, Tensor | None]


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
    known = op_calls.calls.find(scalars, looked_at)
    if known is not None:
        made = known.allocate(looked_at)
        if made is not None:
            known.repeat((*given, *made))
            op_calls.calls.repeated += 1
            return made[0], made[1]
    arguments: tuple[Any, ...] = (*given[:5], *bounds, *numbers, sink, *extras)
    out, lse, repeat = _first_forward(VarlenCall(*arguments))
    if repeat is not None:
        op_calls.calls.add(scalars, looked_at, Call(looked_at, (out, lse), repeat))
    return out, lse


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


def _first_forward(call: VarlenCall) -> tuple[Tensor, Tensor, op_calls.Repeat | None]:
    varlen_checks.check_call(call)
    implementation = varlen.load(call.kernel)
    if _is_empty(call):
        return *_without_keys(call), None
    implementation.check(call.problem, call.inputs)
    readable = _readable(call)
    if readable is not call:
        # The copies have a metadata class of their own, which may be known already.
        return *attention_varlen_forward(*readable), None
    out, lse = varlen_checks.outputs(call.q, call.v)
    with op_calls.device_of(call.q):
        repeat = implementation.forward(call.problem, call.inputs, out, lse)
    return out, lse, repeat


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
    known = op_calls.calls.find(scalars, looked_at)
    if known is not None:
        made = known.allocate(looked_at)
        if made is not None:
            known.repeat((*given, *made[:3], made[3] if sink_grad else None))
            op_calls.calls.repeated += 1
            return tuple(made)
    arguments: tuple[Any, ...] = (*given[:5], *bounds, *numbers, sink, *extras)
    gradients, repeat = _first_gradients(VarlenCall(*arguments), saved, sink_grad)
    if repeat is not None:
        op_calls.calls.add(scalars, looked_at, Call(looked_at, gradients, repeat))
    return gradients


def _first_gradients(
    call: VarlenCall, saved: _Saved, sink_grad: bool
) -> tuple[tuple[Tensor, ...], op_calls.Repeat | None]:
    out, lse, grad_out, grad_lse = saved
    varlen_checks.check_gradient(call, grad_out, grad_lse, out, lse)
    implementation = varlen.load(call.kernel)
    if _is_empty(call):
        return _gradients_without_keys(call, sink_grad, grad_lse), None
    implementation.check(call.problem, call.inputs)
    readable, readable_saved = _readable(call), _readable_saved(saved, call.kernel)
    if readable is not call or readable_saved is not saved:
        out, lse, grad_out, grad_lse = readable_saved
        tensors = (grad_out, grad_lse, *readable[:3], out, lse)
        rest: tuple[Any, ...] = (*readable[3:11], sink_grad, *readable[11:])
        return attention_varlen_gradients(*tensors, *rest), None
    made = varlen_checks.gradients(call, sink_grad)
    memory = Gradients(made[0], made[1], made[2], sink=made[3] if sink_grad else None)
    with op_calls.device_of(call.q):
        repeat = implementation.backward(
            call.problem, call.inputs, out, lse, grad_out, grad_lse, memory
        )
    return made, repeat


# --- Inputs without a key, and inputs that a kernel cannot read -----------------------------------


def _is_empty(call: VarlenCall) -> bool:
    """Whether there is no query, no key or no sequence."""
    return 0 in call.q.shape[:2] or call.k.shape[0] == 0 or call.cu_seqlens_q.shape[0] == 1


def _without_keys(call: VarlenCall) -> tuple[Tensor, Tensor]:
    out, lse = varlen_checks.outputs(call.q, call.v)
    if call.sink is None:
        return out.zero_(), lse.fill_(float("-inf"))
    return out.zero_(), lse.copy_(call.sink[:, None])


def _gradients_without_keys(
    call: VarlenCall, sink_grad: bool, grad_lse: Tensor | None
) -> tuple[Tensor, ...]:
    """Zero, but for the sink: without keys it is all that lse depends on."""
    made = varlen_checks.gradients(call, sink_grad)
    for gradient in made:
        gradient.zero_()
    if sink_grad and grad_lse is not None:
        made[3].copy_(grad_lse.sum(1))
    return made


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


def _readable_saved(saved: _Saved, kernel: str) -> _Saved:
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
