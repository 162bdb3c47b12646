"""One launch that looks at all that a kernel has written: largest magnitudes, into a table.

A float's bits without the sign, read as an integer, order as the magnitudes do, infinity above all
numbers and NaN above that: so an integer maximum keeps NaN, and an atomic one needs no second
launch. PyTorch's own reductions are three to five launches, each a pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..numerics import Row

_BLOCK = 16384
_WARPS = 8


@triton.jit
def _one(memory, size, block, cell, POSITIVE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    before = tl.load(cell)  # on its way while the values are; an older one costs an atomic at most
    offsets = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(memory + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if POSITIVE:  # of negative numbers, -inf among them, none counts; NaN has a sign as well
        magnitude = tl.where((bits < 0) & (magnitude <= 0x7F800000), 0, magnitude)
    top = tl.max(magnitude, 0)
    if top > before:
        tl.atomic_max(cell, top)


@triton.jit(do_not_specialize=["size_a", "size_b", "size_c"])
def _scan(  # type: ignore[no-untyped-def]
    a, b, c, size_a, size_b, size_c, cells, POSITIVE_B: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    after_a = tl.cdiv(size_a, BLOCK)
    after_b = after_a + tl.cdiv(size_b, BLOCK)
    if program < after_a:
        _one(a, size_a, program, cells, False, BLOCK)
    elif program < after_b:
        _one(b, size_b, program - after_a, cells + 1, POSITIVE_B, BLOCK)
    else:
        _one(c, size_c, program - after_b, cells + 2, False, BLOCK)


def look(row: Row, tensors: Sequence[Tensor], positive: bool) -> None:
    """Let the first numbers of `row` grow to the largest magnitude in each of up to three tensors.

    tensors: dense, of at most 32 bits an element, on the GPU of the row. positive: of the second
    one, the largest positive value instead.
    """
    sizes = [tensor.numel() for tensor in tensors]
    grid = sum(-(-size // _BLOCK) for size in sizes)
    missing = 3 - len(sizes)
    a, b, c = (*tensors, *[tensors[0]] * missing)
    sizes += [0] * missing
    _scan[(grid,)](a, b, c, *sizes, row.bits, positive, _BLOCK, num_warps=_WARPS)
