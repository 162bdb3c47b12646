"""Attention's gradients at some rows or some keys, with what rounding makes of sums that cancel.

The formulas are those of FlashAttention (arXiv:2205.14135), appendix B.2. The noise of a row of a
gradient is the root of the sum of squares of its terms, and of those of dO · O inside: where these
cancel, independent roundings of the terms leave an error in proportion to that, and not to the sum.
All tensors have one floating dtype; leading dimensions broadcast.
"""

from __future__ import annotations

from torch import Tensor


def score_gradients(weights: Tensor, grad: Tensor, values: Tensor, delta: Tensor) -> Tensor:
    """(..., rows, keys), by scores of `weights` (..., rows, keys).

    grad: dO, (..., rows, Dv). values: (..., keys, Dv). delta: dO · O less dLSE, (..., rows, 1).
    """
    return weights * (grad @ values.mT - delta)


def delta_noise(grad: Tensor, out: Tensor) -> Tensor:
    """(..., rows, 1), of the sum dO · O, which all terms of a row have in common."""
    return (grad * out).square().sum(-1, keepdim=True).sqrt()


def of_queries(
    terms: Tensor, weights: Tensor, keys: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """dq (..., rows, D), and the square of its noise (..., rows).

    terms: dS times what scales q·k, (..., rows, keys). keys: (..., keys, D). shift: `delta_noise`
    times the same, (..., rows, 1).
    """
    noise = (terms.square() @ keys.square().sum(-1, keepdim=True))[..., 0]
    shifted = shift.square()[..., 0] * (weights @ keys).square().sum(-1)
    return terms @ keys, noise + shifted


def of_keys(
    terms: Tensor, weights: Tensor, queries: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """dk (..., keys, D) of these queries, and the square of its noise (..., keys)."""
    squares = terms.square() + (weights * shift).square()
    noise = (squares.mT @ queries.square().sum(-1, keepdim=True))[..., 0]
    return terms.mT @ queries, noise
