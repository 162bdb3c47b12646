"""Batched matrix products: `matmul`, `@`, `bmm`, `baddbmm` and `einsum` in one form.

A product is left (..., I, C) times right (..., C, J), with the same number of leading dimensions on
both sides; a leading dimension of 1 is broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from .calls import Call, call_of
from .family import example_of
from .views import View

_LEADING = "ABCDEFGH"  # labels that stand for an ellipsis; only those not in use are taken


@dataclass(frozen=True)
class Product:
    """order: the result's dimensions, out of (leading..., I, J).

    factor: a number that the product is multiplied by. added: (tensor, its factor) that is added,
    as `baddbmm` does.
    """

    left: View
    right: View
    order: tuple[int, ...]
    factor: Any = 1.0
    added: tuple[fx.Node, Any] | None = None


class _Operand(NamedTuple):
    """An operand of an einsum, with the labels of its dimensions."""

    node: fx.Node
    labels: str


def is_product(node: Any) -> bool:
    call = call_of(node) if isinstance(node, fx.Node) else None
    return call is not None and call.name in ("matmul", "bmm", "baddbmm", "einsum")


def scores_product(node: fx.Node) -> Product | None:
    """The product of which `node` is (..., I, J); None where it is none."""
    call = call_of(node)
    return None if call is None else _product(call, _scores_of_einsum)


def values_product(node: fx.Node) -> Product | None:
    """The product whose left side is (..., I, J) as it stands; None where it is none."""
    call = call_of(node)
    if call is None or call.name == "baddbmm":
        return None
    return _product(call, _values_of_einsum)


def _product(
    call: Call, of_einsum: Callable[[_Operand, _Operand, str], Product | None]
) -> Product | None:
    if call.name != "einsum":
        return _plain(call)
    parsed = _equation(call)
    return None if parsed is None else of_einsum(*parsed)


def _scores_of_einsum(first: _Operand, second: _Operand, out: str) -> Product | None:
    if out[-2] in second.labels and out[-1] in first.labels:
        first, second = second, first
    shared = set(first.labels) & set(second.labels) - set(out)
    if len(shared) != 1 or out[-2] in second.labels or out[-1] in first.labels:
        return None
    (contracted,) = shared
    leading = out[:-2]
    left = _arranged(first, leading + out[-2] + contracted)
    right = _arranged(second, leading + contracted + out[-1])
    if left is None or right is None:
        return None
    return Product(left, right, tuple(range(len(out))))


def _values_of_einsum(first: _Operand, second: _Operand, out: str) -> Product | None:
    if not _is_weights(first.labels, second.labels, out):
        first, second = second, first
    if not _is_weights(first.labels, second.labels, out):
        return None
    leading, row, contracted = first.labels[:-2], first.labels[-2], first.labels[-1]
    rest = [label for label in second.labels if label not in leading and label != contracted]
    if len(rest) != 1 or set(out) != {*leading, row, *rest}:
        return None
    canonical = leading + row + rest[0]
    right = _arranged(second, leading + contracted + rest[0])
    if right is None:
        return None
    order = tuple(canonical.index(label) for label in out)
    return Product(View(first.node), right, order)


def _is_weights(labels: str, others: str, out: str) -> bool:
    """Whether `labels` are (leading..., I, J) of a product that sums over J only."""
    return (
        len(labels) > 2
        and labels[-1] in others
        and labels[-1] not in out
        and labels[-2] not in others
        and all(label in out for label in labels[:-1])
    )


def _plain(call: Call) -> Product | None:
    """`matmul` of two tensors of one rank, `bmm` and `baddbmm`."""
    if call.name == "baddbmm":
        left, right = call["batch1"], call["batch2"]
    elif call.name in ("matmul", "bmm"):
        left, right = call["input"], call["other" if call.name == "matmul" else "mat2"]
    else:
        return None
    ranks = [_rank(left), _rank(right)]
    if None in ranks or ranks[0] != ranks[1] or ranks[0] < 3:
        return None
    order = tuple(range(ranks[0]))
    if call.name != "baddbmm":
        return Product(View(left), View(right), order)
    added = None if call["beta"] == 0 else (call["input"], call["beta"])
    return Product(View(left), View(right), order, call["alpha"], added)


def _rank(value: Any) -> Any:
    tensor = example_of(value) if isinstance(value, fx.Node) else None
    return tensor.dim() if isinstance(tensor, torch.Tensor) else None


def _equation(call: Call) -> tuple[_Operand, _Operand, str] | None:
    """Both operands and the labels of the result, an ellipsis written out."""
    equation, operands = call["equation"], call["operands"]
    if not isinstance(equation, str) or len(operands) != 2 or equation.count("->") != 1:
        return None
    if not all(_rank(operand) is not None for operand in operands):
        return None
    inputs, out = equation.replace(" ", "").split("->")
    sides = inputs.split(",")
    if len(sides) != 2:
        return None
    if "..." in equation:
        counts = {
            _rank(operand) - len(side.replace("...", ""))
            for side, operand in zip(sides, operands, strict=True)
        }
        free = "".join(label for label in _LEADING if label not in equation)
        if len(counts) != 1 or not all("..." in each for each in (*sides, out)):
            return None
        (count,) = counts
        if not 0 <= count <= len(free):
            return None
        sides = [side.replace("...", free[:count]) for side in sides]
        out = out.replace("...", free[:count])
    for labels in (*sides, out):
        if len(set(labels)) != len(labels) or not labels.isalpha():
            return None
    if any(len(s) != _rank(o) for s, o in zip(sides, operands, strict=True)) or len(out) < 3:
        return None
    if set(out) - {*sides[0], *sides[1]}:
        return None
    first, second = map(_Operand, operands, sides)
    return first, second, out


def _arranged(operand: _Operand, wanted: str) -> View | None:
    """The operand with its dimensions in the order `wanted`; leading ones that it lacks are 1."""
    node, labels = operand
    if set(labels) - set(wanted) or not set(wanted[-2:]) <= set(labels):
        return None
    present = [label for label in wanted if label in labels]
    order = tuple(labels.index(label) for label in present)
    view = View(node)
    if order != tuple(range(len(order))):
        swaps = (*range(len(order) - 2), len(order) - 1, len(order) - 2)
        view = view.mT() if order == swaps else view.then("permute", *order)
    for place, label in enumerate(wanted):
        if label not in labels:
            view = view.then("unsqueeze", place)
    return view
