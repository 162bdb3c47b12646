"""What the nodes of a graph write to: before autograd it still has its in-place operations."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name.startswith("i")
    and hasattr(operator, name[1:])
    and name not in ("is_", "is_not", "index", "indexOf", "invert", "inv")
) | {operator.iand, operator.ior, operator.setitem, operator.delitem}


def written_to(node: fx.Node) -> Iterator[Any]:
    """The arguments that a node may write to."""
    if "out" in node.kwargs:
        yield node.kwargs["out"]
    if node.op == "call_method":
        if str(node.target).endswith("_") and not str(node.target).endswith("__"):
            yield node.args[0]
        return
    target = node.target
    if node.op != "call_function":
        return
    if isinstance(target, torch._ops.HigherOrderOperator):
        if _bodies_write(node):
            yield from node.all_input_nodes
    elif isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        if _is_mutable(target):
            yield from node.all_input_nodes
    elif node.args and (target in _IN_PLACE_OPERATORS or _is_in_place(node)):
        yield node.args[0]


def written_storages(graph: fx.Graph) -> set[int]:
    """The memory of all tensors that a graph writes to."""
    return {
        storage for node in graph.nodes for value in written_to(node) for storage in storages(value)
    }


def changing_storages(graph: fx.Graph) -> set[int]:
    """`written_storages`, less the memory that is only written to while it is made: by methods
    such as `masked_fill_`, each of which alone reads what the one before it left."""
    writers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for value in written_to(node):
            for storage in storages(value):
                writers.setdefault(storage, []).append(node)
    return {storage for storage, nodes in writers.items() if not _is_making(nodes, storage)}


def _is_making(writers: Sequence[fx.Node], storage: int) -> bool:
    before = writers[0].args[0] if writers[0].args else None
    if not isinstance(before, fx.Node) or before.op not in ("call_function", "call_method"):
        return False
    if any(storage in storages(each) for each in before.all_input_nodes):
        return False  # a view
    for writer in writers:
        reads = writer.op == "call_method" and writer.args[0] is before
        if (
            not reads
            or set(before.users) != {writer}
            or before in (*writer.args[1:], *writer.kwargs.values())
        ):
            return False
        before = writer
    return True


def storages(value: Any) -> Iterator[int]:
    """The memory behind a value of the graph, of all tensors where it is several."""
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else value
    if isinstance(example, torch.Tensor) and example.layout == torch.strided:
        yield example.untyped_storage()._cdata
    elif isinstance(example, (tuple, list)):
        for each in example:
            yield from storages(each)


def _bodies_write(node: fx.Node) -> bool:
    """Whether a body may write to what the higher-order op hands it; one without a graph may."""
    bodies = [
        getattr(node.graph.owning_module, str(argument.target), None)
        for argument in node.all_input_nodes
        if argument.op == "get_attr"
    ]
    graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
    if not graphs:
        return True
    return any(
        storage in written_storages(graph)
        for graph in graphs
        for placeholder in graph.nodes
        if placeholder.op == "placeholder"
        for storage in storages(placeholder)
    )


def _is_mutable(op: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> bool:
    if isinstance(op, torch._ops.OpOverload):
        return bool(op._schema.is_mutable)
    return any(getattr(op, name)._schema.is_mutable for name in op.overloads())


def _is_in_place(node: fx.Node) -> bool:
    """torch.relu_(x), F.relu(x, inplace=True), F.dropout(x, p, training, inplace), ..."""
    target: Any = node.target
    name, module = str(getattr(target, "__name__", "")), getattr(target, "__module__", "")
    if name.endswith("_") and not name.endswith("__") and module != "_operator":
        return True
    return bool(node.kwargs.get("inplace")) or (
        module == "torch.nn.functional" and node.args[-1:] == (True,)
    )
