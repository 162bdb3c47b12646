"""What the attention ops allocate, the same for fake and real tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .spec import BSHD
from .symbolic import Dim

_DIMENSIONS = "BHSD"


def dense_strides(size: Sequence[Dim], order: str) -> tuple[Dim, ...]:
    """Strides of a dense (B, H, S, D) tensor whose dimensions lie in memory as `order` says,
    outermost first: "BSHD"."""
    stride: list[Dim] = [1] * len(order)
    step: Dim = 1
    for letter in reversed(order):
        dim = _DIMENSIONS.index(letter)
        stride[dim] = step
        step = step * size[dim]
    return tuple(stride)


def outputs(q: Tensor, v: Tensor, out_order: str, with_lse: bool) -> tuple[Tensor, Tensor]:
    """(out, lse); lse has no element when it is not asked for."""
    batch, heads, length, _ = q.shape
    size = (batch, heads, length, v.shape[3])
    out = q.new_empty_strided(size, dense_strides(size, out_order))
    lse_size = (batch, heads, length) if with_lse else (0,)
    return out, q.new_empty(lse_size, dtype=lse_dtype(q.dtype))


def gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: dense in (B, S, H, D) order."""
    made = [t.new_empty_strided(t.shape, dense_strides(t.shape, BSHD)) for t in (q, k, v)]
    return made[0], made[1], made[2]


def optional_gradient(like: Tensor | None, wanted: bool, q: Tensor) -> Tensor:
    """A contiguous gradient of `like`, without an element when it is not asked for."""
    if like is None or not wanted:
        return q.new_empty((0,))
    return like.new_empty(like.shape)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
