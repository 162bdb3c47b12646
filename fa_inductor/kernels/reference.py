"""The reference kernel: attention by its definition, on any device.

float32 inside (float64 for float64 inputs). It is the specification that the other kernels
are tested against, and what the whole pipeline runs on where there is no GPU.
Queries are taken in blocks, so memory stays at `BLOCK_ELEMENTS` scores a block instead of
growing with Sq·Sk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 26  # scores held at a time: 256 MiB in float32


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: str
) -> None:
    """out = softmax(scale · q kᵀ) v and the log-sum-exp of each row; see `fa_inductor.kernels`."""
    keys, values = _grouped(k, lse.dtype), _grouped(v, lse.dtype)
    for rows in _blocks(q, k):
        scores = _scores(q, keys, rows, k.shape[2], scale, causal)
        row_lse = torch.logsumexp(scores, dim=-1)
        weights = _weights(scores, row_lse)
        out[:, :, rows] = _ungrouped(weights @ values).to(out.dtype)
        lse[:, :, rows] = row_lse.flatten(1, 2)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    *,
    scale: float,
    causal: str,
    deterministic: bool,
) -> None:
    """Gradients of `forward`; the formulas of FlashAttention (arXiv:2205.14135), appendix B.2,
    and d lse / d scores = weights for the gradient of lse. Always deterministic.
    """
    groups = k.shape[1]
    keys, values = _grouped(k, lse.dtype), _grouped(v, lse.dtype)
    sum_k = torch.zeros_like(keys[:, :, 0])
    sum_v = torch.zeros_like(values[:, :, 0])
    for rows in _blocks(q, k):
        scores = _scores(q, keys, rows, k.shape[2], scale, causal)
        weights = _weights(scores, lse[:, :, rows].unflatten(1, (groups, -1)))
        grad = _split_heads(grad_out[:, :, rows], groups, lse.dtype)
        delta = (grad * _split_heads(out[:, :, rows], groups, lse.dtype)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta -= grad_lse[:, :, rows].to(lse.dtype).unflatten(1, (groups, -1))[..., None]
        grad_scores = weights * (grad @ values.mT - delta) * scale
        queries = _split_heads(q[:, :, rows], groups, lse.dtype)
        grad_q[:, :, rows] = _ungrouped(grad_scores @ keys).to(grad_q.dtype)
        sum_k += torch.einsum("bhgij,bhgid->bhjd", grad_scores, queries)
        sum_v += torch.einsum("bhgij,bhgid->bhjd", weights, grad)
    grad_k.copy_(sum_k)
    grad_v.copy_(sum_v)


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Ranges of query rows whose scores fit into `BLOCK_ELEMENTS`."""
    per_row = q.shape[0] * q.shape[1] * k.shape[2]
    step = max(1, BLOCK_ELEMENTS // max(1, per_row))
    for start in range(0, q.shape[2], step):
        yield slice(start, min(start + step, q.shape[2]))


def _split_heads(tensor: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """(B, Hq, S, D) -> (B, Hkv, Hq/Hkv, S, D) in the dtype of the computation."""
    return tensor.to(dtype).unflatten(1, (groups, -1))


def _grouped(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, Hkv, S, D) -> (B, Hkv, 1, S, D), so that it broadcasts over a group of query heads."""
    return tensor.to(dtype).unsqueeze(2)


def _ungrouped(tensor: Tensor) -> Tensor:
    return tensor.flatten(1, 2)


def _scores(q: Tensor, keys: Tensor, rows: slice, sk: int, scale: float, causal: str) -> Tensor:
    """Scaled scores of some query rows, (B, Hkv, Hq/Hkv, rows, Sk), -inf where masked."""
    scores = _split_heads(q[:, :, rows], keys.shape[1], keys.dtype) @ keys.mT * scale
    if causal == "none":
        return scores
    offset = sk - q.shape[2] if causal == "bottom_right" else 0
    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    j = torch.arange(sk, device=q.device)[None, :]
    return scores.masked_fill(j > i + offset, float("-inf"))


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), 0 on rows where every key is masked."""
    return torch.where(torch.isneginf(lse)[..., None], 0.0, torch.exp(scores - lse[..., None]))
