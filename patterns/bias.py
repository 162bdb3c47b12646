"""Masks as the attention op takes them: a bias that is added to the scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import torch
from torch import fx

from .. import symbolic
from ..spec import AttentionSpec, TensorSpec
from .family import Emitter, example_of

# Above this a score that is added loses digits that softmax would see: float32 keeps 24 bits.
_SHIFTED_FROM = 1e3
# From here on a float32 sum is the bias alone, whatever the score is.
_LOST_FROM = 1e30


def bias_spec(mask: torch.Tensor, shape: Sequence[Any]) -> Union[TensorSpec, str]:
    """A mask as the bias of scores (B, Hq, Sq, Sk), or why it is none.

    Dimensions that are only repeated in memory count as broadcast, unless the mask is
    differentiated: then each of its elements has a gradient of its own.
    """
    if mask.dim() > 4:
        return f"rank {mask.dim()}"
    missing = 4 - mask.dim()
    sizes: list[Any] = [1] * missing + list(mask.shape)
    strides: list[Any] = [0] * missing + list(mask.stride())
    for dim, (size, full) in enumerate(zip(sizes, shape, strict=True)):
        if not symbolic.same(size, 1) and not symbolic.guarded_same(size, full):
            return f"shape {tuple(mask.shape)} against scores {tuple(shape)}"
        if dim < 3 and symbolic.same(strides[dim], 0) and not mask.requires_grad:
            sizes[dim] = 1
    return TensorSpec(tuple(sizes), tuple(strides), mask.dtype, mask.device, mask.storage_offset())


def emit_bias(
    emit: Emitter, mask: fx.Node, spec: AttentionSpec, q: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """(bias, q) to hand to the op for a mask that `spec.bias` describes.

    True in a bool mask is visible; a float mask is added.
    """
    bias = spec.bias
    assert bias is not None
    given = example_of(mask).shape
    sizes = [1] * (4 - len(given)) + list(given)
    node = mask
    for _ in range(4 - len(given)):
        node = emit.call("unsqueeze", node, 0)
    for dim, (size, taken) in enumerate(zip(sizes, bias.shape, strict=True)):
        if symbolic.same(taken, 1) and not symbolic.same(size, 1):
            node = emit.call("narrow", node, dim, 0, 1)
    if bias.dtype == torch.bool:
        return additive(emit, emit.call(torch.logical_not, node), spec.dtype), q
    if bias.dtype != spec.dtype:  # under autocast, which casts the mask too
        node = emit.call("to", node, spec.dtype)
    return without_lost_rows(emit, node, q)


def additive(emit: Emitter, hidden: fx.Node, dtype: torch.dtype) -> fx.Node:
    """-inf where the bool node is True, else 0."""
    return emit.call("to", emit.call(torch.where, hidden, float("-inf"), 0.0), dtype)


def without_lost_rows(emit: Emitter, bias: fx.Node, q: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(bias, q) for which kernels get the rows of the float `bias` right in which all is huge.

    Kernels add a bias to scores in the exponent: where every element of a row is huge, as where
    padding masks a whole row with the lowest number, the row is lost (measured with cuDNN 9.19).
    Softmax does not change when a row is shifted by its largest element, so below 1e30 the result
    is exact, where float32 sums would lose digits of the score. From there on nothing of the score
    is left in such a sum: the query is made 0, so that the row is the mean of its values, as
    PyTorch has it.
    """
    largest = emit.call("amax", emit.call("detach", bias), -1, True)
    size = emit.call("abs", largest)
    finite = emit.call(torch.isfinite, largest)
    huge = emit.call(torch.logical_and, emit.call(torch.gt, size, _SHIFTED_FROM), finite)
    lost = emit.call(torch.logical_and, emit.call(torch.ge, size, _LOST_FROM), finite)
    shift = emit.call("masked_fill", largest, emit.call(torch.logical_not, huge), 0.0)
    return emit.call(torch.sub, bias, shift), emit.call("masked_fill", q, lost, 0.0)
