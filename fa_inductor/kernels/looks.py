"""How a watched kernel's tensors are looked at: their largest magnitudes, into a table's row."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..numerics import Row

Look = Callable[[Row, Sequence[Tensor]], None]
_LARGEST = torch.finfo(torch.float32).max
_NARROW = (torch.bfloat16, torch.float16, torch.float32)


def looking_at(tensors: Sequence[Tensor], positive: bool = False) -> Look:
    """What looks at tensors with the metadata of these.

    positive: at the largest value of the second one, not the largest magnitude.
    """
    if all(t.is_cuda and t.dtype in _NARROW and _is_dense(t) for t in tensors):
        from . import scan  # Triton is for GPUs alone

        return functools.partial(scan.look, positive=positive)
    return functools.partial(_reduced, positive=positive)


def _reduced(row: Row, tensors: Sequence[Tensor], positive: bool) -> None:
    for place, (tensor, cell) in enumerate(zip(tensors, row.cells, strict=False)):
        if positive and place == 1:
            cell.copy_(tensor.amax().clamp(min=0.0))
        elif tensor.dtype == torch.float64:
            value = torch.linalg.vector_norm(tensor, math.inf)
            cell.copy_(torch.where(value.isinf(), value, value.clamp(max=_LARGEST)))
        else:
            torch.linalg.vector_norm(tensor, math.inf, dtype=torch.float32, out=cell)
    row.finish()


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
