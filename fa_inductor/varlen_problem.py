"""Attention over sequences of different lengths that lie one after another, without padding."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .problem import Inputs, Problem
from .spec import default_scale
from .symbolic import Dim


class VarlenInputs(NamedTuple):
    """The inputs, as views with their real strides.

    q: (Tq, Hq, D); k: (Tk, Hkv, D); v: (Tk, Hkv, Dv). Sequence b has the rows
        cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and likewise of k and v.
    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, from 0 to Tq and Tk, never falling.
    sink: (Hq,), as in `fa_inductor.problem.Inputs`.
    max_seqlen_q, max_seqlen_k: no sequence is longer; 0 where that is not known.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    sink: Tensor | None = None
    max_seqlen_q: Dim = 0
    max_seqlen_k: Dim = 0

    @property
    def dense(self) -> Inputs:
        """All sequences seen as one."""
        q, k, v = map(as_bhsd, self[:3])
        return Inputs(q, k, v, sink=self.sink)


class VarlenCall(NamedTuple):
    """A call of `attention_varlen`, its arguments in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: Dim
    max_seqlen_k: Dim
    scale: float | None
    causal: str
    deterministic: bool
    kernel: str
    sink: Tensor | None = None
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0

    @property
    def inputs(self) -> VarlenInputs:
        return VarlenInputs(*self[:5], self.sink, self.max_seqlen_q, self.max_seqlen_k)

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, no key or no sequence."""
        return 0 in (*self.q.shape[:2], self.k.shape[0]) or self.cu_seqlens_q.shape[0] == 1

    @property
    def problem(self) -> Problem:
        """What is computed, in numbers that are known at run time."""
        return Problem(
            default_scale(self.q.shape[-1]) if self.scale is None else self.scale,
            self.causal,
            self.window_left,
            self.window_right,
            self.softcap,
            deterministic=self.deterministic,
        )


def as_bhsd(tensor: Tensor) -> Tensor:
    """A (T, H, D) tensor seen as one sequence: (1, H, T, D)."""
    return tensor.transpose(0, 1).unsqueeze(0)
