"""From a node of a Dynamo graph to what its elements are.

`Interpreter.element(node, index)` asks "what is node[index]?" and follows the graph upwards from
there, so that a view only changes the index and a mask costs no more than its own few nodes. What
is not understood is a read of the tensor that the node computes: nothing is ever guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .. import graph_writes
from . import expressions as ex
from .expressions import Expr, Number
from .spaces import Space, size_of

Index = tuple[Number, ...]
_ZERO = Number(sympy.Integer(0))


class Opaque(Exception):
    """A node that has to be read as it is."""


class Interpreter:
    """Of one graph, at the places of one space.

    operands: what the calls of a sub-graph hand in for its placeholders. Nodes whose memory is
        written to anywhere in the graph are never looked into, but for memory that was only
        written to while it was made.
    """

    def __init__(
        self,
        graph: fx.Graph,
        space: Space,
        operands: Mapping[fx.Node, Sequence[Any]] | None = None,
    ) -> None:
        self.space, self._operands = space, operands or {}
        self._changing = graph_writes.changing_storages(graph)
        self._known: dict[tuple[fx.Node, Index], Expr] = {}
        self._callers: dict[fx.Graph, Interpreter] = {}

    def element(self, node: Any, index: Index) -> Expr:
        """The element of a node, or of a plain number, at an index that is inside its shape."""
        if not isinstance(node, fx.Node):
            return constant(node)
        tensor = node.meta.get("example_value")
        if not isinstance(tensor, torch.Tensor):
            return self._scalar(tensor)
        if len(index) != tensor.dim():
            raise Opaque
        key = (node, index)
        if key not in self._known:
            self._known[key] = self._computed(node, tensor, index)
        return self._known[key]

    def is_changing(self, node: fx.Node) -> bool:
        return not self._changing.isdisjoint(graph_writes.storages(node))

    def _scalar(self, value: Any) -> Expr:
        if isinstance(value, (int, float, bool, torch.SymInt)):
            return constant(value)
        raise Opaque

    def _computed(self, node: fx.Node, tensor: torch.Tensor, index: Index) -> Expr:
        index = tuple(
            _ZERO if size_of(size) == 1 else each
            for each, size in zip(index, tensor.shape, strict=True)
        )
        read = ex.Read(node, index, tensor.dtype)
        if self.is_changing(node):
            return read
        if node in self._operands:
            return self._handed_in(self._operands[node], index) or read
        handler = _handler(node)
        if handler is None:
            return read
        try:
            found = handler(self, node, index)
        except Opaque:
            return read
        return _rounded(found, tensor.dtype)

    def _handed_in(self, operands: Sequence[Any], index: Index) -> Expr | None:
        """What all calls of a sub-graph hand in alike; None if they differ, or if it is read from
        tensors that only the callers have."""
        outside = [self._of(each) for each in operands]
        found = {of.element(node, index) for of, node in zip(outside, operands, strict=True)}
        if len(found) > 1 or any(ex.reads_of(next(iter(found)))):
            return None
        return next(iter(found))

    def _of(self, node: fx.Node) -> Interpreter:
        """The interpreter of a caller's graph."""
        if node.graph not in self._callers:
            self._callers[node.graph] = Interpreter(node.graph, self.space, self._operands)
        return self._callers[node.graph]

    def is_inside(self, place: Number, size: sympy.Expr) -> bool:
        """Whether a place is certainly one of the `size` of a dimension."""
        inside = self.space.is_nonnegative
        return inside(place.value) and inside(sympy.expand(size - 1 - place.value))

    def operand(self, node: Any, index: Index, rank: int) -> Expr:
        """The element of an operand that broadcasts to `rank` dimensions."""
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else node
        if not isinstance(value, torch.Tensor):
            return self.element(node, ())
        own = index[rank - value.dim() :]
        return self.element(node, own)


def constant(value: Any) -> Expr:
    if isinstance(value, bool):
        return ex.Literal(value)
    if isinstance(value, (int, torch.SymInt)):
        return ex.number(size_of(value))
    if isinstance(value, float):
        return ex.Literal(value)
    raise Opaque


def _rounded(expr: Expr, dtype: torch.dtype) -> Expr:
    """An element as the tensor holds it."""
    if isinstance(expr, Number) and dtype == torch.int64:
        return expr
    return ex.cast(expr, dtype)


# --- Operations -----------------------------------------------------------------------------------

Handler = Callable[[Interpreter, fx.Node, Index], Expr]
_HANDLERS: dict[str, Handler] = {}
# Methods that write what their namesake without "_" gives, in the dtype that is there.
_IN_PLACE = ("masked_fill_", "tril_", "triu_", "logical_and_", "logical_or_", "logical_not_")


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for operations by the name that functions, methods and ops share."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _handler(node: fx.Node) -> Handler | None:
    if node.op == "call_method":
        name = str(node.target)
        return _HANDLERS.get(name.removesuffix("_") if name in _IN_PLACE else name)
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if target.namespace != "aten":
            return None
        return _HANDLERS.get(target._schema.name.partition("::")[2])
    module = getattr(target, "__module__", None) or ""
    owner = getattr(getattr(target, "__self__", None), "__name__", "")
    if module.split(".")[0] in ("_operator", "torch") or owner == "_VariableFunctionsClass":
        return _HANDLERS.get(getattr(target, "__name__", ""))
    return None


def shape_of(node: Any) -> tuple[Any, ...]:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise Opaque
    return tuple(value.shape)


def plain(value: Any) -> Any:
    """A number, a SymInt or a dtype behind an argument."""
    if isinstance(value, fx.Node):
        value = value.meta.get("example_value")
    if isinstance(value, (int, float, bool, torch.SymInt, torch.dtype, torch.device, type(None))):
        return value
    raise Opaque
