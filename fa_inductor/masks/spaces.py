"""The places that a mask has, and what is certain about whole numbers there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from .. import torch_compat
from ..symbolic import Dim
from .expressions import (
    FALSE,
    INDICES,
    KEY,
    QUERY,
    TRUE,
    Apply,
    Expr,
    Number,
    rebuilt,
)

_ZERO = Number(sympy.Integer(0))


def size_of(dim: Dim) -> sympy.Expr:
    """A size as sympy has it."""
    return sympy.Integer(dim) if isinstance(dim, int) else dim.node.expr


@dataclass(frozen=True)
class Space:
    """The scores' shape (B, H, Sq, Sk): b runs from 0 to B - 1, and so on.

    shape_env: what is known about symbolic sizes, None where all are static.
    """

    sizes: tuple[sympy.Expr, ...]
    shape_env: Any = None

    @staticmethod
    def of(shape: Sequence[Dim]) -> Space:
        symbolic = [dim for dim in shape if isinstance(dim, torch.SymInt)]
        shape_env = symbolic[0].node.shape_env if symbolic else None
        return Space(tuple(map(size_of, shape)), shape_env)

    @property
    def lengths(self) -> tuple[sympy.Expr, sympy.Expr]:
        """(Sq, Sk)."""
        return self.sizes[2], self.sizes[3]

    def is_nonnegative(self, value: sympy.Expr) -> bool:
        """Whether `value` is at least 0 at every place. False where that is not certain."""
        low = self._at_lowest(value)
        return low is not None and self._lower_bound(low) >= 0

    def is_negative(self, value: sympy.Expr) -> bool:
        return self.is_nonnegative(sympy.expand(-value - 1))

    def _at_lowest(self, value: sympy.Expr) -> sympy.Expr | None:
        """A lower bound without indices; None if `value` is not affine in them."""
        value = sympy.expand(value)
        for index, size in zip(INDICES, self.sizes, strict=True):
            if index not in value.free_symbols:
                continue
            slope = value.coeff(index, 1)
            rest = sympy.expand(value - slope * index)
            if index in rest.free_symbols or not slope.is_Integer:
                return None
            value = rest if slope >= 0 else sympy.expand(rest + slope * (size - 1))
        return value

    def _lower_bound(self, value: sympy.Expr) -> Any:
        if value.is_number:
            return value
        if self.shape_env is None:
            return -sympy.oo
        return torch_compat.lower_bound(self.shape_env, value)

    def simplified(self, expr: Expr) -> Expr:
        """`expr` without comparisons whose outcome is the same at every place."""
        if not isinstance(expr, Apply):
            return expr
        if expr.op in (">=", "==", "!=") and all(isinstance(each, Number) for each in expr.args):
            return self._decided(expr)
        if expr.op in ("//", "%") and (whole := self._divided(expr)) is not None:
            return whole
        return rebuilt(expr.op, *map(self.simplified, expr.args))

    def _divided(self, expr: Apply) -> Number | None:
        """A quotient or a remainder of what is certainly smaller than its divisor."""
        left, right = expr.args
        if not isinstance(left, Number) or not isinstance(right, Number):
            return None
        if self.is_nonnegative(left.value) and self.is_negative(left.value - right.value):
            return left if expr.op == "%" else _ZERO
        return None

    def _decided(self, expr: Apply) -> Expr:
        left, right = expr.args
        assert isinstance(left, Number)
        assert isinstance(right, Number)
        value = sympy.expand(left.value - right.value)
        if expr.op == ">=":
            if self.is_nonnegative(value):
                return TRUE
            if self.is_negative(value):
                return FALSE
        elif self.is_nonnegative(value - 1) or self.is_negative(value):
            return FALSE if expr.op == "==" else TRUE
        return expr


def band_side(expr: Expr) -> tuple[str, sympy.Expr] | None:
    """("right", c) for j <= i + c, ("left", c) for j >= i - c, with c free of indices."""
    if not isinstance(expr, Apply) or expr.op != ">=":
        return None
    left, right = expr.args
    if not isinstance(left, Number) or right != _ZERO:
        return None
    value = left.value
    slopes = value.coeff(QUERY, 1), value.coeff(KEY, 1)
    rest = sympy.expand(value - slopes[0] * QUERY - slopes[1] * KEY)
    if rest.free_symbols & set(INDICES):
        return None
    if slopes == (1, -1):
        return "right", rest
    return ("left", rest) if slopes == (-1, 1) else None
