"""What a node of a graph is made of, as far back as its matrices keep their size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .. import symbolic
from .calls import call_of
from .family import example_of
from .products import is_product

_SEARCH_DEPTH = 20


def is_scores(node: fx.Node) -> bool:
    """Whether `node` is a product, or what a known operation makes of one."""
    seen = 0
    while not is_product(node) and seen < _SEARCH_DEPTH:
        call = call_of(node)
        if call is None:
            return False
        names = ("input", "other") if call.name in ("mul", "add") else ("input",)
        inputs = [call.arguments.get(name) for name in names]
        nodes = [each for each in inputs if isinstance(each, fx.Node)]
        if not nodes:
            return False
        found = [each for each in nodes if leads_to_product(each)]
        node = (found or nodes)[0]
        seen += 1
    return is_product(node)


def leads_to_product(node: fx.Node) -> bool:
    """Whether some product of the same (Sq, Sk) stands behind `node`."""
    return any(is_product(each) for each in _behind(node))


def leads_to_softmax(node: fx.Node) -> bool:
    """Whether a softmax of a product of the same (Sq, Sk), or one key more, stands behind it."""
    for each in _behind(node, may_gain=True):
        call = call_of(each)
        if call is not None and call.name == "softmax" and isinstance(call["input"], fx.Node):
            return any(is_product(inner) for inner in _behind(call["input"], may_gain=True))
    return False


def _behind(node: fx.Node, may_gain: bool = False) -> Iterator[fx.Node]:
    """`node` and what it is made of, as long as the last two dimensions stay, down to products."""
    wanted = _matrix(node)
    if wanted is None:
        return
    level, seen = [node], {node}
    for _ in range(_SEARCH_DEPTH):
        yield from level
        following = []
        for each in level:
            if is_product(each):
                continue
            for source in each.all_input_nodes:
                size = _matrix(source)
                if source in seen or size is None:
                    continue
                gained = may_gain and symbolic.same(abs(size[1] - wanted[1]), 1)
                if symbolic.same(size[0], wanted[0]) and (
                    symbolic.same(size[1], wanted[1]) or gained
                ):
                    seen.add(source)
                    following.append(source)
        level = following


def _matrix(node: fx.Node) -> tuple[Any, Any] | None:
    example = example_of(node)
    if not isinstance(example, torch.Tensor) or example.dim() < 2:
        return None
    return example.shape[-2], example.shape[-1]
