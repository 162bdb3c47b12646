"""Attention problems and targets made from metadata, for planning without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_inductor.spec import AttentionSpec, TensorSpec
from fa_inductor.target import TESTED_LIBRARIES, Target

HOPPER, BLACKWELL, GEFORCE, AMPERE = "sm_90a", "sm_100a", "sm_120a", "sm_80"


def target(arch: str, **libraries: str) -> Target:
    """`arch` with every library in its tested version but for those given."""
    return Target(arch, named=True, libraries={**TESTED_LIBRARIES, **libraries})


def bshd(b: int, h: int, s: int, d: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A (B, H, S, D) view of contiguous (B, S, H, D) memory."""
    return torch.empty(b, s, h, d, dtype=dtype).transpose(1, 2)


def spec(
    d: int = 64,
    dv: int | None = None,
    *,
    hq: int = 8,
    hkv: int = 8,
    sq: int = 128,
    sk: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    **fields: Any,
) -> AttentionSpec:
    """An attention that every kernel takes, but for what is changed."""
    sizes = ((2, hq, sq, d), (2, hkv, sk, d), (2, hkv, sk, d if dv is None else dv))
    q, k, v = (TensorSpec.of(change(bshd(*size, dtype=dtype))) for size in sizes)
    return AttentionSpec(q, k, v, dtype, **fields)
