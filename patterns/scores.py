"""From the attention weights back to the product of queries and keys, one operation at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .. import symbolic
from .calls import Call, Symbol, call_of, describe_call, is_cast, multiplier, number
from .family import example_of
from .lineage import leads_to_product, leads_to_softmax
from .products import Product, is_product, scores_product
from .score_steps import (
    Added,
    NotAttention,
    Replaced,
    Scaled,
    Step,
    Unclear,
    addend,
    beside_zero,
    drops_last,
    probability,
    replacement,
    same_matrices,
    same_shape,
    sink_objection,
)
from .views import is_copy
from .writes import looks_at_metadata


@dataclass
class Scores:
    """What lies between a product and the weights that are applied to the values.

    steps: what was done to the product (after softcap, where there is one), in program order.
    slope: the factor inside tanh, None without a softcap. symbols: factors of the product that are
    not known, inside tanh where there is one.
    leading: the two leading dimensions (batch, heads), where the scores ever have two.
    chain: every node from the product on. reads: (reader, tensor) of all other tensors.
    maxima: of the chain, what only makes the maximum that is subtracted.
    """

    product: Product
    node: fx.Node
    steps: list[Step]
    slope: float | None
    symbols: list[Symbol]
    dropout_p: float
    sink: fx.Node | None
    leading: tuple[Any, Any] | None
    chain: list[fx.Node]
    reads: list[tuple[fx.Node, fx.Node]]
    maxima: list[fx.Node]


@dataclass
class _Walk:
    """The state of a walk from the weights backwards."""

    chain: list[fx.Node] = field(default_factory=list)
    reads: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    maxima: list[fx.Node] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)  # the last one first
    symbols: list[Symbol] = field(default_factory=list)
    slope: float | None = None
    dropout_p: float = 0.0
    sink: fx.Node | None = None
    leading: tuple[Any, Any] | None = None
    drops_column: bool = False
    earlier: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def visit(self, node: fx.Node, *others: Any) -> None:
        self.chain.append(node)
        self.reads.extend((node, other) for other in others if isinstance(other, fx.Node))
        shape = example_of(node).shape
        if len(shape) > 4:
            raise Unclear(f"scores of rank {len(shape)}")
        if len(shape) == 4:
            if self.leading and not all(map(symbolic.guarded_same, self.leading, shape[:2])):
                raise Unclear(f"scores as {tuple(shape)} and with leading {self.leading}")
            self.leading = self.leading or (shape[0], shape[1])

    def source(self, consumer: fx.Node, node: Any) -> fx.Node:
        """The node that wrote what `consumer` reads from `node`, which nobody else may read.

        Statements such as `scores.masked_fill_(...)` write to a node that is read afterwards.
        """
        if not isinstance(node, fx.Node) or not isinstance(example_of(node), torch.Tensor):
            raise NotAttention
        if consumer in self.earlier:
            return self.earlier[consumer]
        writers = []
        for user in node.users:
            if user is consumer or user in self.chain or looks_at_metadata(user, node):
                continue
            call = call_of(user)
            writes = call is not None and call.in_place and call["input"] is node
            if not writes or user.users or not user < consumer:
                raise Unclear(f"the attention weights are also used by {describe_call(user)}")
            writers.append(user)
        for before, after in zip([node, *sorted(writers)], sorted(writers), strict=False):
            self.earlier[after] = before
        return max(writers) if writers else node


def scores_of(weights: fx.Node, anchor: fx.Node) -> Scores:
    """How `weights` came about. Raises `NotAttention` or `Unclear`."""
    walk = _Walk()
    if not leads_to_softmax(weights):
        raise NotAttention
    node = _after_softmax(walk, anchor, weights)
    node = _softmax(walk, node)
    if walk.drops_column:
        node = _without_sink(walk, node)
    return _before_softmax(walk, node)


def _after_softmax(walk: _Walk, anchor: fx.Node, weights: fx.Node) -> fx.Node:
    """Down to the softmax, through what may be done to weights."""
    node = walk.source(anchor, weights)
    while True:
        call = call_of(node)
        if call is None:
            raise Unclear(f"the attention weights go through {describe_call(node)}")
        if call.name == "softmax":
            return node
        if call.name == "dropout":
            p = probability(call)
            if p and walk.dropout_p:
                raise Unclear("the attention weights are dropped out twice")
            walk.dropout_p = p or walk.dropout_p
        elif call.name == "getitem" and drops_last(call, node):
            walk.drops_column = True
        elif not same_matrices(call, node):
            raise Unclear(f"the attention weights go through {describe_call(node)}")
        walk.visit(node)
        node = walk.source(node, call["input"])


def _softmax(walk: _Walk, node: fx.Node) -> fx.Node:
    call = call_of(node)
    assert call is not None
    example = example_of(node)
    if call["dim"] not in (-1, example.dim() - 1):
        raise Unclear(f"softmax over dimension {call['dim']} of {example.dim()}")
    if not example.is_floating_point():
        raise NotAttention
    walk.visit(node)
    return walk.source(node, call["input"])


def _without_sink(walk: _Walk, node: fx.Node) -> fx.Node:
    """Through cat([scores, sink], -1), whose last column the weights have lost again."""
    while True:
        call = call_of(node)
        if call is None:
            raise Unclear(
                f"the last of the attention weights is left out, of {describe_call(node)}"
            )
        if call.name == "cat":
            break
        if (shifted := _minus_maximum(walk, call, node)) is not None:
            node = shifted
        elif is_copy(call) or is_cast(call, node):
            walk.visit(node)
            node = walk.source(node, call["input"])
        else:
            raise Unclear(f"the last of the attention weights is left out, of {call.name}")
    tensors = call["tensors"]
    rank = example_of(node).dim()
    if len(tensors) != 2 or call["dim"] not in (-1, rank - 1) or rank != 4:
        raise Unclear(f"scores joined by cat of {len(tensors)} tensors along {call['dim']}")
    scores, sink = tensors
    if not isinstance(sink, fx.Node) or (problem := sink_objection(example_of(sink))):
        raise Unclear(f"a sink that {problem}")
    walk.visit(node, sink)
    walk.sink = sink
    return walk.source(node, scores)


def _before_softmax(walk: _Walk, node: fx.Node) -> Scores:
    """Down to the product of queries and keys."""
    while not is_product(node):
        call = call_of(node)
        if call is None or not isinstance(example_of(node), torch.Tensor):
            raise _given_up(node)
        following = _step(walk, call, node)
        if following is None:
            raise _given_up(node)
        node = following
    product = scores_product(node)
    if product is None:
        raise Unclear(f"scores from {describe_call(node)} in a form that is not known")
    factor = number(product.factor)
    if factor is None:
        raise Unclear("alpha of baddbmm is symbolic")
    added = None
    if product.added is not None:
        beta = number(product.added[1])
        if beta is None:
            raise Unclear("beta of baddbmm is symbolic")
        added = Added(product.added[0], example_of(node).dim(), beta)
        _mask(walk, added)
    _scale(walk, factor)
    walk.visit(node, *() if added is None else (added.node,))
    steps = walk.steps[::-1]
    return Scores(
        product,
        node,
        steps,
        walk.slope,
        walk.symbols,
        walk.dropout_p,
        walk.sink,
        walk.leading,
        walk.chain,
        walk.reads,
        walk.maxima,
    )


def _given_up(node: fx.Node) -> Exception:
    if leads_to_product(node):
        return Unclear(f"the scores go through {describe_call(node)}")
    return NotAttention()


def _step(walk: _Walk, call: Call, node: fx.Node) -> fx.Node | None:
    """One operation on scores: note what it does and go on to its input. None if unknown."""
    rank = example_of(node).dim()
    following: Any
    others: tuple[Any, ...] = ()
    if (shifted := _minus_maximum(walk, call, node)) is not None:
        if walk.slope is not None or walk.sink is not None:
            raise Unclear("the maximum is subtracted where softmax is not blind to it")
        return shifted
    if same_matrices(call, node):
        following = call["input"]
    elif call.name in ("mul", "div"):
        following, by = multiplier(call)
        if by is None:
            inputs = (call["input"], call["other"])
            if any(isinstance(each, fx.Node) and leads_to_product(each) for each in inputs):
                raise Unclear("the scale is a tensor")
            return None
        _scale(walk, by)
    elif call.name == "tanh":
        if walk.slope is not None:
            raise Unclear("the scores go through tanh twice")
        if walk.symbols:
            raise Unclear("tanh of the scores times a symbolic number")
        walk.slope = 1.0
        following = call["input"]
    elif call.name in ("add", "sub") and (same := beside_zero(call)) is not None:
        following = same
    elif call.name in ("add", "sub"):
        following, added = addend(call, rank)
        _mask(walk, added)
        others = (added.node,)
    elif call.name in ("masked_fill", "where"):
        following, replaced = replacement(call, rank)
        _mask(walk, replaced)
        others = (replaced.node,)
    else:
        return None
    if call.in_place and following is not call["input"]:
        raise Unclear(f"{describe_call(node)} writes the scores over another tensor")
    if not isinstance(following, fx.Node) or not same_shape(following, node, call):
        raise Unclear(f"{describe_call(node)} makes the scores larger")
    walk.visit(node, *others)
    return walk.source(node, following)


def _scale(walk: _Walk, factor: float | Symbol) -> None:
    if isinstance(factor, Symbol):
        walk.symbols.append(factor)
    elif walk.slope is not None:
        walk.slope *= factor
    else:
        walk.steps.append(Scaled(factor))


def _mask(walk: _Walk, step: Added | Replaced) -> None:
    if walk.slope is not None:
        raise Unclear("a mask inside tanh")
    if walk.symbols:
        raise Unclear("masked scores are multiplied by a symbolic number")
    walk.steps.append(step)


def _minus_maximum(walk: _Walk, call: Call, node: fx.Node) -> fx.Node | None:
    """x in x - x.max(-1, keepdim=True), to which softmax is blind; None for other calls."""
    if call.name != "sub" or not isinstance(call["other"], fx.Node):
        return None
    scores, nodes, maximum = call["input"], [], call["other"]
    while (inner := call_of(maximum)) is not None and inner.name in ("detach", "getitem"):
        if inner.name == "getitem" and inner["index"] != 0:
            return None
        nodes.append(maximum)
        maximum = inner["input"]
    if inner is None or inner.name not in ("max", "amax") or inner["input"] is not scores:
        return None
    dims = inner["dim"] if isinstance(inner["dim"], (tuple, list)) else (inner["dim"],)
    if tuple(dims) not in ((-1,), (example_of(node).dim() - 1,)) or inner["keepdim"] is not True:
        return None
    if call["alpha"] != 1:
        return None
    walk.visit(node)
    for inside, outside in zip([*nodes, maximum], [node, *nodes], strict=True):
        if set(inside.users) != {outside}:
            raise Unclear(f"the attention weights are also used by {describe_call(inside)}")
        walk.chain.append(inside)
        walk.maxima.append(inside)
    return walk.source(node, scores)
