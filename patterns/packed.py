"""q, k and v that are views of one projection: which tensor, and where in it they lie."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from .. import symbolic
from .family import example_of

# Calls that only look at their first argument otherwise. One that is missing here costs a copy of
# the gradients, nothing else.
_METHODS = {"view", "reshape", "transpose", "permute", "unbind", "chunk", "split", "select"} | {
    "narrow",
    "unflatten",
    "flatten",
    "squeeze",
    "unsqueeze",
    "movedim",
    "swapaxes",
}
_FUNCTIONS = frozenset(
    [operator.getitem, *(getattr(torch, name) for name in _METHODS if hasattr(torch, name))]
)

# Elements of a projection for which it pays, measured on an H200 with benchmarks/packed_step.py: a
# step of 100 million elements is 2 % faster, one of 25 million is bound by the CPU and slower.
WORTH_FROM = 1 << 25


@dataclass(frozen=True)
class Packed:
    """node: the tensor that holds q, k and v and nothing else. views: for each of them its size,
    its strides and its offset in `node`, nine numbers."""

    node: fx.Node
    views: tuple[tuple[int, ...], ...]


def packed_source(tensors: Sequence[fx.Node]) -> Packed | None:
    """The one tensor that q, k and v, differentiated nodes of rank 4, fill together; None if there
    is none, or if its size is symbolic."""
    roots = [_root(node) for node in tensors]
    root = roots[0]
    if any(other is not root for other in roots) or root in tensors:
        return None
    whole = example_of(root)
    parts = [example_of(node) for node in tensors]
    if not all(_is_part(part, whole) for part in parts) or not _is_static(whole, *parts):
        return None
    if whole.numel() < WORTH_FROM or not whole.is_contiguous():
        return None
    if sum(part.numel() for part in parts) != whole.numel():
        return None
    views = tuple(
        (*part.shape, *part.stride(), part.storage_offset() - whole.storage_offset())
        for part in parts
    )
    views = tuple(tuple(map(symbolic.as_int, view)) for view in views)
    return Packed(root, views) if _fill(views) else None


def _root(node: fx.Node) -> fx.Node:
    while (node.op == "call_method" and node.target in _METHODS) or (
        node.op == "call_function" and node.target in _FUNCTIONS
    ):
        if not node.args or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node


def _is_part(part: torch.Tensor, whole: object) -> bool:
    """Whether both are the same memory to PyTorch, differentiated, of one dtype."""
    return (
        isinstance(whole, torch.Tensor)
        and part.untyped_storage()._cdata == whole.untyped_storage()._cdata
        and part.dtype == whole.dtype
        and part.requires_grad
        and whole.requires_grad
    )


def _is_static(*tensors: torch.Tensor) -> bool:
    return all(
        map(symbolic.is_static, (n for t in tensors for n in (*t.shape, *t.stride())))
    ) and all(symbolic.is_static(t.storage_offset()) for t in tensors)


def _fill(views: Sequence[tuple[int, ...]]) -> bool:
    """Whether the three lie beside each other without overlap, along one of their dimensions or
    along one of its own, and so fill their memory (they have as many elements)."""
    sizes, strides, offsets = [v[:4] for v in views], [v[4:8] for v in views], [v[8] for v in views]
    if strides[1:] != strides[:-1]:
        return False
    for dim in range(4):
        others = [size[:dim] + size[dim + 1 :] for size in sizes]
        ends = [o + s[dim] * strides[0][dim] for o, s in zip(offsets, sizes, strict=True)]
        if others[1:] == others[:-1] and ends[:-1] == offsets[1:]:
            joined = list(sizes[0])
            joined[dim] = sum(size[dim] for size in sizes)
            return _is_dense(joined, strides[0])
    steps = [later - sooner for sooner, later in itertools.pairwise(offsets)]
    if sizes[1:] != sizes[:-1] or steps[0] != steps[1] or steps[0] <= 0:
        return False
    return _is_dense((*sizes[0], 3), (*strides[0], steps[0]))


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each element has a place of its own, and there are no gaps."""
    expected = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
