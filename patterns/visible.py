"""Masks that only say what a band of keys is: causal, a window, or everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import symbolic
from .family import Scope, example_of, source_of

# (mask, whether True in it hides a key, whether by a huge number instead of -inf).
Part = tuple[fx.Node, bool, bool]


@dataclass(frozen=True)
class Band:
    """A mask that was proven to be this; causal and window as in `AttentionSpec`.

    words: what it is, for people.
    """

    causal: str
    window: tuple[int | None, int | None]
    words: str


def band_of(mask: fx.Node, shape: Sequence[Any], scope: Scope) -> Band | None:
    """The band that is all of a mask of scores `shape` (B, H, Sq, Sk); None for any other."""
    return _band(_understood(mask, shape, scope), source_of(mask))


def words_of(mask: fx.Node, shape: Sequence[Any], scope: Scope) -> str | None:
    """What a mask was understood as, for people; None for one that has to be read as it is."""
    found = _understood(mask, shape, scope)
    return None if found is None else _in_words(found)


@dataclass(frozen=True)
class VisibleText:
    """A mask as text. tensors: what it reads. kind: as in `MaskFormula`.

    averages: whether a query that sees nothing gives the average of all values, and not 0.
    """

    text: str
    tensors: tuple[fx.Node, ...]
    kind: str
    averages: bool


def text_of(mask: Part, shape: Sequence[Any], scope: Scope) -> VisibleText | None:
    """A mask that only shows and hides as text; None for one that adds something else, that hides
    in a way that no text says, or that has more than four dimensions."""
    from ..masks import terms

    node, hides, is_soft = mask
    tensor = example_of(node)
    found = _meant([mask], shape, scope)
    formula = None if found is None else terms.formula(found)
    if found is not None and formula is not None:
        if found.is_doubtful and not found.is_uniform:
            return None
        is_causal = found.right is not None
        kind = "causal" if is_causal else "keys" if found.is_by_key else "other"
        return VisibleText(formula.text, formula.tensors, kind, found.is_doubtful)
    if tensor.dtype != torch.bool or not 0 < tensor.dim() <= 4:
        return None
    formula = terms.dense_formula(node, hides)
    kind = "keys" if symbolic.same((1, *tensor.shape)[-2], 1) else "other"
    return VisibleText(formula.text, formula.tensors, kind, is_soft)


def band_of_all(masks: Sequence[Part], shape: Sequence[Any], scope: Scope) -> Band | None:
    """As `band_of`, of masks all of which a key has to pass."""
    found = _meant(masks, shape, scope)
    if found is None or found.is_doubtful:
        return None
    return _band(found, source_of(masks[-1][0]))


def words_of_all(masks: Sequence[Part], shape: Sequence[Any], scope: Scope) -> str | None:
    """As `words_of`, of masks all of which a key has to pass."""
    found = _meant(masks, shape, scope)
    return None if found is None else _in_words(found)


def _band(found: Any, source: str) -> Band | None:
    if found is None or not found.is_band:
        return None
    band = _aligned(found.left, found.right, found.space)
    words = f"{_in_words(found)}, proven from the mask at {source}"
    return None if band is None else Band(*band, words)


def _understood(mask: fx.Node, shape: Sequence[Any], scope: Scope) -> Any:
    # Imported late: they bring in sympy.
    from ..masks import terms
    from ..masks.graphs import Interpreter
    from ..masks.spaces import Space

    key = (mask, *map(str, shape))
    if key not in scope.understood:
        interpreter = Interpreter(mask.graph, Space.of(shape), scope.operands)
        scope.understood[key] = terms.understand(mask, interpreter)
    return scope.understood[key]


def _meant(masks: Sequence[Part], shape: Sequence[Any], scope: Scope) -> Any:
    from ..masks import terms
    from ..masks.graphs import Interpreter
    from ..masks.spaces import Space

    key = (*masks, *map(str, shape))
    if key not in scope.understood:
        interpreter = Interpreter(masks[0][0].graph, Space.of(shape), scope.operands)
        parts = [terms.Part(*mask) for mask in masks]
        scope.understood[key] = terms.meant(parts, interpreter)
    return scope.understood[key]


def _in_words(found: Any) -> str:
    from ..masks import terms

    return terms.in_words(found)


def _aligned(left: Any, right: Any, space: Any) -> tuple[str, tuple[int | None, int | None]] | None:
    """A band along the diagonal j = i as one that kernels have, on either diagonal."""
    if right is not None and right == 0:
        bound = _bound(left)
        return None if bound is _NONE else ("top_left", (bound, None))
    # Without "top_left", a band lies along the diagonal that ends in the last key.
    offset = space.lengths[1] - space.lengths[0]
    left_bound = _bound(None if left is None else left + offset)
    right_bound = _bound(None if right is None else right - offset)
    if left_bound is _NONE or right_bound is _NONE:
        return None
    if right_bound == 0:
        return "bottom_right", (left_bound, None)
    return "none", (left_bound, right_bound)


_NONE: Any = object()


def _bound(value: Any) -> Any:
    """A bound as an int from 0 on, None for none, `_NONE` for one that no kernel takes."""
    if value is None:
        return None
    value = value.expand()
    return int(value) if value.is_Integer and value >= 0 else _NONE
