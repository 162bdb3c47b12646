"""Attention of which a mask, written as text, says what each query sees."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .problem import Inputs, Problem
from .spec import default_scale
from .symbolic import Dim

QUERY_BLOCK = 128


def key_block(head_dim: int) -> int:
    """Keys in a block, for a head dim (that of q and k): what fits the tiles of FA4's forward and
    backward on sm_90 alike (flash-attn-4 4.0.0b36, `_tile_size_fwd_sm90`, `_tile_size_bwd_sm90`).
    """
    if head_dim <= 128:
        return 128
    return 96 if head_dim <= 192 else 64


def blocks_in(length: Dim, block: int) -> Dim:
    return (length + block - 1) // block


class Blocks(NamedTuple):
    """The blocks in which a mask shows something, for rows of blocks.

    partial_count, whole_count: (B or 1, H or 1, rows), how many blocks of a row are visible in
        part, or as a whole and not cut off at the edge of the scores.
    partial, whole: (B or 1, H or 1, rows, columns), which ones, in rising order; what follows the
        counted ones is meaningless.
    All are int32 and contiguous.
    """

    partial_count: Tensor
    partial: Tensor
    whole_count: Tensor
    whole: Tensor


class Visible(NamedTuple):
    """What queries see.

    text: as in `fa_inductor.mask_text`, of tensors without bools (uint8 in their place).
    by_query: rows are blocks of queries, columns blocks of keys. by_key: the other way around;
        None where no backward is asked for.
    """

    text: str
    tensors: tuple[Tensor, ...]
    by_query: Blocks
    by_key: Blocks | None


class MaskedInputs(NamedTuple):
    """The inputs; q, k, v and sink as in `fa_inductor.problem.Inputs`."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Visible
    sink: Tensor | None = None

    @property
    def dense(self) -> Inputs:
        return Inputs(self.q, self.k, self.v, sink=self.sink)


class MaskedCall(NamedTuple):
    """A call of `attention_masked`, its arguments in their order."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: str
    mask_tensors: list[Tensor]
    blocks: list[Tensor]
    scale: float | None
    out_order: str
    deterministic: bool
    kernel: str
    sink: Tensor | None = None
    softcap: float = 0.0

    @property
    def inputs(self) -> MaskedInputs:
        by_query, by_key = self.blocks[:4], self.blocks[4:]
        visible = Visible(
            self.mask,
            tuple(self.mask_tensors),
            Blocks(*by_query),
            Blocks(*by_key) if by_key else None,
        )
        return MaskedInputs(self.q, self.k, self.v, visible, self.sink)

    @property
    def problem(self) -> Problem:
        scale = default_scale(self.q.shape[-1]) if self.scale is None else self.scale
        return Problem(scale, softcap=self.softcap, deterministic=self.deterministic)

    @property
    def scores(self) -> tuple[Dim, Dim, Dim, Dim]:
        """(B, Hq, Sq, Sk)."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def is_empty(self) -> bool:
        """Whether there is no query or no key."""
        return 0 in self.scores
