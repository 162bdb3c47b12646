"""Masks that a kernel evaluates itself: as text, with lists of the blocks that show something."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .. import graph_writes, symbolic
from ..kernels import masked
from ..masked_problem import QUERY_BLOCK, blocks_in, key_block
from ..spec import AttentionSpec, MaskFormula
from .bias import bias_spec
from .family import Emitter, Scope, Value, example_of
from .visible import formula_of


@dataclass
class SharedMask:
    """One mask of a graph, however many sites have it, each perhaps through a view of its own.

    node: the earliest of them. last: what was put into the graph behind it so far. made: that, by
    what it is.
    """

    node: fx.Node
    last: fx.Node | None = None
    made: dict[Any, list[fx.Node]] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[Emitter], list[fx.Node]]) -> list[fx.Node]:
        """What `make` puts into the graph, right behind what is there already."""
        if key not in self.made:
            behind = (self.last or self.node).next
            while behind.op == "placeholder":
                behind = behind.next
            self.made[key] = make(Emitter(behind, like=self.node))
            self.last = self.made[key][-1]
        return self.made[key]


@dataclass(frozen=True)
class VisibleMask:
    """A mask as text, for one site. tensors: what it reads. shared: None if the mask must be read
    where the site is, since it is written to."""

    node: fx.Node
    spec: MaskFormula
    tensors: tuple[fx.Node, ...]
    shared: SharedMask | None


def visible_mask(mask: fx.Node, shape: Sequence[Any], scope: Scope) -> VisibleMask | None:
    """A mask of scores `shape` (B, H, Sq, Sk) as text; None for one that adds something."""
    found = formula_of(mask, shape, scope)
    if found is None or example_of(mask).requires_grad:
        return None
    formula, kind = found
    shared = None
    if graph_writes.written_storages(mask.graph).isdisjoint(graph_writes.storages(mask)):
        key = ("mask", formula, *map(str, shape))
        shared = scope.understood.setdefault(key, SharedMask(mask))
        if mask < shared.node:
            shared.node = mask
    return VisibleMask(mask, MaskFormula(formula.text, kind), formula.tensors, shared)


def takes_formula(spec: AttentionSpec, kernel: str) -> bool:
    """Whether `kernel` evaluates the mask of `spec` itself."""
    has_tile = symbolic.is_static(spec.head_dims[0])
    plain = not spec.dropout_p and spec.causal == "none" and spec.window == (None, None)
    return spec.formula is not None and has_tile and plain and kernel in masked.MODULES


def emit_masked(
    emit: Emitter,
    tensors: Sequence[Value],
    spec: AttentionSpec,
    mask: VisibleMask,
    scale: Value,
    out_order: str,
    kernel: str,
    sink: Value = None,
) -> fx.Node:
    """The output of the masked op for the nodes q, k, v."""
    extras = [sink, spec.softcap]
    while extras and extras[-1] in (None, 0.0):
        extras.pop()
    arguments = (scale, out_order, spec.deterministic, kernel, *extras)
    blocks = _blocks(emit, tensors, mask, spec)
    op = torch.ops.fa_inductor.attention_masked.default
    both = emit.call(op, *tensors, mask.spec.text, list(mask.tensors), blocks, *arguments)
    return emit.call(operator.getitem, both, 0)


def _blocks(
    emit: Emitter, tensors: Sequence[Value], mask: VisibleMask, spec: AttentionSpec
) -> list[fx.Node]:
    """The lists of blocks: right behind the mask, once for all of its sites; in front of this one
    if the mask is written to, or if it does not have all sizes that are symbolic."""
    keys = key_block(symbolic.as_int(spec.head_dims[0]))
    shared = mask.shared
    if shared is not None and _has_sizes(example_of(shared.node), spec.lengths):
        node, once = shared.node, shared.once
        owners = [(node, -2), (node, -1)]
    else:
        node = mask.node
        owners = [(tensors[0], 2), (tensors[1], 2)]

        def once(key: Any, make: Callable[[Emitter], list[fx.Node]]) -> list[fx.Node]:
            return make(emit)

    def count(emit: Emitter) -> list[fx.Node]:
        sizes = [
            symbolic.as_int(size) if symbolic.is_static(size) else emit.call("size", *owner)
            for size, owner in zip(spec.lengths, owners, strict=True)
        ]
        return [_count(emit, node, spec, sizes, keys)]

    counted = once(("count", keys), count)
    made: list[fx.Node] = []
    for by_key in (False, True) if spec.needs_grad else (False,):

        def listed(emit: Emitter, by_key: bool = by_key) -> list[fx.Node]:
            op = torch.ops.fa_inductor.mask_blocks.default
            blocks = emit.call(op, counted[0], QUERY_BLOCK * keys, by_key)
            return [emit.call(operator.getitem, blocks, place) for place in range(4)]

        made += once(("lists", keys, by_key), listed)
    return made


def _has_sizes(mask: torch.Tensor, lengths: Sequence[Any]) -> bool:
    """Whether the lengths are static, or are those of the mask's last dimensions."""
    own = (1, 1, *mask.shape)[-2:]
    return all(
        symbolic.is_static(length) or symbolic.same(size, length)
        for size, length in zip(own, lengths, strict=True)
    )


def _count(
    emit: Emitter, mask: fx.Node, spec: AttentionSpec, sizes: Sequence[Value], keys: int
) -> fx.Node:
    """How many places of each block are visible, (B or 1, H or 1, rows, columns) int32."""
    given = example_of(mask)
    node = mask
    if given.dtype != torch.bool:  # 0 where visible
        node = emit.call(torch.eq, node, 0)
    for _ in range(4 - given.dim()):
        node = emit.call("unsqueeze", node, 0)
    taken = bias_spec(given, spec.scores)
    assert not isinstance(taken, str)
    shape = (1, 1, 1, 1, *given.shape)[-4:]
    for dim in (0, 1):  # what is only repeated is counted once
        if symbolic.same(taken.shape[dim], 1) and not symbolic.same(shape[dim], 1):
            node = emit.call("narrow", node, dim, 0, 1)
    node = emit.call("expand", node, -1, -1, *sizes)
    rows, columns = (
        _in_blocks(emit, s, b) for s, b in zip(sizes, (QUERY_BLOCK, keys), strict=True)
    )
    below, right = rows[1], columns[1]
    node = emit.call(F.pad, node, (0, right, 0, below))
    for dim, (number, _), block in ((3, columns, keys), (2, rows, QUERY_BLOCK)):
        node = emit.call("unflatten", node, dim, (number, block))
    return emit.call(torch.sum, node, (3, 5), dtype=torch.int32)


def _in_blocks(emit: Emitter, size: Value, block: int) -> tuple[Value, Value]:
    """(number of blocks, what is missing to fill the last one)."""
    if isinstance(size, int):
        number = blocks_in(size, block)
        return number, number * block - size
    more = emit.call(operator.add, size, block - 1)
    number = emit.call(operator.floordiv, more, block)
    whole = emit.call(operator.mul, number, block)
    return number, emit.call(operator.sub, whole, size)
