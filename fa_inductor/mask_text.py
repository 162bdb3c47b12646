"""Masks as text: which of the places (b, h, i, j) are visible, as an expression.

    (i - j >= 0) and (t0[b, j] != 0)

Written in Python's syntax, of: the indices b, h, i, j; Sq and Sk; whole numbers; `t0[...]`,
`t1[...]`, elements of the tensors that come with the text; + - *, // and % by a number;
comparisons; `and`, `or`, `not`. Everything is evaluated at every place: where an index is outside
of its tensor, the nearest element is read. It is part of an op's arguments, so that a cached graph
cannot run another mask.
"""

from __future__ import annotations

import ast
import copy
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import ShapeError

INDICES = ("b", "h", "i", "j")
SIZES = ("Sq", "Sk")
TENSOR_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64)

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> ast.expr:
    """The expression behind `text`.

    Raises `ShapeError` for anything that is not the language above: it may come from a user.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ShapeError(f"The mask {text!r} is no expression: {error.msg}.") from None
    for node in ast.walk(tree):
        if not _is_known(node):
            raise ShapeError(
                f"The mask {text!r} has {ast.unparse(node) if isinstance(node, ast.expr) else node}"
                "; see fa_inductor/mask_text.py for what masks are made of."
            )
    return tree


def copied(text: str) -> ast.expr:
    """`parsed(text)`, for a caller who changes it."""
    return copy.deepcopy(parsed(text))


def _is_known(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in (*INDICES, *SIZES) or tensor_number(node.id) is not None
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, bool)
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS
    if isinstance(node, ast.BinOp):
        return type(node.op) in _ARITHMETIC
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, (ast.Not, ast.USub))
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Name) and tensor_number(node.value.id) is not None
    known = (ast.BoolOp, ast.And, ast.Or, ast.Not, ast.USub, ast.Tuple, ast.Load)
    return isinstance(node, known) or type(node) in _ARITHMETIC or type(node) in _COMPARISONS


def tensor_number(name: str) -> int | None:
    """3 for "t3"."""
    return int(name[1:]) if name[:1] == "t" and name[1:].isdigit() else None


def tensors_in(text: str) -> int:
    """How many tensors `text` reads: one more than the last one's number."""
    numbers = [
        number
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Name) and (number := tensor_number(node.id)) is not None
    ]
    return max(numbers, default=-1) + 1


def index_of(node: ast.Subscript) -> list[ast.expr]:
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def rendered(text: str, tensors: Sequence[Tensor], shape: Sequence[int], device: Any) -> Tensor:
    """The mask as a bool tensor of `shape` (B, H, Sq, Sk), True where visible."""
    places = []
    for dim, size in enumerate(shape):
        sizes = [1] * 4
        sizes[dim] = -1
        places.append(torch.arange(size, device=device).view(sizes))
    return shown_at(text, tensors, places, shape[2:]).expand(*shape)


def shown_at(
    text: str, tensors: Sequence[Tensor], places: Sequence[Tensor], sizes: Sequence[int]
) -> Tensor:
    """Whether the mask shows the places (b, h, i, j), four int tensors that broadcast together, as
    a bool tensor that broadcasts to them. sizes: (Sq, Sk)."""
    values: dict[str, Any] = dict(zip(INDICES, places, strict=True))
    made = _value(parsed(text), {**values, "Sq": sizes[0], "Sk": sizes[1]}, tensors)
    if not isinstance(made, Tensor):
        made = torch.tensor(bool(made), device=places[0].device)
    return made


def _value(node: ast.expr, values: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    def of(each: ast.expr) -> Any:
        return _value(each, values, tensors)

    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Compare):
        return _COMPARISONS[type(node.ops[0])](of(node.left), of(node.comparators[0]))
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](of(node.left), of(node.right))
    if isinstance(node, ast.UnaryOp):
        given = of(node.operand)
        if isinstance(node.op, ast.USub):
            return -given
        return torch.logical_not(given) if isinstance(given, Tensor) else not given
    if isinstance(node, ast.Subscript):
        assert isinstance(node.value, ast.Name)
        number = tensor_number(node.value.id)
        assert number is not None
        tensor = tensors[number]
        places = tuple(
            _inside(of(each), size) for each, size in zip(index_of(node), tensor.shape, strict=True)
        )
        return tensor[places]
    assert isinstance(node, ast.BoolOp)
    join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
    return functools.reduce(join, map(of, node.values))


def _inside(place: Any, size: int) -> Any:
    return place.clamp(0, size - 1) if isinstance(place, Tensor) else min(max(place, 0), size - 1)


@functools.lru_cache(maxsize=256)
def ranks_in(text: str) -> dict[int, int]:
    """With how many indices `text` reads each tensor, by its number.

    Raises `ShapeError` for one that is read in two ways.
    """
    ranks: dict[int, int] = {}
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Subscript):
            assert isinstance(node.value, ast.Name)
            number = tensor_number(node.value.id)
            assert number is not None
            if ranks.setdefault(number, len(index_of(node))) != len(index_of(node)):
                raise ShapeError(f"The mask {text!r} reads t{number} as of two ranks.")
    return ranks
