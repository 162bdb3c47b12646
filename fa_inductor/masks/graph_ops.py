"""Operations that compute: factories, comparisons, logic, arithmetic, choices, sums along a row."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from . import expressions as ex
from .expressions import Expr, Number
from .graphs import Index, Interpreter, Opaque, constant, handles, plain, shape_of
from .known_floats import known_arithmetic
from .spaces import size_of

_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_LESS = {"less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
_DIVISION = {"floordiv": "//", "floor_divide": "//", "mod": "%", "remainder": "%"}


def _argument(node: fx.Node, place: int, name: str, *default: Any) -> Any:
    if len(node.args) > place:
        return node.args[place]
    if name in node.kwargs:
        return node.kwargs[name]
    if default:
        return default[0]
    raise Opaque


def _only(node: fx.Node, count: int, *names: str) -> None:
    """Refuse a call with arguments that its handler does not know."""
    if len(node.args) > count or set(node.kwargs) - set(names):
        raise Opaque


def _pair(of: Interpreter, node: fx.Node, index: Index) -> tuple[Expr, Expr]:
    _only(node, 2, "other")
    left, right = node.args[0], _argument(node, 1, "other")
    return of.operand(left, index, len(index)), of.operand(right, index, len(index))


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target.strip("_")
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2].strip("_")
    return str(getattr(target, "__name__", "")).strip("_")


@handles(*_COMPARISONS, *_LESS, *(f"__{name}__" for name in _COMPARISONS), "not_equal")
def _compared(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    op = {**_COMPARISONS, **_LESS, "not_equal": "!="}[_name(node)]
    return ex.compare(op, *_pair(of, node, index))


@handles("and", "and_", "bitwise_and", "logical_and", "__and__", "__rand__")
def _and(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    return ex.all_of(*_booleans(of, node, index))


@handles("or", "or_", "bitwise_or", "logical_or", "__or__", "__ror__")
def _or(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    return ex.any_of(*_booleans(of, node, index))


@handles("xor", "bitwise_xor", "logical_xor", "__xor__")
def _xor(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    left, right = _booleans(of, node, index)
    return ex.any_of(ex.all_of(left, ex.negate(right)), ex.all_of(ex.negate(left), right))


def _booleans(of: Interpreter, node: fx.Node, index: Index) -> tuple[Expr, Expr]:
    """Both operands as bools; bitwise operations on whole numbers are something else."""
    left, right = _pair(of, node, index)
    if not _name(node).startswith("logical") and not all(map(ex.is_boolean, (left, right))):
        raise Opaque
    return ex.truth(left), ex.truth(right)


@handles("invert", "inv", "bitwise_not", "logical_not", "__invert__")
def _not(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    _only(node, 1)
    given = of.operand(node.args[0], index, len(index))
    if not _name(node).startswith("logical") and not ex.is_boolean(given):
        raise Opaque
    return ex.negate(ex.truth(given))


@handles(*_ARITHMETIC, "__add__", "__sub__", "__mul__", "__radd__", "__rmul__")
def _arithmetic(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    op = _ARITHMETIC[_name(node).removeprefix("r")]
    return _calculated(node, op, *_pair(of, node, index))


@handles("rsub", "__rsub__")
def _subtracted_from(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    left, right = _pair(of, node, index)
    return _calculated(node, "-", right, left)


@handles("neg", "negative", "__neg__")
def _negative(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    zero = Number(sympy.Integer(0))
    return _calculated(node, "-", zero, of.operand(node.args[0], index, len(index)))


@handles("abs", "absolute", "__abs__")
def _size(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    _only(node, 1)
    _whole_numbers(node)
    return ex.size(of.operand(node.args[0], index, len(index)))


@handles(*_DIVISION, "__floordiv__", "__mod__")
def _divided(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    op = _DIVISION[_name(node)]
    left, right = _pair(of, node, index)
    _whole_numbers(node)
    if not isinstance(right, Number) or not right.value.is_Integer or right.value <= 0:
        raise Opaque
    return ex.arithmetic(op, left, right)


@handles("div", "divide", "true_divide")
def _floor_div(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    if node.kwargs.get("rounding_mode") != "floor" or len(node.args) != 2:
        raise Opaque
    left, right = (of.operand(each, index, len(index)) for each in node.args)
    _whole_numbers(node)
    if not isinstance(right, Number) or not right.value.is_Integer or right.value <= 0:
        raise Opaque
    return ex.arithmetic("//", left, right)


def _calculated(node: fx.Node, op: str, left: Expr, right: Expr) -> Expr:
    """+, - or *, of floats where they are known."""
    dtype = node.meta["example_value"].dtype
    if dtype.is_floating_point:
        known = known_arithmetic(op, left, right, dtype)
        if known is None:
            raise Opaque
        return known
    _whole_numbers(node)
    return ex.arithmetic(op, left, right)


def _whole_numbers(node: fx.Node) -> None:
    """Only int64 is exact here: other dtypes round or wrap around."""
    if node.meta["example_value"].dtype != torch.int64:
        raise Opaque


# --- Choices --------------------------------------------------------------------------------------


@handles("where")
def _where(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    if node.op == "call_method":  # x.where(condition, y)
        _only(node, 3)
        chosen, condition, other = node.args
    else:
        _only(node, 3)
        condition, chosen, other = node.args
    parts = (of.operand(each, index, len(index)) for each in (condition, chosen, other))
    return ex.where(*parts)


@handles("masked_fill")
def _masked_fill(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    _only(node, 3, "mask", "value")
    mask, value = _argument(node, 1, "mask"), _argument(node, 2, "value")
    parts = (of.operand(each, index, len(index)) for each in (mask, value, node.args[0]))
    return ex.where(*parts)


@handles("tril")
def _tril(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    return _triangle(of, node, index, "<=")


@handles("triu")
def _triu(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    return _triangle(of, node, index, ">=")


def _triangle(of: Interpreter, node: fx.Node, index: Index, op: str) -> Expr:
    _only(node, 2, "diagonal")
    diagonal = constant(plain(_argument(node, 1, "diagonal", 0)))
    row, column = index[-2:]
    inside = ex.compare(op, ex.arithmetic("-", column, row), diagonal)
    zero = ex.cast(Number(sympy.Integer(0)), node.meta["example_value"].dtype)
    return ex.where(inside, of.operand(node.args[0], index, len(index)), zero)


# --- Factories ------------------------------------------------------------------------------------


@handles("arange")
def _arange(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    _only(
        node, 3, "start", "end", "step", "device", "dtype", "layout", "pin_memory", "requires_grad"
    )
    if node.meta["example_value"].dtype not in (torch.int64, torch.int32):
        raise Opaque
    given = [plain(each) for each in node.args]
    start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    if len(given) >= 2:
        start = given[0]
    if len(given) == 3:
        step = given[2]
    start, step = plain(start), plain(step)
    if not all(isinstance(each, (int, torch.SymInt)) for each in (start, step)):
        raise Opaque
    return ex.arithmetic("+", constant(start), ex.arithmetic("*", constant(step), index[0]))


@handles("ones", "new_ones", "ones_like")
def _ones(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    return _filled(node, 1)


@handles("zeros", "new_zeros", "zeros_like")
def _zeros(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    return _filled(node, 0)


@handles("full", "new_full", "full_like")
def _full(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    method_or_like = _name(node) in ("new_full", "full_like")
    place = 2 if _name(node) == "new_full" else 1
    value = _argument(node, place if method_or_like else 1, "fill_value")
    return _filled(node, plain(value))


@handles("tensor", "scalar_tensor")
def _literal(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    """A number as a tensor of rank 0."""
    _only(node, 1, "dtype", "device", "requires_grad", "pin_memory", "layout")
    if index:
        raise Opaque
    return _filled(node, plain(node.args[0]))


def _filled(node: fx.Node, value: Any) -> Expr:
    if value is None or isinstance(value, (torch.dtype, torch.device)):
        raise Opaque
    return ex.cast(constant(value), node.meta["example_value"].dtype)


# --- Other dtypes, and the same again -------------------------------------------------------------


@handles(
    "to",
    "type",
    "type_as",
    "bool",
    "int",
    "long",
    "float",
    "half",
    "bfloat16",
    "double",
    "_to_copy",
    "cpu",
    "cuda",
)
def _cast(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    """What comes out has the node's dtype: the caller casts."""
    return of.operand(node.args[0], index, len(index))


@handles("clone", "contiguous", "detach", "alias", "lift_fresh")
def _same(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    return of.operand(node.args[0], index, len(index))


# --- Along a row ----------------------------------------------------------------------------------

_STEP = sympy.Symbol("step", integer=True, nonnegative=True)


@handles("cumsum")
def _cumsum(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    """The sum of a row that is the same everywhere."""
    _only(node, 2, "dim", "dtype")
    if node.meta["example_value"].dtype != torch.int64:
        raise Opaque
    dim = plain(_argument(node, 1, "dim")) % len(index)
    along = (*index[:dim], Number(_STEP), *index[dim + 1 :])
    each = ex.cast(of.operand(node.args[0], along, len(index)), torch.int64)
    if not isinstance(each, Number) or _STEP in each.value.free_symbols:
        raise Opaque
    return ex.arithmetic("*", each, ex.arithmetic("+", index[dim], ex.number(1)))


@handles("diff")
def _diff(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    """x[k + 1] - x[k], of x behind what is put before it."""
    _only(node, 1, "dim", "prepend", "n")
    if node.kwargs.get("n", 1) != 1:
        raise Opaque
    _whole_numbers(node)
    given, before = node.args[0], node.kwargs.get("prepend")
    dim = plain(node.kwargs.get("dim", -1)) % len(index)
    place = index[dim].value

    def at(source: Any, where: sympy.Expr) -> Expr:
        return of.element(source, (*index[:dim], ex.number(where), *index[dim + 1 :]))

    if before is None:
        return ex.arithmetic("-", at(given, place + 1), at(given, place))
    if size_of(shape_of(before)[dim]) != 1 or not isinstance(place, sympy.Symbol):
        raise Opaque
    first = ex.arithmetic("-", at(given, sympy.Integer(0)), at(before, sympy.Integer(0)))
    later = ex.arithmetic("-", at(given, place), at(given, place - 1))
    if any(ex.reads_of(later)):
        raise Opaque  # it would be read in front of its first element
    return ex.where(ex.compare("==", index[dim], ex.number(0)), first, later)


@handles("cat", "concat", "concatenate")
def _cat(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    _only(node, 2, "dim")
    pieces = node.args[0]
    dim = plain(_argument(node, 1, "dim", 0)) % len(index)
    if not isinstance(pieces, (tuple, list)) or len(pieces) != 2:
        raise Opaque
    first = size_of(shape_of(pieces[0])[dim])
    inside = ex.compare("<", index[dim], ex.number(first))

    def at(piece: Any, where: sympy.Expr) -> Expr:
        return of.element(piece, (*index[:dim], ex.number(where), *index[dim + 1 :]))

    left = at(pieces[0], index[dim].value)
    right = at(pieces[1], index[dim].value - first)
    if any(ex.reads_of(left)) or any(ex.reads_of(right)):
        raise Opaque  # each would be read outside of its shape
    return ex.where(inside, left, right)
