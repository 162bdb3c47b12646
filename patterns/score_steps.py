"""Single operations on scores and on attention weights: what each of them does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import fx

from .. import symbolic
from ..support_row import dtype_name
from .calls import Call, is_cast, number
from .family import example_of
from .lineage import is_scores, leads_to_product
from .views import is_copy, keeps_matrices

# A score that is replaced by a number as low as this counts for nothing beside one that is not.
REPLACED_BELOW = -1e30
_RESHAPES = frozenset(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"))


class NotAttention(Exception):
    """What was found is something else."""


class Unclear(Exception):
    """An attention that cannot be taken, and why."""


@dataclass(frozen=True)
class Added:
    """A tensor added to the scores: `node` times `factor`, at scores with `rank` dimensions."""

    node: fx.Node
    rank: int
    factor: float = 1.0


@dataclass(frozen=True)
class Replaced:
    """Scores set to `value` where the bool `node` is True (False if `inverted`)."""

    node: fx.Node
    rank: int
    value: float
    inverted: bool = False


@dataclass(frozen=True)
class Scaled:
    factor: float


Step = Union[Added, Replaced, Scaled]


# --- Scores ---------------------------------------------------------------------------------------


def beside_zero(call: Call) -> fx.Node | None:
    """What nothing but the number 0 is added to, as where a model has a bias for some layers only;
    None for other calls."""
    left, right = call["input"], call["other"]
    if isinstance(left, fx.Node) and number(right) == 0:
        return left
    zero = call.name == "add" and call["alpha"] == 1 and number(left) == 0
    return right if zero and isinstance(right, fx.Node) else None


def addend(call: Call, rank: int) -> tuple[fx.Node, Added]:
    """(the scores, what is added to them)."""
    left, right = call["input"], call["other"]
    if call["alpha"] != 1:
        raise Unclear(f"the scores go through {call.name} with alpha={call['alpha']}")
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        if any(isinstance(each, fx.Node) and leads_to_product(each) for each in (left, right)):
            raise Unclear("a number is added to the scores")
        raise NotAttention
    if is_scores(left):
        return left, Added(right, rank, -1.0 if call.name == "sub" else 1.0)
    if call.name == "sub" or not is_scores(right):
        if leads_to_product(left) or leads_to_product(right):
            raise Unclear(f"the scores go through {call.name} in a form that is not known")
        raise NotAttention
    return right, Added(left, rank)


def replacement(call: Call, rank: int) -> tuple[Any, Replaced]:
    """(the scores, where they are replaced by which number)."""
    if call.name == "masked_fill":
        scores, mask, value, inverted = call["input"], call["mask"], call["value"], False
    else:
        mask, scores, value, inverted = call["condition"], call["input"], call["other"], True
        if number(value) is None:
            scores, value, inverted = value, scores, False
    if not isinstance(mask, fx.Node) or not isinstance(scores, fx.Node):
        raise NotAttention
    if not leads_to_product(scores):
        raise NotAttention
    filled, dtype = number(value), example_of(scores).dtype
    if filled is None:
        raise Unclear("scores are replaced by other than a number")
    if example_of(mask).dtype != torch.bool:
        raise Unclear(f"scores are replaced where a {example_of(mask).dtype} mask says so")
    if filled != -math.inf and not filled <= REPLACED_BELOW:
        raise Unclear(
            f"masked scores are replaced by {filled:g} in {dtype_name(dtype)}; "
            f"only -inf, or {REPLACED_BELOW:g} and less, hides a key in every row"
        )
    return scores, Replaced(mask, rank, filled, inverted)


def sink_objection(sink: Any) -> str | None:
    """Why a (B, H, Sq, 1) tensor is not one number for each head; None where it is."""
    if not isinstance(sink, torch.Tensor) or not symbolic.same(sink.shape[-1], 1):
        return "is not one column"
    for dim in (0, 2):
        if not symbolic.same(sink.shape[dim], 1) and not symbolic.same(sink.stride(dim), 0):
            return "is not one number for each head"
    return None


# --- Scores and weights ---------------------------------------------------------------------------


def probability(call: Call) -> float:
    """Of being dropped; 0.0 in evaluation."""
    p = example_of(call["p"])
    if not isinstance(call["train"], bool):
        raise Unclear("whether dropout drops is symbolic")
    if not isinstance(p, (int, float, torch.SymFloat)):
        raise Unclear("the probability of dropout is not a number")
    # A symbol is guarded to be what it is, as in the `sdpa` family.
    return float(p) if call["train"] else 0.0


def same_matrices(call: Call, node: fx.Node) -> bool:
    """Whether a call leaves each (Sq, Sk) matrix in place: casts, copies, split batches."""
    if is_cast(call, node) or is_copy(call):
        return True
    if call.name not in _RESHAPES or not isinstance(call["input"], fx.Node):
        return False
    before = example_of(call["input"])
    return isinstance(before, torch.Tensor) and keeps_matrices(before, example_of(node))


def same_shape(before: fx.Node, after: fx.Node, call: Call) -> bool:
    if call.name in _RESHAPES:
        return True
    sizes, others = example_of(before).shape, example_of(after).shape
    return len(sizes) == len(others) and all(map(symbolic.guarded_same, sizes, others))


def drops_last(call: Call, node: fx.Node) -> bool:
    """[..., :-1]"""
    index, source = call["index"], call["input"]
    if not isinstance(index, tuple) or not isinstance(example_of(source), torch.Tensor):
        return False
    *front, last = index
    whole = all(each is Ellipsis or each == slice(None, None, None) for each in front)
    reaches = Ellipsis in front or len(index) == example_of(source).dim()
    return whole and reaches and last == slice(None, -1, None)
