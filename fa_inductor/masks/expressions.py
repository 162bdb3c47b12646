"""What a mask's element is, as an expression over its place (b, h, i, j).

Whole numbers are exact: sympy polynomials in the indices and in symbolic sizes. What is read from a
tensor is a `Read`, what is known beforehand a `Literal`, and everything else an `Apply` of an
operation. The functions here build expressions and simplify them on the way, with nothing that is
not true for every value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Union

import sympy
import torch
from torch import fx

BATCH, HEAD, QUERY, KEY = INDICES = tuple(
    sympy.Symbol(name, integer=True, nonnegative=True) for name in "bhij"
)


@dataclass(frozen=True)
class Number:
    """An exact whole number."""

    value: sympy.Expr


@dataclass(frozen=True)
class Literal:
    """A bool or a float."""

    value: bool | float


@dataclass(frozen=True)
class Read:
    """The element of a node's tensor at `index`."""

    node: fx.Node
    index: tuple[Number, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Apply:
    """op: "and", "or", "not", "where", "abs", "cast:DTYPE", a comparison or arithmetic."""

    op: str
    args: tuple[Expr, ...]


Expr = Union[Number, Literal, Read, Apply]

TRUE, FALSE = Literal(True), Literal(False)

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


def number(value: Any) -> Number:
    return Number(sympy.expand(sympy.sympify(value)))


def is_true(expr: Expr) -> bool:
    return expr == TRUE


def is_boolean(expr: Expr) -> bool:
    if isinstance(expr, Literal):
        return isinstance(expr.value, bool)
    if isinstance(expr, Read):
        return expr.dtype == torch.bool
    if isinstance(expr, Apply):
        if expr.op == "where":
            return all(map(is_boolean, expr.args[1:]))
        return expr.op in (*_COMPARISONS, "and", "or", "not", "cast:bool")
    return False


def truth(expr: Expr) -> Expr:
    """Whether `expr` is not zero."""
    if is_boolean(expr):
        return expr
    if isinstance(expr, Literal):
        return Literal(bool(expr.value))
    return compare("!=", expr, Number(sympy.Integer(0)))


def all_of(*parts: Expr) -> Expr:
    """And, flattened."""
    kept: list[Expr] = []
    for part in parts:
        for each in part.args if isinstance(part, Apply) and part.op == "and" else (part,):
            if each == FALSE:
                return FALSE
            if each != TRUE and each not in kept:
                kept.append(each)
    if not kept:
        return TRUE
    return kept[0] if len(kept) == 1 else Apply("and", tuple(kept))


def any_of(*parts: Expr) -> Expr:
    """Or, flattened."""
    kept: list[Expr] = []
    for part in parts:
        for each in part.args if isinstance(part, Apply) and part.op == "or" else (part,):
            if each == TRUE:
                return TRUE
            if each != FALSE and each not in kept:
                kept.append(each)
    if not kept:
        return FALSE
    return kept[0] if len(kept) == 1 else Apply("or", tuple(kept))


def negate(expr: Expr) -> Expr:
    """Not; comparisons of numbers without NaN turn around."""
    if isinstance(expr, Literal):
        return Literal(not expr.value)
    if isinstance(expr, Apply):
        if expr.op == "not":
            return expr.args[0]
        if expr.op == "and":
            return any_of(*map(negate, expr.args))
        if expr.op == "or":
            return all_of(*map(negate, expr.args))
        if expr.op in ("==", "!=") or (expr.op in _NEGATED and all(map(_is_whole, expr.args))):
            return compare(_NEGATED[expr.op], *expr.args)
    return Apply("not", (expr,))


def compare(op: str, left: Expr, right: Expr) -> Expr:
    """A comparison. Those of whole numbers become `difference >= 0`, `== 0` or `!= 0`."""
    if isinstance(left, Literal) and isinstance(right, Literal):
        return Literal(_COMPARISONS[op](left.value, right.value))
    if left == right and not _may_be_nan(left):
        return Literal(op in ("<=", ">=", "=="))
    if isinstance(left, Number) and isinstance(right, Number):
        return _compare_numbers(op, left.value, right.value)
    if isinstance(left, Apply) and left.op == "abs" and isinstance(right, Number):
        return _compare_size(op, left.args[0], right)
    if isinstance(left, (Number, Literal)) and not isinstance(right, (Number, Literal)):
        return compare(_MIRRORED[op], right, left)
    if isinstance(left, Apply) and left.op == "where" and isinstance(right, (Number, Literal)):
        condition, *chosen = left.args
        return where(condition, *(compare(op, each, right) for each in chosen))
    if isinstance(left, Literal) and isinstance(right, Number) and is_small(right.value):
        return Literal(_COMPARISONS[op](left.value, int(right.value)))
    if op in ("==", "!=") and is_boolean(left) and isinstance(right, (Number, Literal)):
        return _against_known(op, left, right)
    return Apply(op, (left, right))


def _compare_size(op: str, of: Expr, bound: Number) -> Expr:
    """|of| beside a whole number."""
    if op in (">", ">="):
        return negate(_compare_size("<=" if op == ">" else "<", of, bound))
    below = arithmetic("-", Number(sympy.Integer(0)), bound)
    if op in ("<", "<="):
        return all_of(compare(op, of, bound), compare(_MIRRORED[op], of, below))
    either = any_of(compare("==", of, bound), compare("==", of, below))
    equal = all_of(compare(">=", bound, Number(sympy.Integer(0))), either)
    return equal if op == "==" else negate(equal)


def size(of: Expr) -> Expr:
    """|of| of a whole number."""
    return (
        Number(abs(of.value))
        if isinstance(of, Number) and of.value.is_Integer
        else Apply("abs", (of,))
    )


def is_small(value: sympy.Expr) -> bool:
    """Whether every float dtype holds it, so that nothing is rounded for a comparison."""
    return bool(value.is_Integer and abs(value) <= 256)


def _against_known(op: str, left: Expr, right: Number | Literal) -> Expr:
    """A bool beside a constant: itself, its opposite or a constant."""
    value = right.value
    if value in (0, 1):
        return left if (value == 1) == (op == "==") else negate(left)
    return Apply(op, (left, right))


def _compare_numbers(op: str, left: sympy.Expr, right: sympy.Expr) -> Expr:
    if op in ("==", "!="):
        difference = sympy.expand(left - right)
        if difference.is_Integer:
            return Literal((difference == 0) == (op == "=="))
        if difference.could_extract_minus_sign():
            difference = -difference
        return Apply(op, (Number(difference), Number(sympy.Integer(0))))
    if op in ("<", ">"):  # whole numbers
        left, right = (left + 1, right) if op == "<" else (left, right + 1)
    difference = sympy.expand(right - left if op in ("<", "<=") else left - right)
    if difference.is_Integer:
        return Literal(bool(difference >= 0))
    return Apply(">=", (Number(difference), Number(sympy.Integer(0))))


_EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


def arithmetic(op: str, left: Expr, right: Expr) -> Expr:
    """+, -, *, // or %, the last two by a positive whole number."""
    left, right = _as_number(left), _as_number(right)
    if isinstance(left, Number) and isinstance(right, Number):
        if op in _EXACT:
            return number(_EXACT[op](left.value, right.value))
        if left.value.is_Integer and right.value.is_Integer:
            known = left.value // right.value if op == "//" else left.value % right.value
            return number(known)
    if isinstance(left, Literal) and isinstance(right, Literal) and op in _EXACT:
        return Literal(_EXACT[op](left.value, right.value))
    return Apply(op, (left, right))


def where(condition: Expr, chosen: Expr, other: Expr) -> Expr:
    condition = truth(condition)
    if isinstance(condition, Literal):
        return chosen if condition.value else other
    if chosen == other:
        return chosen
    if is_boolean(chosen) and is_boolean(other):
        return any_of(all_of(condition, chosen), all_of(negate(condition), other))
    return Apply("where", (condition, chosen, other))


def cast(expr: Expr, dtype: torch.dtype) -> Expr:
    """`expr` in another dtype, where that can change it."""
    if dtype == torch.bool:
        return truth(expr)
    if dtype.is_floating_point:
        if isinstance(expr, Literal) and not isinstance(expr.value, bool):
            return Literal(float(torch.tensor(expr.value, dtype=dtype)))
        if isinstance(expr, Number) and expr.value.is_Integer:
            return Literal(float(torch.tensor(int(expr.value), dtype=dtype)))
        if isinstance(expr, Apply) and expr.op == "where":
            condition, chosen, other = expr.args
            return where(condition, cast(chosen, dtype), cast(other, dtype))
        if is_boolean(expr) and not isinstance(expr, Literal):
            return where(expr, Literal(1.0), Literal(0.0))
    elif isinstance(expr, Number) and dtype in (torch.int64, torch.int32):
        return expr  # indices and sizes fit into either
    elif (isinstance(expr, Read) and expr.dtype == dtype) or (
        dtype == torch.int64 and _is_int64(expr)
    ):
        return expr
    if isinstance(expr, Literal) and isinstance(expr.value, bool):
        return Literal(float(expr.value)) if dtype.is_floating_point else number(int(expr.value))
    return Apply(f"cast:{str(dtype).removeprefix('torch.')}", (expr,))


def substituted(expr: Expr, known: dict[sympy.Symbol, sympy.Expr]) -> Expr:
    """`expr` with other numbers in place of symbols."""
    if isinstance(expr, Number):
        return number(expr.value.subs(known, simultaneous=True))
    if isinstance(expr, Read):
        index = tuple(number(n.value.subs(known, simultaneous=True)) for n in expr.index)
        return Read(expr.node, index, expr.dtype)
    if isinstance(expr, Apply):
        return rebuilt(expr.op, *(substituted(each, known) for each in expr.args))
    return expr


def rebuilt(op: str, *args: Expr) -> Expr:
    """`Apply(op, args)`, simplified."""
    if op == "and":
        return all_of(*args)
    if op == "or":
        return any_of(*args)
    if op == "not":
        return negate(*args)
    if op == "where":
        return where(*args)
    if op in _COMPARISONS:
        return compare(op, *args)
    if op.startswith("cast:"):
        return cast(args[0], getattr(torch, op[5:]))
    if op == "abs":
        return size(*args)
    return arithmetic(op, *args)


def symbols_of(expr: Expr) -> set[sympy.Symbol]:
    if isinstance(expr, Number):
        return set(expr.value.free_symbols)
    if isinstance(expr, Read):
        return set().union(*(n.value.free_symbols for n in expr.index))
    if isinstance(expr, Apply):
        return set().union(*map(symbols_of, expr.args))
    return set()


def reads_of(expr: Expr) -> Iterator[Read]:
    """In order of appearance, with repetitions."""
    if isinstance(expr, Read):
        yield expr
    elif isinstance(expr, Apply):
        for each in expr.args:
            yield from reads_of(each)


def _as_number(expr: Expr) -> Expr:
    if isinstance(expr, Literal) and isinstance(expr.value, bool):
        return number(int(expr.value))
    return expr


def _is_int64(expr: Expr) -> bool:
    """Whether it is calculated in int64 alone."""
    if isinstance(expr, Apply):
        return expr.op in (*_EXACT, "//", "%", "abs") and all(map(_is_int64, expr.args))
    return isinstance(expr, Number) or (isinstance(expr, Read) and expr.dtype == torch.int64)


def _is_whole(expr: Expr) -> bool:
    if isinstance(expr, Literal):
        return isinstance(expr.value, bool)
    if isinstance(expr, Read):
        return not expr.dtype.is_floating_point
    if isinstance(expr, Apply):
        if expr.op.startswith("cast:"):
            return not getattr(torch, expr.op[5:]).is_floating_point
        return is_boolean(expr) or all(map(_is_whole, expr.args))
    return True


def _may_be_nan(expr: Expr) -> bool:
    return not _is_whole(expr)
