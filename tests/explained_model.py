"""A model for the tests of `explain` and `Report`: an attention of each kind that they tell."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        if mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, mask).float()  # masked
        return out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Three attentions in program order: checkpointed, plain, and after a break one that no kernel
    takes, as its mask is of another dtype than its query."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.last = Attention()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = self.blocks[1](x)
        torch._dynamo.graph_break()
        return self.last(x, mask)


def make_x(length: int = 6) -> Tensor:
    return torch.randn(2, length, 32)


def make_mask(length: int = 6) -> Tensor:
    return torch.zeros(length, length)
