"""CPU functions in the place of FA4: entries with a `compile_cache`, as FA4's have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fa_inductor.kernels.fa4_launch import Recording, recording


class Entry:
    """Fills `out` with scale · (x + y) in two kernels, through a temporary and a sum from zero."""

    def __init__(self, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.compile_cache: dict[str, Callable[..., None]] = {}
        self.prepare = prepare
        self.entered = 0

    def __call__(self, x: Tensor, y: Tensor, out: Tensor, scale: float) -> None:
        self.entered += 1
        x = self.prepare(x)
        product, total = torch.empty(x.shape), torch.zeros(x.shape)
        if "scale" not in self.compile_cache:
            self.compile_cache["scale"] = lambda x, to, scale, _: to.copy_(x * scale)
            self.compile_cache["add"] = self._add
        self.compile_cache["scale"](x, product, scale, None)
        self.compile_cache["add"](product, y, total, out, scale)

    @staticmethod
    def _add(product: Tensor, y: Tensor, total: Tensor, out: Tensor, scale: float) -> None:
        total += product + y * scale
        out.copy_(total)


SIZE = (2, 8)
Made = tuple[Tensor, Tensor, Tensor]


def tensors(*size: int) -> Made:
    """x, y and memory for out."""
    size = size or SIZE
    return torch.randn(size), torch.randn(size), torch.full(size, float("nan"))


def enter(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Recording:
    """What was noted of these calls of kernels."""
    entry = Entry()
    entry.compile_cache.update({str(i): kernel for i, (kernel, _) in enumerate(calls)})
    with recording((entry,)) as noted:
        for i, (_, arguments) in enumerate(calls):
            entry.compile_cache[str(i)](*arguments)
    return noted


def copy(source: Tensor, to: Tensor) -> None:
    to.copy_(source.reshape(to.shape))
