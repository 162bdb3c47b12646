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
from ..kernels.variants import MASKED
from ..masked_problem import QUERY_BLOCK, blocks_in, key_block
from ..op_memory import lse_dtype
from ..spec import AttentionSpec, MaskFormula
from .bias import bias_spec
from .family import Emitter, Scope, Value, example_of
from .visible import Part, VisibleText, text_of


@dataclass
class SharedMask:
    """One mask of a graph, however many sites have it, each perhaps through a view of its own.

    node: the earliest of them. hides: whether True in it hides a key. last: what was put into the
    graph behind it so far. made: that, by what it is.
    """

    node: fx.Node
    hides: bool
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
    """A mask as text, for one site of those that share it."""

    text: VisibleText
    node: fx.Node
    hides: bool
    shared: SharedMask

    @property
    def spec(self) -> MaskFormula:
        return MaskFormula(self.text.text, self.text.kind)


def visible_mask(mask: Part, shape: Sequence[Any], scope: Scope) -> VisibleMask | None:
    """A mask of scores `shape` (B, H, Sq, Sk) as text; None for one that adds something, and for
    one that is written to: the op keeps what it reads for its backward."""
    node, hides, _ = mask
    changing = graph_writes.changing_storages(node.graph)
    if example_of(node).requires_grad or not changing.isdisjoint(graph_writes.storages(node)):
        return None
    text = text_of(mask, shape, scope)
    if text is None:
        return None
    key = ("mask", text.text, text.tensors, *map(str, shape))
    shared = scope.understood.setdefault(key, SharedMask(node, hides))
    if node < shared.node:
        shared.node, shared.hides = node, hides
    return VisibleMask(text, node, hides, shared)


def takes_formula(spec: AttentionSpec, kernel: str) -> bool:
    """Whether `kernel` evaluates the mask of `spec` itself."""
    has_tile = symbolic.is_static(spec.head_dims[0])
    plain = not spec.dropout_p and spec.causal == "none" and spec.window == (None, None)
    return spec.formula is not None and has_tile and plain and MASKED.has(kernel)


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
    text = mask.text
    both = emit.call(op, *tensors, text.text, list(text.tensors), blocks, *arguments)
    out = emit.call(operator.getitem, both, 0)
    if not text.averages or sink is not None:
        return out
    return _with_averages(emit, out, emit.call(operator.getitem, both, 1), tensors[2], spec)


def _with_averages(
    emit: Emitter, out: fx.Node, lse: fx.Node, value: Value, spec: AttentionSpec
) -> fx.Node:
    """`out`, and for queries that see nothing the average of all values: softmax of scores that
    are all one huge number. Beside a sink it would be lost, and 0 is right."""
    lost = emit.call("unsqueeze", emit.call(torch.eq, lse, float("-inf")), -1)
    average = emit.call(torch.mean, value, 2, True, dtype=lse_dtype(spec.dtype))
    heads, shared = spec.heads
    if not symbolic.same(heads, shared) and not symbolic.same(shared, 1):
        groups = symbolic.as_int(heads) // symbolic.as_int(shared)
        average = emit.call(torch.repeat_interleave, average, groups, 1)
    return emit.call(torch.where, lost, emit.call("to", average, spec.dtype), out)


def _blocks(
    emit: Emitter, tensors: Sequence[Value], mask: VisibleMask, spec: AttentionSpec
) -> list[fx.Node]:
    """The lists of blocks: right behind the mask, once for all of its sites; in front of this one
    if the mask does not have all sizes that are symbolic."""
    keys = key_block(symbolic.as_int(spec.head_dims[0]))
    shared = mask.shared
    if has_sizes(example_of(shared.node), spec.lengths):
        node, hides, once = shared.node, shared.hides, shared.once
        owners = [(node, -2), (node, -1)]
    else:
        node, hides = mask.node, mask.hides
        owners = [(tensors[0], 2), (tensors[1], 2)]

        def once(key: Any, make: Callable[[Emitter], list[fx.Node]]) -> list[fx.Node]:
            return make(emit)

    def count(emit: Emitter) -> list[fx.Node]:
        sizes = [
            symbolic.as_int(size) if symbolic.is_static(size) else emit.call("size", *owner)
            for size, owner in zip(spec.lengths, owners, strict=True)
        ]
        return [_count(emit, _shown(emit, node, hides), example_of(node), spec, sizes, keys)]

    counted = once(("count", keys), count)
    made: list[fx.Node] = []
    for by_key in (False, True) if spec.needs_grad else (False,):

        def listed(emit: Emitter, by_key: bool = by_key) -> list[fx.Node]:
            op = torch.ops.fa_inductor.mask_blocks.default
            blocks = emit.call(op, counted[0], QUERY_BLOCK * keys, by_key)
            return [emit.call(operator.getitem, blocks, place) for place in range(4)]

        made += once(("lists", keys, by_key), listed)
    return made


def has_sizes(mask: torch.Tensor, lengths: Sequence[Any]) -> bool:
    """Whether the lengths are static, or are those of the mask's last dimensions."""
    own = (1, 1, *mask.shape)[-2:]
    return all(
        symbolic.is_static(length) or symbolic.same(size, length)
        for size, length in zip(own, lengths, strict=True)
    )


def _shown(emit: Emitter, mask: fx.Node, hides: bool) -> fx.Node:
    """The mask as bools, True where something is visible."""
    if example_of(mask).dtype != torch.bool:
        return emit.call(torch.eq, mask, 0)
    return emit.call(torch.logical_not, mask) if hides else mask


def _count(
    emit: Emitter,
    node: fx.Node,
    given: torch.Tensor,
    spec: AttentionSpec,
    sizes: Sequence[Value],
    keys: int,
) -> fx.Node:
    """How many places of each block are visible, (B or 1, H or 1, rows, columns) int32.

    given: what a mask like `node` was recorded as.
    """
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
