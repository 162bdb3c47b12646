"""The op that lists in which blocks a mask shows something.

`torch.ops.fa_inductor.mask_blocks(count, block, by_key)` takes how many places of each block are
visible, (B or 1, H or 1, rows, columns) int32, and how many a whole block has; it returns the
tensors of `fa_inductor.masked_problem.Blocks`, with by_key those of the transposed blocks. The
counting itself is left to the graph: compiled, it makes the mask and sums it up in one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import DtypeError, ShapeError
from .op_schemas import define, implement

mask_blocks = define(
    "mask_blocks",
    "(Tensor count, int block, bool by_key) -> "
    "(Tensor partial_count, Tensor partial, Tensor whole_count, Tensor whole)",
)


def _real(count: Tensor, block: int, by_key: bool) -> tuple[Tensor, ...]:
    _check(count)
    blocks = (count.mT if by_key else count).contiguous()
    whole = blocks == block
    made: list[Tensor] = []
    for chosen in ((blocks > 0) & ~whole, whole):
        # The chosen ones first, in their order; the kernel reads them from the last one on.
        order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        made += [chosen.sum(-1), order]
    return tuple(count.new_empty(each.shape).copy_(each) for each in made)


def _fake(count: Tensor, block: int, by_key: bool) -> tuple[Tensor, ...]:
    _check(count)
    sizes = count.mT.shape if by_key else count.shape
    return tuple(count.new_empty(size) for size in (sizes[:-1], sizes) * 2)


def _check(count: Tensor) -> None:
    if count.dim() != 4:
        raise ShapeError(f"count must be (B, H, rows, columns), got {tuple(count.shape)}.")
    if count.dtype != torch.int32:
        raise DtypeError(f"count must be int32, got {count.dtype}.")


implement("mask_blocks", _real, _fake)
