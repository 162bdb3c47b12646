"""Programs that build masks, drawn at random: the operations that models build theirs from."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

SIZES = ((2, 3, 7, 7), (1, 2, 5, 9), (3, 1, 9, 5), (2, 2, 6, 6), (1, 1, 1, 8), (2, 1, 8, 1))


@dataclass
class Program:
    """A traced program; `mask` is its last node, `value` what it computes."""

    graph: fx.Graph
    mask: fx.Node
    value: Tensor
    shape: tuple[int, int, int, int]
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def tensor(self, node: fx.Node) -> Tensor:
        return node.meta["example_value"]


def program(seed: int) -> Program:
    """A bool mask, or one of 0 and -inf, that broadcasts to its shape (B, H, Sq, Sk)."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = draw.choice(SIZES)
    inputs = mask_inputs(shape)
    graph = fx.Graph()
    with Recording(graph, inputs) as recording:
        value = Builder(draw, shape).mask(*inputs.values())
    return Program(graph, recording.nodes[id(value)], value, shape, inputs)


def mask_inputs(shape: tuple[int, int, int, int]) -> dict[str, Tensor]:
    """What masks are made from, beside sizes."""
    b, h, sq, sk = shape
    return {
        "padding": torch.rand(b, sk) < 0.7,
        "ids_q": torch.randint(0, 3, (b, sq)),
        "ids_k": torch.randint(0, 3, (b, sk)),
        "dense": torch.rand(b, 1, sq, sk) < 0.8,
        "per_head": torch.randint(0, 4, (h,)),
    }


class Recording(TorchFunctionMode):
    """Writes what runs into a graph, in the way that Dynamo does, with its values."""

    def __init__(self, graph: fx.Graph, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graph, self.values = graph, list(inputs.values())
        self.nodes: dict[int, fx.Node] = {}
        for name, value in inputs.items():
            self.note(graph.placeholder(name), value)

    def note(self, node: fx.Node, value: Tensor) -> None:
        node.meta["example_value"] = value
        self.nodes[id(value)] = node
        self.values.append(value)  # so that its id is not used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__")
        if isinstance(value, Tensor) and (writes or id(value) not in self.nodes):
            given, named = tree_map(self._node, (args, kwargs or {}))
            if not hasattr(func, "__objclass__") and not func.__qualname__.startswith("Tensor"):
                node = self.graph.call_function(func, given, named)
            elif hasattr(operator, name) and name.startswith("__"):
                node = self.graph.call_function(getattr(operator, name), given, named)
            else:
                node = self.graph.call_method(name, given, named)
            self.note(node, value)
        return value

    def _node(self, value: Any) -> Any:
        return self.nodes[id(value)] if isinstance(value, Tensor) else value


class Builder:
    """Draws the program while it runs."""

    def __init__(self, draw: random.Random, shape: tuple[int, int, int, int]) -> None:
        self.draw, self.shape = draw, shape

    def mask(self, padding: Any, ids_q: Any, ids_k: Any, dense: Any, per_head: Any) -> Any:
        draw = self.draw
        self.data = {"padding": padding, "ids_q": ids_q, "ids_k": ids_k, "per_head": per_head}
        self.dense = dense
        made = self.term()
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            made = self.joined(made, self.term())
        if draw.random() < 0.3:
            made = self.turned(made)
        b, h, sq, sk = self.shape
        if draw.random() < 0.3:
            made = made.expand(b, draw.choice((1, h)) if made.shape[1] == 1 else h, sq, sk)
        return made if draw.random() < 0.7 else self.as_float(made)

    def as_float(self, mask: Any) -> Any:
        kind = self.draw.randrange(5)
        if kind == 0:
            return torch.where(mask, 0.0, float("-inf"))
        zeros = torch.zeros(self.shape)
        if kind == 1:
            return zeros.masked_fill_(torch.logical_not(mask), float("-inf"))
        if kind == 2:
            zeros = zeros.masked_fill_(torch.logical_not(mask), float("-inf"))
            return zeros.masked_fill_(self.term(), 0.0)
        if kind == 3:
            return zeros.masked_fill(torch.logical_not(mask), float("-inf"))
        return torch.full(self.shape, float("-inf")).masked_fill(mask, 0)

    def joined(self, left: Any, right: Any) -> Any:
        kind = self.draw.randrange(8)
        if kind < 4:
            return left & right
        if kind == 4:
            return torch.logical_and(left, right)
        if kind == 5:
            return left | right
        return torch.where(left, right, False) if kind == 6 else left.bitwise_or(right)

    def turned(self, mask: Any) -> Any:
        return self.draw.choice((lambda m: ~m, torch.logical_not, lambda m: m == 0))(mask)

    def term(self) -> Any:
        """(B or 1, H or 1, Sq or 1, Sk or 1), bool."""
        kinds: tuple[tuple[Callable[[], Any], int], ...] = (
            (self.band, 6),
            (self.triangle, 2),
            (self.padded, 3),
            (self.documents, 3),
            (self.chunks, 1),
            (self.constant, 1),
            (self.monotone, 2),
            (self.heads, 1),
            (lambda: self.dense, 1),
        )
        pick = self.draw.choices([kind for kind, _ in kinds], [often for _, often in kinds])[0]
        return pick()

    def places(self, letter: str) -> Any:
        """arange of i or j in one of its spellings, along its own dimension of four."""
        draw = self.draw
        dim = "bhij".index(letter)
        size = self.shape[dim]
        start = draw.choice((0, 0, 0, 2, -1))
        made = (
            torch.arange(size) + start if draw.random() < 0.5 else torch.arange(start, start + size)
        )
        if draw.random() < 0.2:
            made = made * draw.choice((1, 2))
        index: list[Any] = [None] * 4
        index[dim] = slice(None)
        if draw.random() < 0.5:
            return made[tuple(index)]
        sizes = [1] * 4
        sizes[dim] = size
        return made.view(*sizes)

    def band(self) -> Any:
        draw = self.draw
        i, j = self.places("i"), self.places("j")
        bound = draw.choice((0, 0, 1, -1, 3))
        kind = draw.randrange(8)
        if kind == 0:
            return j <= i + bound
        if kind == 7:
            near = (i - j).abs()
            return draw.choice((near <= bound, near < 2, near > bound, near == 1, bound != near))
        if kind == 1:
            return i >= j
        if kind == 2:
            return torch.gt(j, i - bound)
        if kind == 3:
            return (i - j) < 1 + abs(bound)
        if kind == 4:
            return j.lt(self.shape[3] - bound)
        if kind == 5:
            return (i - j).ge(bound)
        return j != i + bound

    def triangle(self) -> Any:
        draw = self.draw
        whole = draw.choice(
            (
                lambda: torch.ones(self.shape[2:], dtype=torch.bool),
                lambda: torch.full(self.shape[2:], True),
                lambda: self.dense.new_ones(self.shape[2:]),
            )
        )()
        diagonal = draw.choice((0, 0, 1, -2, 3))
        if draw.random() < 0.3:  # of zeros and ones
            ones = torch.ones(self.shape[2:]).tril(diagonal)[None, None]
            return draw.choice((ones == 1, ones == 0, ones != 0, ones > 0, ones.bool(), ones < 1))
        made = whole.tril(diagonal) if draw.random() < 0.6 else torch.triu(whole, diagonal)
        if draw.random() < 0.2:
            made = made.logical_not_()
        return made[None, None]

    def padded(self) -> Any:
        padding = self.data["padding"]
        kind = self.draw.randrange(4)
        if kind == 0:
            return padding[:, None, None, :]
        if kind == 1:
            return padding.to(torch.int64).unsqueeze(1).unsqueeze(2).to(torch.bool)
        if kind == 2:
            b = torch.arange(self.shape[0])[:, None, None, None]
            return padding[b, torch.arange(self.shape[3])[None, None, None, :]]
        return (self.data["ids_k"] > 0).reshape(self.shape[0], 1, 1, self.shape[3])

    def documents(self) -> Any:
        one, other = self.data["ids_q"][:, None, :, None], self.data["ids_k"][:, None, None, :]
        return self.draw.choice((torch.eq, torch.ge, lambda x, y: x - y == 0))(one, other)

    def chunks(self) -> Any:
        size = self.draw.choice((2, 3))
        i, j = torch.arange(self.shape[2])[:, None], torch.arange(self.shape[3])[None]
        same = torch.div(i, size, rounding_mode="floor") == j // size
        return (same if self.draw.random() < 0.7 else (i % size) >= (j % size))[None, None]

    def constant(self) -> Any:
        return self.draw.choice(
            (
                lambda: torch.ones(1, 1, 1, 1, dtype=torch.bool),
                lambda: torch.zeros(self.shape, dtype=torch.bool).logical_not(),
                lambda: self.data["padding"].new_ones(()).view(1, 1, 1, 1),
            )
        )()

    def monotone(self) -> Any:
        """Documents counted from positions that go up by one: all the same."""
        b, _, sq, sk = self.shape
        length = max(sq, sk)
        positions = torch.arange(length).unsqueeze(0).expand(b, -1)
        first = positions[:, :1] - self.draw.choice((1, 1, 2))
        number = torch.cumsum(torch.diff(positions, prepend=first, dim=-1) != 1, -1)
        batch = torch.arange(b)[:, None, None, None]
        i, j = torch.arange(sq)[None, None, :, None], torch.arange(sk)[None, None, None, :]
        return number[batch, i] == number[batch, j]

    def heads(self) -> Any:
        """Heads that see more than others."""
        distance = torch.arange(self.shape[2])[:, None] - torch.arange(self.shape[3])[None]
        return distance[None, None] <= self.data["per_head"][None, :, None, None]
