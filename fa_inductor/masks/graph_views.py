"""Operations that only look at their first operand in another way: they change the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from . import expressions as ex
from .expressions import Expr, Number
from .graphs import Index, Interpreter, Opaque, handles, plain, shape_of
from .spaces import size_of

_ZERO = Number(sympy.Integer(0))


def _dim(value: Any, rank: int) -> int:
    dim = plain(value)
    if not isinstance(dim, int):
        raise Opaque
    return dim % rank if rank else 0


def _sizes(node: Any) -> list[sympy.Expr]:
    return [size_of(size) for size in shape_of(node)]


@handles(
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "flatten",
    "unflatten",
    "_unsafe_view",
    "view_as",
    "reshape_as",
)
def _reshaped(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    """Only dimensions of size 1 come or go."""
    given = node.args[0]
    before, after = _sizes(given), _sizes(node)
    wide = [each for each, size in zip(index, after, strict=True) if size != 1]
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        raise Opaque
    places = iter(wide)
    return of.element(given, tuple(_ZERO if size == 1 else next(places) for size in before))


@handles("expand", "expand_as", "broadcast_to")
def _expanded(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    return of.operand(node.args[0], index, len(index))


@handles("transpose", "swapaxes", "swapdims")
def _transposed(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    if len(node.args) != 3:
        raise Opaque
    left, right = (_dim(each, len(index)) for each in node.args[1:])
    order = list(range(len(index)))
    order[left], order[right] = order[right], order[left]
    return of.element(node.args[0], tuple(index[each] for each in order))


@handles("t", "mT", "adjoint")
def _last_two_transposed(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    if len(index) < 2:
        raise Opaque
    return of.element(node.args[0], (*index[:-2], index[-1], index[-2]))


@handles("getattr")
def _attribute(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    if node.args[1] == "mT" or (node.args[1] == "T" and len(index) == 2):
        return _last_two_transposed(of, node, index)
    raise Opaque


@handles("permute")
def _permuted(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    order = node.args[1:]
    if len(order) == 1 and isinstance(order[0], (tuple, list)):
        order = tuple(order[0])
    dims = [_dim(each, len(index)) for each in order]
    return of.element(node.args[0], tuple(index[dims.index(dim)] for dim in range(len(dims))))


@handles("select")
def _selected(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    if len(node.args) != 3:
        raise Opaque
    sizes = _sizes(node.args[0])
    dim = _dim(node.args[1], len(sizes))
    place = _inside(plain(node.args[2]), sizes[dim])
    return of.element(node.args[0], (*index[:dim], place, *index[dim:]))


@handles("narrow")
def _narrowed(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    if len(node.args) != 4:
        raise Opaque
    sizes = _sizes(node.args[0])
    dim = _dim(node.args[1], len(sizes))
    start = _inside(plain(node.args[2]), sizes[dim])
    shifted = ex.number(index[dim].value + start.value)
    return of.element(node.args[0], (*index[:dim], shifted, *index[dim + 1 :]))


def _inside(place: Any, size: sympy.Expr) -> Number:
    """A place from the front, for one that may count from the back."""
    if not isinstance(place, int):
        raise Opaque
    return ex.number(place if place >= 0 else size + place)


@handles("getitem", "__getitem__")
def _item(of: Interpreter, node: fx.Node, index: Index) -> Expr:
    given, wanted = node.args
    wanted = tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,)
    sizes = _sizes(given)
    if any(_is_tensor(each) for each in wanted):
        return _gathered(of, given, wanted, sizes, index)
    consumed = sum(each is not None and each is not Ellipsis for each in wanted)
    places = list(index)
    own: list[Number] = []
    for each in wanted:
        if each is Ellipsis:
            own += [places.pop(0) for _ in range(len(sizes) - consumed)]
        elif each is None:
            places.pop(0)
        elif isinstance(each, slice):
            own.append(_sliced(each, places.pop(0), sizes[len(own)]))
        else:
            own.append(_inside(plain(each), sizes[len(own)]))
    return of.element(given, (*own, *places))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), torch.Tensor)


def _sliced(part: slice, place: Number, size: sympy.Expr) -> Number:
    """The place in the whole of a place in the slice."""
    start, step = plain(part.start), plain(part.step)
    if step not in (None, 1):
        raise Opaque
    if start is None:
        return place
    if not isinstance(start, int):
        raise Opaque
    if size.is_number:
        start = max(0, min(start if start >= 0 else size + start, size))
    elif start < 0:  # it may be cut off at the front
        raise Opaque
    return ex.number(place.value + start)


def _gathered(
    of: Interpreter,
    given: Any,
    wanted: Sequence[Any],
    sizes: Sequence[sympy.Expr],
    index: Index,
) -> Expr:
    """x[t0, t1, ...], where the tensors name places that are certainly inside."""
    if not all(map(_is_tensor, wanted)):
        raise Opaque
    ranks = [len(shape_of(each)) for each in wanted]
    rank = max(ranks)
    places, rest = index[:rank], index[rank:]
    own = []
    for each, size in zip(wanted, sizes, strict=False):
        place = of.operand(each, places, rank)
        if not isinstance(place, Number) or not of.is_inside(place, size):
            raise Opaque
        own.append(place)
    return of.element(given, (*own, *rest))
