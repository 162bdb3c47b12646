"""FlashAttention-4 with cumulative sequence lengths; see `fa4.py`.

FA4's own layout is (T, H, D) here too. On the host it reads of the lengths only their shape and
the two bounds, never a value, so its launches are repeated for other lengths as well. Rows that
belong to no sequence are not written, as with FA4 itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..problem import Gradients, Problem
from ..varlen_problem import VarlenInputs
from . import fa4
from .fa4_launch import Recording, Repeat, recording


def check(problem: Problem, inputs: VarlenInputs) -> None:
    """The limits that hold on every GPU."""
    fa4.check_variant(problem, inputs.dense)


def forward(problem: Problem, inputs: VarlenInputs, out: Tensor, lse: Tensor) -> Repeat | None:
    """See `fa_inductor.kernels.variants`."""
    entry = fa4._interface()._flash_attn_fwd
    given = _given(inputs)
    with recording((entry,)) as noted:
        entry(*given[:3], **_arguments(problem, inputs), return_lse=True, out=out, lse=lse)
    return _repeat(noted, inputs, [*given, out, lse])


def backward(
    problem: Problem,
    inputs: VarlenInputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grads: Gradients,
) -> Repeat | None:
    """See `fa_inductor.kernels.variants`."""
    given, arguments = _given(inputs), _arguments(problem, inputs)
    saved = (out.detach(), lse, grad_out.detach(), grad_lse)
    noted, results = fa4.noted_backward(problem, given[:3], saved, grads[:3], arguments)
    made_by_fa4 = {}
    if grads.sink is not None:
        grads.sink.copy_(results[3])
        made_by_fa4[len(given) + len(saved) + 3] = results[3]
    return _repeat(noted, inputs, [*given, *saved, *grads[:3], None], made_by_fa4)


def _given(inputs: VarlenInputs) -> list[Tensor | None]:
    """The tensors as FA4 takes them, without their autograd history."""
    sink = None if inputs.sink is None else inputs.sink.detach()
    lengths = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    return [*(tensor.detach() for tensor in inputs[:3]), *lengths, sink]


def _arguments(problem: Problem, inputs: VarlenInputs) -> dict[str, Any]:
    """Arguments that FA4's forward and backward share. No window is None, never -1; a bound that
    is not known is None too, for which FA4 takes Tq and Tk."""
    return {
        "softmax_scale": problem.scale,
        "causal": problem.causal != "none",
        "window_size_left": problem.window_left,
        "window_size_right": problem.window_right,
        "softcap": problem.softcap,
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "max_seqlen_q": inputs.max_seqlen_q or None,
        "max_seqlen_k": inputs.max_seqlen_k or None,
        "learnable_sink": None if inputs.sink is None else inputs.sink.detach(),
    }


def _repeat(
    noted: Recording,
    inputs: VarlenInputs,
    given: list[Tensor | None],
    made_by_fa4: dict[int, Tensor] | None = None,
) -> Repeat | None:
    """The launches again, unless FA4 made some beside the noted ones."""
    if not noted.calls:  # compiled only
        return None
    batch = inputs.cu_seqlens_q.shape[0] - 1
    if batch > fa4._interface().BIN_BATCH_SEARCH_THRESH:
        return None  # a kernel of its own has summed up the tiles of each sequence
    if inputs.cu_seqlens_k.data_ptr() == inputs.cu_seqlens_q.data_ptr():
        given[4] = None  # one tensor in both places
    return noted.repeat(given, made_by_fa4)
