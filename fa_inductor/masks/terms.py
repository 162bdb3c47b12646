"""What a mask lets every query see: a band, and what else there is to it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from .. import mask_text
from . import expressions as ex
from . import graph_ops, graph_views  # noqa: F401  (they register what they understand)
from .expressions import BATCH, INDICES, KEY, QUERY, Apply, Expr, Literal, Number, Read
from .graphs import Interpreter, Opaque
from .spaces import Space, band_side

# A score with less than this added is lost to it in float32, whatever it was.
_HUGE = -1e30


@dataclass(frozen=True)
class Formula:
    """A mask as text (`fa_inductor.mask_text`), and the nodes of the tensors that it reads."""

    text: str
    tensors: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Part:
    """One mask of a node's.

    hides: whether True in a bool mask hides a key, instead of showing it. is_soft: whether its
    scores are then replaced by a huge number, and not by -inf.
    """

    node: fx.Node
    hides: bool = False
    is_soft: bool = False


@dataclass(frozen=True)
class Mask:
    """What is visible: i - left <= j <= i + right, None where unbounded, and all of `rest`.

    is_soft: whether something is hidden by a huge number, and not by -inf. is_uniform: whether
        all that is hidden is so by one and the same number.
    """

    space: Space
    left: sympy.Expr | None
    right: sympy.Expr | None
    rest: tuple[Expr, ...]
    is_soft: bool = False
    is_uniform: bool = False

    @property
    def is_everything(self) -> bool:
        return self.left is None and self.right is None and not self.rest

    @property
    def is_band(self) -> bool:
        return not self.rest

    @property
    def sees_something(self) -> bool:
        """Whether every query certainly sees a key: that on one of the two diagonals."""
        sq, sk = self.space.lengths
        certain = self.space.is_nonnegative
        return self.is_band and any(
            (self.right is None or certain(self.right - offset))
            and (self.left is None or certain(self.left + offset))
            and certain(QUERY + offset)
            and certain(sk - 1 - QUERY - offset)
            for offset in (sympy.Integer(0), sympy.expand(sk - sq))
        )

    @property
    def dense_reads(self) -> int:
        """How many tensors are read at both i and j."""
        return len({read for term in self.rest for read in ex.reads_of(term) if _is_dense(read)})

    @property
    def is_by_key(self) -> bool:
        """Whether all queries see the same keys."""
        symbols = set().union(*map(ex.symbols_of, self.rest))
        return self.left is None and self.right is None and QUERY not in symbols

    @property
    def is_doubtful(self) -> bool:
        """Whether a query may see nothing and give an average of hidden keys, not 0."""
        return self.is_soft and not self.sees_something

    @property
    def whole(self) -> Expr:
        parts = [*self.rest]
        if self.left is not None:
            parts.insert(0, ex.compare(">=", ex.number(KEY), ex.number(QUERY - self.left)))
        if self.right is not None:
            parts.insert(0, ex.compare("<=", ex.number(KEY), ex.number(QUERY + self.right)))
        return ex.all_of(*parts)


def understand(mask: fx.Node, interpreter: Interpreter) -> Mask | None:
    """What a mask node lets through at the places of the interpreter's space; None for one that
    cannot be written as text, or that reads more than one tensor as large as the scores.

    A float mask counts if it adds 0 or -inf; or a huge number instead of -inf, where every query
    sees something else.
    """
    found = meant([Part(mask)], interpreter)
    return None if found is None or found.is_doubtful else found


def meant(parts: Sequence[Part], interpreter: Interpreter) -> Mask | None:
    """What masks mean of which a key has to pass all; None where one cannot be written."""
    visible: list[Expr] = []
    hidden: set[float] = set()  # what stands in the place of scores
    for part in parts:
        tensor = part.node.meta["example_value"]
        if tensor.requires_grad:
            return None
        index = tuple(map(Number, INDICES[4 - tensor.dim() :]))
        try:
            element = interpreter.element(part.node, index)
            if tensor.dtype == torch.bool:
                shown = ex.truth(element)
                visible.append(ex.negate(shown) if part.hides else shown)
                hidden.add(_HUGE if part.is_soft else -math.inf)
            else:
                shown, values = _visible(element)
                visible.append(shown)
                hidden |= values
        except Opaque:
            return None
    space = interpreter.space
    found = _split(space, space.simplified(ex.all_of(*visible)))
    is_soft, is_uniform = any(map(math.isfinite, hidden)), len(parts) == len(hidden) == 1
    found = dataclasses.replace(found, is_soft=is_soft, is_uniform=is_uniform)
    reads = [read.node for term in found.rest for read in ex.reads_of(term)]
    if any(map(interpreter.is_changing, reads)):  # it may have been another when it was read
        return None
    return found if all(map(_is_writable, found.rest)) and found.dense_reads <= 1 else None


def _visible(added: Expr) -> tuple[Expr, set[float]]:
    """Where an added mask is 0, and the huge numbers that it is elsewhere."""
    if isinstance(added, Literal):
        if added.value == 0:
            return ex.TRUE, set()
        if added.value <= _HUGE:
            return ex.FALSE, {added.value}
        raise Opaque
    if isinstance(added, Apply) and added.op == "where":
        condition, chosen, other = added.args
        (left, left_values), (right, right_values) = _visible(chosen), _visible(other)
        return ex.where(condition, left, right), left_values | right_values
    raise Opaque


def _split(space: Space, visible: Expr) -> Mask:
    left: sympy.Expr | None = None
    right: sympy.Expr | None = None
    rest: list[Expr] = []
    for term in visible.args if isinstance(visible, Apply) and visible.op == "and" else (visible,):
        side = band_side(term)
        if side is None:
            if not ex.is_true(term):
                rest.append(term)
            continue
        name, bound = side
        before = right if name == "right" else left
        narrower = bound if before is None else _least(space, before, bound)
        if narrower is None:
            rest.append(term)
        elif name == "right":
            right = narrower
        else:
            left = narrower
    return Mask(space, left, right, tuple(rest))


def _least(space: Space, one: sympy.Expr, other: sympy.Expr) -> sympy.Expr | None:
    if space.is_nonnegative(other - one):
        return one
    return other if space.is_nonnegative(one - other) else None


# --- As text --------------------------------------------------------------------------------------


def _is_dense(read: Read) -> bool:
    return {QUERY, KEY} <= ex.symbols_of(read)


def _is_writable(expr: Expr) -> bool:
    """Whether it has only what masks as text have; of what is as large as the scores, bools."""
    if isinstance(expr, Number):
        return True
    if isinstance(expr, Literal):
        return isinstance(expr.value, bool)
    if isinstance(expr, Read):
        small = expr.dtype.itemsize == 1 or not _is_dense(expr)
        return expr.dtype in mask_text.TENSOR_DTYPES and small and bool(expr.index)
    if expr.op in ("//", "%"):
        return all(isinstance(each, Number) for each in expr.args)
    if expr.op in ("+", "-", "*"):
        reads = list(ex.reads_of(expr))
        exact = all(read.dtype == torch.int64 for read in reads)
        return exact and all(map(_is_writable, expr.args))
    if expr.op.startswith("cast:") or expr.op in ("where", "abs"):
        return False
    return all(map(_is_writable, expr.args))


def formula(mask: Mask) -> Formula | None:
    """The whole mask as text; None if it has a size that is neither Sq nor Sk."""
    names: dict[Any, str] = {symbol: symbol.name for symbol in INDICES}
    for size, name in zip(mask.space.lengths, mask_text.SIZES, strict=True):
        if isinstance(size, sympy.Symbol):
            names.setdefault(size, name)
    tensors: list[fx.Node] = []
    text = _written(mask.whole, names, tensors)
    return None if text is None else Formula(text, tuple(tensors))


def dense_formula(mask: fx.Node, hides: bool) -> Formula:
    """A bool mask of rank 1 to 4 that is read at every place; hides: as in `Part`."""
    sizes = mask.meta["example_value"].shape
    names = [symbol.name for symbol in INDICES[4 - len(sizes) :]]
    index = ("0" if size == 1 else name for size, name in zip(sizes, names, strict=True))
    return Formula(f"(t0[{', '.join(index)}] {'==' if hides else '!='} 0)", (mask,))


def _written(expr: Expr, names: dict[Any, str], tensors: list[fx.Node]) -> str | None:
    if isinstance(expr, Literal):
        return str(expr.value)
    if isinstance(expr, Number):
        return _number(expr.value, names)
    if isinstance(expr, Read):
        places = [_number(each.value, names) for each in expr.index]
        if any(place is None for place in places):
            return None
        if expr.node not in tensors:
            tensors.append(expr.node)
        text = f"t{tensors.index(expr.node)}[{', '.join(map(str, places))}]"
        return f"({text} != 0)" if expr.dtype == torch.bool else text
    parts = [_written(each, names, tensors) for each in expr.args]
    if any(part is None for part in parts):
        return None
    if expr.op == "not":
        return f"(not {parts[0]})"
    return "(" + f" {expr.op} ".join(map(str, parts)) + ")"


def _number(value: sympy.Expr, names: dict[Any, str]) -> str | None:
    if not value.free_symbols <= set(names):
        return None
    symbols = {symbol: sympy.Symbol(name) for symbol, name in names.items()}
    return str(sympy.expand(value).subs(symbols, simultaneous=True))


# --- In words -------------------------------------------------------------------------------------


def in_words(mask: Mask) -> str:
    """`causal, window 1024, padding of keys (attention_mask)`."""
    words = []
    if mask.right is not None:
        words.append("causal" if mask.right == 0 else f"j <= i + {mask.right}")
    if mask.left is not None:
        words.append(f"window {mask.left + 1}")
    words += [_term_in_words(term) for term in mask.rest]
    return ", ".join(words) or "everything"


def _name(node: fx.Node) -> str:
    """The user's name of an argument, without what Dynamo puts around it."""
    return re.sub(r"^l_(?:kwargs_|args_)?(.+?)_$", r"\1", node.name)


def _term_in_words(term: Expr) -> str:
    reads = list(ex.reads_of(term))
    names = " and ".join(dict.fromkeys(_name(read.node) for read in reads))
    is_flag = isinstance(term, Read) or (isinstance(term, Apply) and term.op in ("==", "!="))
    used = set().union(*(n.value.free_symbols for read in reads for n in read.index))
    if is_flag and len(reads) == 1 and ex.symbols_of(term) == used:
        if used <= {BATCH, KEY}:
            return f"padding of keys ({names})"
        if used <= {BATCH, QUERY}:
            return f"padding of queries ({names})"
        return f"dense ({names})"
    if isinstance(term, Apply) and term.op == "==" and len(reads) == 2:
        return f"documents ({names})"
    tensors: list[fx.Node] = []
    symbols = {symbol: symbol.name for symbol in ex.symbols_of(term)}
    return _written(term, symbols, tensors) or "a formula"
