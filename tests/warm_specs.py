"""Specs of attention that is to be warmed."""

from __future__ import annotations

from typing import Any

import torch

from fa_inductor.spec import AttentionSpec, TensorSpec


def spec(sq: int = 100, sk: int = 100, dim: int = 64, **rest: Any) -> AttentionSpec:
    def tensor(heads: int, length: int) -> TensorSpec:
        stride = (length * heads * dim, dim, heads * dim, 1)
        return TensorSpec((2, heads, length, dim), stride, torch.bfloat16, torch.device("cpu"))

    return AttentionSpec(tensor(4, sq), tensor(2, sk), tensor(2, sk), torch.bfloat16, **rest)
