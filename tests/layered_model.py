"""Three layers of attention, and a way to spoil one head of one of them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HEADS, WIDTH, LENGTH = 4, 32, 24


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def break_values_of_one_head(layer: Layer, head: int = 1) -> None:
    size = WIDTH // HEADS
    rows = slice(2 * WIDTH + head * size, 2 * WIDTH + (head + 1) * size)
    with torch.no_grad():
        layer.qkv.weight[rows] = math.nan
