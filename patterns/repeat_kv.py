"""Key and value heads that are repeated for the query heads that share them.

The op takes them unrepeated. Only the layout of grouped heads counts, each head n times in a row,
as `repeat_interleave` and Hugging Face's `repeat_kv` have it. `repeat` tiles, which is the same for
a single head and left alone for more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import symbolic
from ..graph_writes import storages, written_storages
from .calls import call_of
from .family import example_of
from .views import View, swapped, without_copies
from .writes import write_between


@dataclass(frozen=True)
class Unrepeated:
    """view: the tensor with the fewer heads. groups: how often each was repeated.
    reads: (reader, tensor) for every node on the way that was looked through."""

    view: View
    groups: int
    reads: tuple[tuple[fx.Node, fx.Node], ...]


def unrepeated(node: fx.Node, dim: int) -> Unrepeated | None:
    """What `node` repeats along its dimension `dim`; None if it repeats nothing."""
    node, passed = without_copies(node)
    call = call_of(node)
    if call is None or not isinstance(call.arguments.get("input"), fx.Node):
        return None
    order = swapped(call, node)
    if order is not None:
        inner = unrepeated(call["input"], order[dim])
        if inner is None:
            return None
        view = inner.view.then("permute", *order)
        reads = (*inner.reads, (node, call["input"]))
        return Unrepeated(view, inner.groups, _with_copies(reads, passed))
    if call.name == "repeat_interleave":
        found = _interleaved(node, dim)
    elif call.name in ("view", "reshape", "flatten"):
        found = _expanded(node, dim)
    elif call.name in ("repeat", "expand"):
        found = _single(node, dim)
    else:
        found = None
    if found is None:
        return None
    source, nodes = found
    groups = _groups(example_of(source), example_of(node), dim)
    if groups is None:
        return None
    reads = tuple((reader, _input(reader)) for reader in nodes)
    return Unrepeated(View(source), groups, _with_copies(reads, passed))


@dataclass(frozen=True)
class Shared:
    """The views of which keys and values are repetitions, and the nodes that repeat them."""

    key: View
    value: View
    passed: tuple[fx.Node, ...]


def shared_views(key: View, value: View, anchor: fx.Node) -> Shared | None:
    """The views (B, Hkv, ...) of which `key` and `value` are repetitions, both alike; None if they
    are none, or if `anchor`, which reads them, could not read those instead.

    The views may swap their last two dimensions and do nothing else.
    """
    if any(step != ("transpose", (-2, -1)) for view in (key, value) for step in view.steps):
        return None
    if any(example_of(view.node).dim() != 4 for view in (key, value)):
        return None
    first, second = (unrepeated(view.node, 1) for view in (key, value))
    if first is None or second is None or first.groups != second.groups:
        return None
    reads = (*first.reads, *second.reads)
    written = written_storages(anchor.graph)
    if any(not written.isdisjoint(storages(reader)) for reader, _ in reads):
        return None  # a repetition that is changed is none any more
    sources = [read for _, read in reads]
    if example_of(anchor).requires_grad and not written.isdisjoint(
        storage for source in sources for storage in storages(source)
    ):
        return None  # the backward would find in the source what was written to it
    if write_between(reads, anchor, ()) or not all(map(passes_gradients, dict(reads))):
        return None
    key, value = (
        View(found.view.node, (*found.view.steps, *view.steps))
        for found, view in ((first, key), (second, value))
    )
    return Shared(key, value, tuple(dict(reads)))


def shared_heads(key: fx.Node, value: fx.Node, anchor: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """As `shared_views`, for repetitions of nodes as they are."""
    found = shared_views(View(key), View(value), anchor)
    if found is None or found.key.steps or found.value.steps:
        return None
    return found.key.node, found.value.node


def passes_gradients(node: fx.Node) -> bool:
    """Whether a node is differentiated exactly where its inputs are."""
    inputs = map(example_of, node.all_input_nodes)
    due = any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in inputs)
    return bool(example_of(node).requires_grad == due)


def _with_copies(
    reads: tuple[tuple[fx.Node, fx.Node], ...], copies: list[fx.Node]
) -> tuple[tuple[fx.Node, fx.Node], ...]:
    return (*reads, *((copy, _input(copy)) for copy in copies))


def _input(node: fx.Node) -> fx.Node:
    call = call_of(node)
    assert call is not None
    source: fx.Node = call["input"]
    return source


def _interleaved(node: fx.Node, dim: int) -> tuple[fx.Node, list[fx.Node]] | None:
    call = call_of(node)
    assert call is not None
    rank = example_of(node).dim()
    if not isinstance(call["repeats"], int) or not isinstance(call["dim"], int):
        return None
    return (call["input"], [node]) if call["dim"] % rank == dim else None


def _expanded(node: fx.Node, dim: int) -> tuple[fx.Node, list[fx.Node]] | None:
    """x[:, :, None].expand(..., n, ...).reshape(...), the new dimension right behind `dim`."""
    expanded, copies = without_copies(_input(node))
    call = call_of(expanded)
    if call is None or call.name != "expand" or not isinstance(call["input"], fx.Node):
        return None
    inserted = call["input"]
    call = call_of(inserted)
    if call is None or call.name not in ("getitem", "unsqueeze"):
        return None
    if call.name == "getitem" and not _only_inserts(call["index"]):
        return None
    source = call["input"]
    before, during, after = map(example_of, (source, inserted, expanded))
    if not all(isinstance(each, torch.Tensor) for each in (before, during, after)):
        return None
    with_one = (*before.shape[: dim + 1], 1, *before.shape[dim + 1 :])
    with_groups = (*before.shape[: dim + 1], after.shape[dim + 1], *before.shape[dim + 1 :])
    if not symbolic.same_all(during.shape, with_one):
        return None
    if after.dim() != during.dim() or not symbolic.same_all(after.shape, with_groups):
        return None
    return source, [node, *copies, expanded, inserted]


def _single(node: fx.Node, dim: int) -> tuple[fx.Node, list[fx.Node]] | None:
    """One head, for which tiling and repeating in a row are the same."""
    source = _input(node)
    before = example_of(source)
    if not isinstance(before, torch.Tensor) or before.dim() != example_of(node).dim():
        return None
    return (source, [node]) if symbolic.same(before.shape[dim], 1) else None


def _only_inserts(index: Any) -> bool:
    """x[:, :, None, ...]: whole dimensions, one new one."""
    index = index if isinstance(index, tuple) else (index,)
    new = sum(each is None for each in index)
    return new == 1 and all(
        each is None or each is Ellipsis or each == slice(None, None, None) for each in index
    )


def _groups(source: Any, repeated: Any, dim: int) -> int | None:
    """How often `repeated` has each element of `source` along `dim`; None unless the rest fits."""
    if not isinstance(source, torch.Tensor) or source.dim() != repeated.dim():
        return None
    heads, more = source.shape[dim], repeated.shape[dim]
    rest = [
        symbolic.same(one, other)
        for place, (one, other) in enumerate(zip(source.shape, repeated.shape, strict=True))
        if place != dim
    ]
    if not all(rest) or not symbolic.is_static(heads) or not symbolic.is_static(more):
        return None
    few, many = symbolic.as_int(heads), symbolic.as_int(more)
    return many // few if few and many % few == 0 else None
