"""One attention problem at run time: the numbers that say what is computed, and the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# What a backward is given beside the inputs: (out, lse, grad_out, grad_lse).
Saved = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Problem:
    """What is computed, beside the tensors.

    Query i of a sequence with Sq queries and Sk keys sees the keys j of a band:
    i + offset - window_left <= j <= i + offset + window_right, where None means unbounded and
    causal bounds the right side by 0. offset is 0 for causal "top_left", else Sk - Sq, as in
    FlashAttention (`flash_attn_func`, window_size). With sequence lengths given, Sq and Sk are
    each sequence's own.

    scale: factor on q·k. softcap: scores become softcap · tanh(score / softcap); 0.0 for none.
    dropout_p: probability with which a weight is dropped, the rest scaled by 1 / (1 - p).
    deterministic: whether the backward must repeat bit by bit.
    """

    scale: float
    causal: str = "none"
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(left, right) bounds of the band, causal taken in."""
        right = self.window_right
        if self.causal != "none":
            right = 0 if right is None else min(right, 0)
        return self.window_left, right

    @property
    def is_top_left(self) -> bool:
        """Whether the band starts at the top left corner of the scores."""
        return self.causal == "top_left"


def hidden_by_band(
    problem: Problem, i: Tensor, j: Tensor, len_q: Tensor | int, len_k: Tensor | int
) -> Tensor:
    """Which scores the band and the lengths of the sequences mask, broadcast from all four.

    i, j: places of queries and keys in their sequences; len_q, len_k: the lengths of those.
    """
    left, right = problem.band
    offset = 0 if problem.is_top_left else len_k - len_q
    hidden = (j >= len_k) | (i >= len_q)
    if left is not None:
        hidden = hidden | (j < i + offset - left)
    if right is not None:
        hidden = hidden | (j > i + offset + right)
    return hidden


class Inputs(NamedTuple):
    """The tensors of an attention problem, as views with their real strides.

    q: (B, Hq, Sq, D); k: (B, Hkv, Sk, D); v: (B, Hkv, Sk, Dv).
    bias: added to the scaled scores, (B or 1, Hq or 1, Sq or 1, Sk or 1), a float dtype;
        -inf masks a key. Kernels add it in the exponent: a row in which every element is huge
        but finite loses its digits there, and all of it beyond 1e30 (`patterns/bias.py` shifts
        such rows).
    sink: (Hq,), a logit for each head that takes part in the softmax but has no value.
    seqlens_q, seqlens_k: (B,) int32, how many of Sq and Sk count in each sequence; rows past
        them give 0.
    rng: (2,) int64, seed and offset of the dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None
    seqlens_q: Tensor | None = None
    seqlens_k: Tensor | None = None
    rng: Tensor | None = None


class Gradients(NamedTuple):
    """Memory for the gradients of the inputs; None where none is asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None
