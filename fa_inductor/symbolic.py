"""Questions about sizes that may be symbolic.

Every function returns True only for what holds for all sizes the graph can be run with;
`guarded_same` is the one that may narrow those sizes, by a guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import torch

Dim = Union[int, torch.SymInt]


def is_static(dim: Dim) -> bool:
    """Whether `dim` is a plain int or a SymInt that can only be one number."""
    return isinstance(dim, int) or dim.node.expr.is_number


def as_int(dim: Dim) -> int:
    """The number behind a static `dim`."""
    return dim if isinstance(dim, int) else int(dim.node.expr)


def hint(dim: Dim) -> int:
    """What a size is in the call that is being compiled, 1 where that is not known.

    For choices that only cost time when a later call is unlike this one.
    """
    if is_static(dim):
        return as_int(dim)
    assert isinstance(dim, torch.SymInt)
    return int(dim.node.hint) if dim.node.has_hint() else 1


def same(left: Dim, right: Dim) -> bool:
    """Whether both sizes are provably equal."""
    return _known(left == right)


def guarded_same(left: Dim, right: Dim) -> bool:
    """Whether both sizes are equal now; the graph is then only valid while they are.

    For sizes that must agree for the attention to exist at all, or that agree in nearly every
    model (Sq and Sk of a causal attention), but reach the graph as symbols of their own.
    """
    return guarded(left == right)


def guarded(fact: bool | torch.SymBool) -> bool:
    """Whether `fact` holds now; the graph is then only valid while it does (and while it does not,
    when it does not)."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(fact))


def same_all(left: Sequence[Dim], right: Sequence[Dim]) -> bool:
    """Whether two shapes are provably equal, dimension by dimension."""
    return len(left) == len(right) and all(map(same, left, right))


def divides(divisor: int, dim: Dim) -> bool:
    """Whether `dim` is provably a multiple of `divisor`."""
    return _known(dim % divisor == 0)


def dimension_order(shape: Sequence[Dim], stride: Sequence[Dim]) -> tuple[int, ...]:
    """Dimensions from outermost to innermost in memory.

    Size-1 dimensions have no place of their own in memory, and neither do ties: they keep
    the order in which they stand in `shape`. Strides that cannot be compared
    without a new guard count as already in order.
    """
    order: list[int] = []
    for dim in range(len(shape)):
        position = len(order)
        if not same(shape[dim], 1):
            while position and _is_inside(order[position - 1], dim, shape, stride):
                position -= 1
        order.insert(position, dim)
    return tuple(order)


def _is_inside(before: int, dim: int, shape: Sequence[Dim], stride: Sequence[Dim]) -> bool:
    """Whether `before` moves less far in memory than `dim`, so must stand behind it."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(stride[before] < stride[dim]))


def _known(fact: bool | torch.SymBool) -> bool:
    if isinstance(fact, bool):
        return fact
    # Imported late: symbolic_shapes brings in sympy, which `import fa_inductor` must not wait for.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(fact))


def text(dim: Dim) -> str:
    """How a size is shown to people: `128` or `s0`."""
    return str(as_int(dim)) if is_static(dim) else str(dim)
