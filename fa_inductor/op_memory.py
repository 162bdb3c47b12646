"""What the attention ops allocate, the same for fake and real tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .spec import BSHD
from .symbolic import Dim

_DIMENSIONS = "BHSD"


def fresh(
    like: Tensor,
    size: Sequence[Dim],
    stride: Sequence[Dim] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Memory on the device of `like`, contiguous without a stride, in its dtype without another.

    All that the ops return is made here (but for repeated calls on a GPU, see `call_cache.py`): a
    test can fill it with NaN, and see what a kernel leaves unwritten.
    """
    dtype = dtype or like.dtype
    if stride is None:
        return like.new_empty(size, dtype=dtype)
    return like.new_empty_strided(size, stride, dtype=dtype)


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
    out = fresh(q, size, dense_strides(size, out_order))
    lse_size = (batch, heads, length) if with_lse else (0,)
    return out, fresh(q, lse_size, dtype=lse_dtype(q.dtype))


def gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: dense in (B, S, H, D) order."""
    made = [fresh(t, t.shape, dense_strides(t.shape, BSHD)) for t in (q, k, v)]
    return made[0], made[1], made[2]


def optional_gradient(like: Tensor | None, wanted: bool, q: Tensor) -> Tensor:
    """A contiguous gradient of `like`, without an element when it is not asked for."""
    if like is None or not wanted:
        return fresh(q, (0,))
    return fresh(like, like.shape)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
