"""A tensor of the graph, seen through view operations that the pass adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import symbolic
from .calls import Call, call_of
from .family import Emitter, example_of

Steps = tuple[tuple[str, tuple[Any, ...]], ...]
_SWAP: tuple[str, tuple[Any, ...]] = ("transpose", (-2, -1))


def swapped_first(steps: Steps) -> Steps:
    """`steps` after a swap of the last two dimensions; two swaps are none."""
    return steps[1:] if steps[:1] == (_SWAP,) else (_SWAP, *steps)


@dataclass(frozen=True)
class View:
    """`node` after `steps`, each a tensor's method with its arguments."""

    node: fx.Node
    steps: Steps = ()

    def then(self, method: str, *args: Any) -> View:
        return View(self.node, (*self.steps, (method, args)))

    def example(self) -> torch.Tensor:
        tensor = example_of(self.node)
        for method, args in self.steps:
            tensor = getattr(tensor, method)(*args)
        return tensor

    def emit(self, emit: Emitter) -> fx.Node:
        node = self.node
        for method, args in self.steps:
            node = emit.call(method, node, *args)
        return node

    def mT(self) -> View:
        """With the last two dimensions swapped."""
        if self.steps[-1:] == (_SWAP,):
            return View(self.node, self.steps[:-1])
        return View(self.node, (*self.steps, _SWAP))


def swapped(call: Call | None, node: fx.Node) -> tuple[int, ...] | None:
    """The order in which a transposition puts the dimensions of its input; None for other calls."""
    if call is None or call.name not in ("transpose", "mT", "permute"):
        return None
    before = example_of(call["input"])
    if not isinstance(before, torch.Tensor):
        return None
    rank = before.dim()
    order = list(range(rank))
    if call.name == "permute":
        given = call["rest"][0] if len(call["rest"]) == 1 else call["rest"]
        if node.kwargs or not isinstance(given, (tuple, list)) or len(given) != rank:
            return None
        if not all(isinstance(dim, int) for dim in given):
            return None
        return tuple(dim % rank for dim in given)
    first, second = (-2, -1) if call.name == "mT" else (call["dim0"], call["dim1"])
    if not isinstance(first, int) or not isinstance(second, int) or rank < 2:
        return None
    order[first], order[second] = order[second], order[first]
    return tuple(order)


def keeps_matrices(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether a reshape leaves the last two dimensions as they are, so that only those in front
    are split or joined."""
    return (
        before.dim() >= 2
        and after.dim() >= 2
        and before.dtype == after.dtype
        and all(map(symbolic.guarded_same, before.shape[-2:], after.shape[-2:]))
    )


def is_copy(call: Call | None) -> bool:
    """Whether the call gives the values of its input in the same places."""
    return call is not None and call.name in ("contiguous", "clone")


def without_copies(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node whose values `node` holds, and the copies in between."""
    passed: list[fx.Node] = []
    while is_copy(call := call_of(node)):
        assert call is not None
        if not isinstance(call["input"], fx.Node):
            break
        passed.append(node)
        node = call["input"]
    return node, passed
