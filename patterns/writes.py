"""Whether a tensor is written to after it was read.

A rewrite reads its tensors at the anchor and no longer where the code did, so nothing may write to
them in between.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ..graph_writes import storages, written_to
from .calls import describe_call

# Methods and functions that look at a tensor's metadata only, wherever the tensor stands ...
_METADATA = frozenset(("size", "dim", "stride", "numel", "ndimension", "is_contiguous"))
_METADATA_FUNCTIONS = frozenset(
    (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like)
)
# ... and those that do so with their second argument.
_LIKE = frozenset(("reshape_as", "view_as", "expand_as", "type_as"))


def looks_at_metadata(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user` needs only the shape, dtype or device of `node`."""
    if user.kwargs and node in user.kwargs.values():
        return False
    if user.op == "call_method":
        if user.target in _LIKE:
            return user.args[0] is not node
        return str(user.target) in _METADATA or str(user.target).startswith("new_")
    if user.op != "call_function":
        return False
    if user.target is getattr:
        return user.args[1] in ("shape", "dtype", "device", "ndim")
    return user.target in _METADATA_FUNCTIONS


def write_between(
    reads: Iterable[tuple[fx.Node, fx.Node]], anchor: fx.Node, own: Iterable[fx.Node]
) -> str | None:
    """The first write to a tensor after it was read and before `anchor`, in words; or None.

    reads: (reader, tensor). own: nodes that the rewrite removes, whose writes go with them.
    """
    first: dict[int, tuple[fx.Node, fx.Node]] = {}
    for reader, tensor in reads:
        for memory in storages(tensor):
            if memory not in first or reader < first[memory][0]:
                first[memory] = (reader, tensor)
    if not first:
        return None
    ours = set(own)
    node = min(reader for reader, _ in first.values())
    while node is not anchor:
        if node not in ours:
            for argument in written_to(node):
                for memory in storages(argument):
                    if memory in first and first[memory][0] < node:
                        return f"{first[memory][1].name} is written to by {describe_call(node)}"
        node = node.next
    return None
