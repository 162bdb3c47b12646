"""Attention of single sequences by its definition, in float64 and differentiable.

The band is filled one score at a time, so that no index arithmetic is shared with a kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def visible(sq: int, sk: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """Which keys each query sees, aligned bottom-right."""
    seen = torch.zeros(sq, sk, dtype=torch.bool)
    for i, j in itertools.product(range(sq), range(sk)):
        middle = i + sk - sq
        seen[i, j] = (
            (not causal or j <= middle)
            and (left is None or j >= middle - left)
            and (right is None or j <= middle + right)
        )
    return seen


def one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out (Sq, Hq, Dv), lse (Hq, Sq)) of q (Sq, Hq, D), k (Sk, Hkv, D) and v (Sk, Hkv, Dv)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (tensor.double().transpose(0, 1) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[1], k.shape[1], causal, window_left, window_right).to(q.device)
    scores = scores.masked_fill(~seen, float("-inf"))
    column = torch.full_like(scores[..., :1].detach(), float("-inf"))
    if k.shape[1] == 0:
        column = q.new_full((*q.shape[:2], 1), float("-inf"))
    if sink is not None:
        column = sink.double()[:, None, None].expand(*q.shape[:2], 1)
    # The sink as one more column; a row of -inf alone would have no softmax.
    logits = torch.cat([scores, column], -1)
    empty = torch.isneginf(logits).all(-1)
    safe = torch.where(empty[..., None], 0.0, logits)
    weights = torch.where(empty[..., None], 0.0, safe.softmax(-1))[..., :-1]
    lse = torch.where(empty, float("-inf"), safe.logsumexp(-1))
    return (weights @ v).transpose(0, 1), lse


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    sink: Tensor | None = None,
    **numbers: Any,
) -> tuple[Tensor, Tensor]:
    """(out (Tq, Hq, Dv), lse (Hq, Tq)), one sequence after another."""
    outs, lses = [], []
    for (a, b), (c, d) in zip(
        itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True
    ):
        out, lse = one(q[a:b], k[c:d], v[c:d], sink, **numbers)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 0), torch.cat(lses, 1)


def batched(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, **numbers: Any) -> Any:
    """(out (B, Sq, Hq, Dv), lse (B, Hq, Sq)) of tensors with a batch dimension in front."""
    results = [one(*each, sink, **numbers) for each in zip(q, k, v, strict=True)]
    return tuple(torch.stack(part) for part in zip(*results, strict=True))
