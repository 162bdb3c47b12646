"""Queries, keys and values of a hand-written attention, as the op takes them: (B, H, S, D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import symbolic
from ..graph_writes import storages
from ..spec import TensorSpec
from .calls import call_of, is_cast, multiplier
from .family import Emitter, example_of, tensor_objection
from .repeat_kv import passes_gradients, shared_views
from .score_steps import Unclear
from .views import View, is_copy, keeps_matrices, swapped, swapped_first

Leading = tuple[Any, Any]


@dataclass(frozen=True)
class Operand:
    """A tensor, and (B, H) that it is expanded to, None where it fits."""

    view: View
    expand: Leading | None = None

    def spec(self, dtype: torch.dtype) -> TensorSpec:
        """In the dtype that it is cast to, if it is not of it."""
        tensor = self.view.example()
        shape, stride = list(tensor.shape), list(tensor.stride())
        for dim, size in enumerate(self.expand or ()):
            if symbolic.same(shape[dim], 1):
                shape[dim], stride[dim] = size, 0
        offset = tensor.storage_offset()
        return TensorSpec(tuple(shape), tuple(stride), dtype, tensor.device, offset)

    def emit(self, emit: Emitter, dtype: torch.dtype) -> fx.Node:
        node = self.view.emit(emit)
        if example_of(self.view.node).dtype != dtype:
            node = emit.call("to", node, dtype)
        return node


@dataclass
class Found:
    """What was looked through on the way to an operand.

    reads: (reader, tensor). passed: what was looked through, to be removed where nothing else uses
    it. written: the memory that the graph writes to. differentiated: whether the op keeps its
    operands for a backward, which must find in them what the code's copies would hold.
    """

    reads: list[tuple[fx.Node, fx.Node]]
    passed: list[fx.Node]
    written: set[int]
    differentiated: bool

    def must_keep(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether `source` cannot be read in place of `node`, which is made from it: where `node`
        has memory of its own and either is written to, or where `node` stops gradients."""
        own = set(storages(node)).difference(storages(source))
        if own and self.differentiated and not self.written.isdisjoint(storages(source)):
            return True
        return not own.isdisjoint(self.written) or not passes_gradients(node)

    def look_through(self, reader: fx.Node, tensor: fx.Node) -> None:
        self.reads.append((reader, tensor))
        self.passed.append(reader)


def simplified(
    view: View, dtype: torch.dtype, found: Found, scalable: bool = True
) -> tuple[View, float]:
    """`view` without copies, without casts from `dtype` and without transpositions of its own, and
    the number that it was multiplied by; with `scalable` false it stays multiplied."""
    factor = 1.0
    while (step := _step_back(view, dtype, scalable)) is not None:
        following, by = step
        if found.must_keep(view.node, following.node):
            break
        found.look_through(view.node, following.node)
        view, factor = following, factor * by
    return view, factor


def _step_back(view: View, dtype: torch.dtype, scalable: bool) -> tuple[View, float] | None:
    """What the last operation before `view` was applied to, and the number it multiplies by."""
    node, call = view.node, call_of(view.node)
    if call is None or call.in_place:
        return None
    if call.name in ("mul", "div"):
        found = _multiple(call, node) if scalable else None
        return None if found is None else (View(found[0], view.steps), found[1])
    source = call.arguments.get("input")
    if not isinstance(source, fx.Node) or not isinstance(example_of(source), torch.Tensor):
        return None
    order = swapped(call, node)
    if order is not None and order == _last_two(len(order)):
        return View(source, swapped_first(view.steps)), 1.0
    if is_copy(call) or (is_cast(call, node) and example_of(source).dtype == dtype):
        return View(source, view.steps), 1.0
    return None


def _last_two(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _multiple(call: Any, node: fx.Node) -> tuple[fx.Node, float] | None:
    """(tensor, number) whose product `node` is, in the same dtype."""
    tensor, factor = multiplier(call)
    if not isinstance(factor, float) or not isinstance(tensor, fx.Node):
        return None
    before, after = example_of(tensor), example_of(node)
    same = isinstance(before, torch.Tensor) and before.dtype == after.dtype
    return (tensor, factor) if same and symbolic.same_all(before.shape, after.shape) else None


def with_heads(view: View, leading: Leading | None, found: Found) -> View:
    """A (..., S, D) view as (B, H, S, D). leading: (B, H); None where all have one head each."""
    tensor = view.example()
    if tensor.dim() == 4:
        return view
    if leading is None:
        return view.then("unsqueeze", 1)
    batch, heads = leading
    call = call_of(view.node)
    if call is not None and call.name in ("view", "reshape", "flatten"):
        source = call["input"]
        before = example_of(source)
        if (
            isinstance(before, torch.Tensor)
            and before.dim() == 4
            and keeps_matrices(before, example_of(view.node))
            and symbolic.same_all(before.shape[:2], (batch, heads))
            and not found.must_keep(view.node, source)
        ):
            found.look_through(view.node, source)
            return View(source, view.steps)
    return split_batch(view, leading)


def split_batch(view: View, leading: Leading) -> View:
    """(B·H, S, D) or (1, S, D) as (B, H, S, D)."""
    if symbolic.same(view.example().shape[0], 1) and not symbolic.same(leading[1], 1):
        return view.then("unsqueeze", 1)
    if not symbolic.is_static(leading[1]):
        raise Unclear(f"batch and heads in one dimension, {leading[1]} heads")
    return view.then("unflatten", 0, (-1, symbolic.as_int(leading[1])))


def fitted(
    q: View, k: View, v: View, leading: Leading, found: Found, anchor: fx.Node
) -> tuple[Operand, Operand, Operand]:
    """The operands with `leading` (B, H), keys and values without repeated heads."""
    batch, heads = leading
    kv_heads = heads
    shared = None
    if all(symbolic.same(view.example().shape[1], heads) for view in (k, v)):
        shared = shared_views(k, v, anchor)
    if shared is not None:
        found.passed.extend(shared.passed)
        k, v = shared.key, shared.value
        kv_heads = k.example().shape[1]
    elif all(symbolic.same(view.example().shape[1], 1) for view in (k, v)):
        kv_heads = 1
    wanted = ((batch, heads), (batch, kv_heads), (batch, kv_heads))
    names = ("query", "key", "value")
    return tuple(map(_expanded, names, (q, k, v), wanted))  # type: ignore[return-value]


def _expanded(name: str, view: View, wanted: Leading) -> Operand:
    sizes = view.example().shape[:2]
    if symbolic.same_all(sizes, wanted):
        return Operand(view)
    fits = list(map(symbolic.guarded_same, sizes, wanted))
    if not all(fit or symbolic.same(size, 1) for size, fit in zip(sizes, fits, strict=True)):
        raise Unclear(f"{name} {tuple(view.example().shape)} does not broadcast to {wanted}")
    return Operand(view, None if all(fits) else wanted)


def objection(q: View, k: View, v: View, scores: Sequence[Any]) -> str | None:
    """Why (B, H, S, D) operands do not belong to scores (..., Sq, Sk), or None."""
    for name, view in (("query", q), ("key", k), ("value", v)):
        if problem := tensor_objection(name, view.node):
            return problem
        if (rank := view.example().dim()) not in (3, 4):
            return f"{name} has rank {rank}"
    queries, keys, values = (view.example().shape for view in (q, k, v))
    pairs = {
        "query length": (queries[-2], scores[-2]),
        "key length": (keys[-2], scores[-1]),
        "value length": (values[-2], scores[-1]),
        "key head_dim": (keys[-1], queries[-1]),
    }
    for name, (one, other) in pairs.items():
        if not symbolic.guarded_same(one, other):
            return f"{name} {one} where {other} is due"
    return None


def emit_all(emit: Emitter, operands: Sequence[Operand], dtype: torch.dtype) -> list[fx.Node]:
    """The nodes of all operands, expanded."""
    nodes = [operand.emit(emit, dtype) for operand in operands]
    sources = list(zip(operands, nodes, strict=True))
    done = []
    for operand, node in sources:
        if operand.expand is not None:
            sizes = [_size(emit, sources, dim, size) for dim, size in enumerate(operand.expand)]
            node = emit.call("expand", node, *sizes, -1, -1)
        done.append(node)
    return done


def _size(emit: Emitter, sources: Sequence[tuple[Operand, fx.Node]], dim: int, size: Any) -> Any:
    """`size` as a graph value: an int, or read from the operand that has it."""
    if symbolic.is_static(size):
        return symbolic.as_int(size)
    for operand, node in sources:
        if symbolic.same(operand.view.example().shape[dim], size):
            return emit.call("size", node, dim)
    raise AssertionError(f"no operand has size {size} in dimension {dim}")
