"""Masks of hand-written attention that only say what a band of keys is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import symbolic
from .assumed import Assumed, assumed_mask
from .family import Scope, example_of
from .masked import VisibleMask, visible_mask
from .score_steps import Replaced, Scaled, Step
from .visible import Band, Part, band_of_all, words_of_all


def band_of_steps(steps: Sequence[Step], shape: Sequence[Any], scope: Scope) -> Band | None:
    """The band that is all that is done to scores `shape` (B, H, Sq, Sk), beside scaling them;
    None where something else is done, or nothing."""
    masks = _masks(steps)
    return band_of_all(masks, shape, scope) if masks else None


def assumed_steps(steps: Sequence[Step], shape: Sequence[Any], scope: Scope) -> Assumed | None:
    """What the user promised the masks to be that are all that is done to scores; or None."""
    masks = _masks(steps)
    return assumed_mask(masks, shape, scope) if masks else None


def words_of_steps(steps: Sequence[Step], shape: Sequence[Any], scope: Scope) -> str | None:
    """What the masks are, for people; None where they are not understood, or are no masks."""
    masks = _masks(steps)
    return words_of_all(masks, shape, scope) if masks else None


def visible_steps(steps: Sequence[Step], shape: Sequence[Any], scope: Scope) -> VisibleMask | None:
    """The mask that is all that is done to scores, beside scaling them, as text; None where
    something else is done, or more than one mask is applied."""
    masks = _masks(steps)
    found = visible_mask(masks[0], shape, scope) if masks and len(masks) == 1 else None
    if found is None or not found.text.averages:
        return found
    # Scaled up, a huge number is -inf, and a row of it alone no average any more.
    masked = [isinstance(step, Scaled) for step in steps].index(False)
    scaled = any(isinstance(step, Scaled) and step.factor != 1.0 for step in steps[masked:])
    return None if scaled else found


def without_idle(steps: Sequence[Step], shape: Sequence[Any], scope: Scope) -> list[Step]:
    """`steps` less those that change no score: masks that are proven to hide nothing."""
    return [step for step in steps if not _is_idle(step, shape, scope)]


def _is_idle(step: Step, shape: Sequence[Any], scope: Scope) -> bool:
    if isinstance(step, Scaled):
        return False
    band = band_of_steps([step], shape, scope)
    return band is not None and (band.causal, band.window) == ("none", (None, None))


def _masks(steps: Sequence[Step]) -> list[Part] | None:
    """The masks in `steps`; None where one is not known to stay a mask to the end."""
    masks: list[Part] = []
    for step in steps:
        if isinstance(step, Scaled):
            # Scaled down, a huge number might hide nothing any more.
            if masks and step.factor < 1.0:
                return None
            continue
        tensor = example_of(step.node)
        if not isinstance(tensor, torch.Tensor) or not _is_placed(tensor, step.rank):
            return None
        if isinstance(step, Replaced):
            masks.append((step.node, not step.inverted, math.isfinite(step.value)))
        elif step.factor == 1.0 and tensor.is_floating_point():
            masks.append((step.node, False, False))
        else:
            return None
    return masks


def _is_placed(mask: torch.Tensor, rank: int) -> bool:
    """Whether the mask's dimensions are the last ones of (B, H, Sq, Sk).

    Scores of rank 3 have batch and heads in one, of which a mask must know nothing.
    """
    if rank == 4:
        return mask.dim() <= 4
    return all(symbolic.same(size, 1) for size in mask.shape[:-2])
