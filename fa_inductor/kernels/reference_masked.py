"""The reference kernel for masks as text: the mask is rendered whole, and added.

As in other kernels, a whole block is visible whatever the text says, and one that is not listed is
hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import mask_text
from ..masked_problem import QUERY_BLOCK, Blocks, MaskedInputs, key_block
from ..problem import Gradients, Inputs, Problem
from . import reference


def check(problem: Problem, inputs: MaskedInputs) -> None:
    """It takes everything."""


def forward(problem: Problem, inputs: MaskedInputs, out: Tensor, lse: Tensor) -> None:
    """See `fa_inductor.kernels.variants`."""
    listed = _listed(inputs.visible.by_query)
    reference.forward(problem, _with_bias(inputs, *listed), out, lse)


def backward(
    problem: Problem,
    inputs: MaskedInputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grads: Gradients,
) -> None:
    """See `fa_inductor.kernels.variants`."""
    assert inputs.visible.by_key is not None
    listed = (each.mT for each in _listed(inputs.visible.by_key))
    given = _with_bias(inputs, *listed)
    reference.backward(problem, given, out, lse, grad_out, grad_lse, grads)


def _with_bias(inputs: MaskedInputs, *listed: Tensor) -> Inputs:
    """listed: which blocks are partial and which whole: bools, (B or 1, H or 1, those of queries,
    those of keys)."""
    q, sq, sk = inputs.q, inputs.q.shape[2], inputs.k.shape[2]
    visible, tiles = inputs.visible, (QUERY_BLOCK, key_block(q.shape[3]))
    partial, whole = (_spread(each, tiles) for each in listed)
    shape = (*q.shape[:3], sk)
    shown = mask_text.rendered(visible.text, visible.tensors, shape, q.device)
    shown = (shown & partial[..., :sq, :sk]) | whole[..., :sq, :sk]
    return inputs.dense._replace(
        bias=torch.zeros(shape, device=q.device).masked_fill(~shown, -torch.inf)
    )


def _listed(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Which blocks are listed as partial and as whole: bools, (B or 1, H or 1, rows, columns)."""
    partial = _chosen(blocks.partial_count, blocks.partial)
    return partial, _chosen(blocks.whole_count, blocks.whole)


def _chosen(count: Tensor, order: Tensor) -> Tensor:
    counted = torch.arange(order.shape[-1], device=order.device) < count[..., None]
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order.long(), counted)


def _spread(blocks: Tensor, tiles: tuple[int, int]) -> Tensor:
    return blocks.repeat_interleave(tiles[0], 2).repeat_interleave(tiles[1], 3)
