"""What hand-written attention adds to its scores, as the bias of the attention op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import symbolic
from ..spec import TensorSpec
from ..support_row import dtype_name
from .bias import additive, bias_spec, without_lost_rows
from .family import Emitter, describe, example_of, tensor_objection
from .operands import Leading, split_batch
from .score_steps import REPLACED_BELOW, Added, Replaced, Scaled, Step, Unclear
from .views import View

_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class _Part:
    """One step, with its tensor as (B or 1, H or 1, Sq or 1, Sk or 1)."""

    step: Added | Replaced
    view: View
    spec: TensorSpec

    def emit(self, emit: Emitter) -> fx.Node:
        """Dimensions that are only repeated in memory are taken once."""
        node = self.view.emit(emit)
        for dim, (size, taken) in enumerate(
            zip(self.view.example().shape, self.spec.shape, strict=True)
        ):
            if symbolic.same(taken, 1) and not symbolic.same(size, 1):
                node = emit.call("narrow", node, dim, 0, 1)
        return node


@dataclass(frozen=True)
class Bias:
    """The bias as `spec` says, made by the same operations that the code applies to the scores."""

    parts: tuple[_Part | Scaled, ...]
    spec: TensorSpec
    text: str
    needs_grad: bool

    def emit(self, emit: Emitter, q: fx.Node, has_sink: bool) -> tuple[fx.Node, fx.Node]:
        """(bias, q) to hand to the op.

        Beside a sink a row must not be shifted, and needs not be: where all of its bias is as low
        as a mask, the sink is what remains.
        """
        total: fx.Node | None = None
        only_hides = True
        for part in self.parts:
            if isinstance(part, Scaled):
                if total is not None and part.factor != 1.0:
                    total = emit.call(torch.mul, total, part.factor)
                continue
            node = part.emit(emit)
            if isinstance(part.step, Added):
                only_hides = False
                if part.step.factor != 1.0:
                    node = emit.call(torch.mul, node, part.step.factor)
                total = node if total is None else emit.call(torch.add, total, node)
                continue
            if part.step.inverted:
                node = emit.call(torch.logical_not, node)
            only_hides &= part.step.value == float("-inf")
            # Beside the lowest float32 a float64 score is lost as well.
            value = max(part.step.value, _LOWEST) if math.isfinite(part.step.value) else -math.inf
            if total is not None:
                total = emit.call(torch.where, node, value, total)
            elif part.step.value == float("-inf"):
                total = additive(emit, node, self.spec.dtype)
            else:
                total = emit.call(torch.where, node, value, 0.0)
                total = emit.call("to", total, self.spec.dtype)
        assert total is not None
        return (total, q) if only_hides or has_sink else without_lost_rows(emit, total, q)


def bias_of(
    steps: Sequence[Step], leading: Leading | None, shape: tuple[Any, ...], dtype: torch.dtype
) -> Bias | None:
    """All that `steps` add to scores (B, H, Sq, Sk) = `shape`; None if there is nothing.

    leading: (B, H), None where the scores never have two leading dimensions.
    """
    parts: list[_Part | Scaled] = []
    for step in steps:
        if not isinstance(step, Scaled):
            parts.append(_part(step, leading, shape))
        elif parts:
            if step.factor <= 0:
                raise Unclear(f"masked scores are multiplied by {step.factor}")
            parts.append(step)
    tensors = [part for part in parts if isinstance(part, _Part)]
    if not tensors:
        return None
    floats = [part.spec.dtype for part in tensors if isinstance(part.step, Added)]
    # Of the parts' dtypes the one that the support table has to judge: any that is not the op's.
    taken = next((each for each in floats if each != dtype), dtype)
    _check_values(steps, taken)
    text = " and ".join(describe("mask", part.step.node) for part in tensors)
    sizes = tuple(_broadcast([part.spec.shape[dim] for part in tensors]) for dim in range(4))
    spec = TensorSpec(sizes, _contiguous(sizes), taken, tensors[0].spec.device)
    if len(parts) == 1 and isinstance(tensors[0].step, Added):
        spec = tensors[0].spec
    needs_grad = any(example_of(part.step.node).requires_grad for part in tensors)
    return Bias(tuple(parts), spec, text, needs_grad)


def _check_values(steps: Sequence[Step], dtype: torch.dtype) -> None:
    """What scores are replaced by must be as low as it claims in the bias, when all is done."""
    for place, step in enumerate(steps):
        if not isinstance(step, Replaced) or step.value == float("-inf"):
            continue
        factor = math.prod(later.factor for later in steps[place:] if isinstance(later, Scaled))
        if step.value < torch.finfo(dtype).min:
            raise Unclear(
                f"masked scores are replaced by {step.value:g}, which {dtype_name(dtype)} lacks"
            )
        if not step.value * factor <= REPLACED_BELOW:
            raise Unclear(f"masked scores are replaced by {step.value:g}, then times {factor:g}")


def _part(step: Added | Replaced, leading: Leading | None, shape: tuple[Any, ...]) -> _Part:
    if problem := tensor_objection("mask", step.node):
        raise Unclear(problem)
    view = View(step.node)
    for _ in range(step.rank - example_of(step.node).dim()):
        view = view.then("unsqueeze", 0)
    if view.example().dim() == 3:
        view = view.then("unsqueeze", 1) if leading is None else split_batch(view, leading)
    spec = bias_spec(view.example(), shape)
    if isinstance(spec, str):
        raise Unclear(f"the mask has {spec}")
    if isinstance(step, Added) and not spec.dtype.is_floating_point:
        raise Unclear(f"{describe('mask', step.node)} is added to the scores")
    return _Part(step, view, spec)


def _broadcast(sizes: list[Any]) -> Any:
    return next((size for size in sizes if not symbolic.same(size, 1)), 1)


def _contiguous(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    strides: list[Any] = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)
