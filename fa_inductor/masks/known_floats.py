"""Arithmetic of floats that are known, or known to be one or the other."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from .expressions import Apply, Expr, Literal, Number, is_small, where

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


def known_arithmetic(op: str, left: Expr, right: Expr, dtype: torch.dtype) -> Expr | None:
    """+, - or * with a result in `dtype`; None where an operand is not known."""
    for place, side in enumerate((left, right)):
        if isinstance(side, Apply) and side.op == "where":
            condition, *chosen = side.args
            pairs = [(each, right) if place == 0 else (left, each) for each in chosen]
            found = [known_arithmetic(op, *pair, dtype) for pair in pairs]
            first, second = found
            return None if first is None or second is None else where(condition, first, second)
    one, other = _value(left), _value(right)
    if one is None or other is None:
        return None
    value = _OPERATIONS[op](one, other)
    # Float32 is rounded to once more from twice the digits, which changes nothing; what has 16 bits
    # is rounded from float32, unless there is nothing to round.
    exact = dtype.itemsize > 2 or float(torch.tensor(value, dtype=dtype)) == value
    return Literal(value) if exact else None


def _value(expr: Expr) -> float | None:
    if isinstance(expr, Literal) and not isinstance(expr.value, bool):
        return expr.value
    return float(expr.value) if isinstance(expr, Number) and is_small(expr.value) else None
