"""Inputs that attention can fail on, each drawn afresh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Logits of 112: exp(-2 x 112) is 0 in float32, the sum of a row is 1 or a count, nothing between.
_LOGIT = 112.0
_OUTLIER = 50.0


@dataclass(frozen=True)
class Sizes:
    """(B, Hq, S, D) queries on (B, Hkv, S, D) keys and values."""

    batch: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Drawn:
    """tensors: q, k, v as (B, H, S, D) views of (B, S, H, D) memory. grad_out: like the output.
    kept: (B, S) bool, the keys that are no padding; None where there is none."""

    tensors: Sequence[Tensor]
    grad_out: Tensor
    kept: Tensor | None


def draw(
    kind: str, length: int, sizes: Sizes, device: torch.device, dtype: torch.dtype, seed: int
) -> Drawn:
    """Inputs of a kind of `cells.DATA`."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(heads: int) -> Tensor:
        shape = (sizes.batch, length, heads, sizes.head_dim)
        return torch.randn(shape, generator=generator, device=device)

    q, k, v, grad = (randn(h) for h in (sizes.heads, *2 * (sizes.kv_heads,), sizes.heads))
    kept = None
    if kind == "large logits":
        # Keys along one direction or against it: q·k·scale is 112 or -112, give or take a little.
        axis = torch.zeros(sizes.head_dim, device=device)
        axis[0] = (_LOGIT / sizes.scale) ** 0.5
        sign = torch.where(k[..., :1] > 0, 1.0, -1.0)
        q, k = axis + 0.1 * q, sign * axis + 0.01 * k
    elif kind == "outliers":
        for tensor in (q, k):
            tensor[..., 7] *= _OUTLIER
            tensor *= 0.1
        v[..., 3] *= _OUTLIER
    elif kind == "constant":
        q, k = torch.full_like(q, 0.5), torch.full_like(k, 0.25)
    elif kind == "masked rows":
        kept = torch.ones(sizes.batch, length, dtype=torch.bool, device=device)
        kept[:, : max(1, length // 3)] = False  # the first causal queries see nothing
    tensors = [tensor.to(dtype).transpose(1, 2) for tensor in (q, k, v)]
    return Drawn(tensors, grad.to(dtype).transpose(1, 2), kept)
