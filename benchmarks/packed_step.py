"""What it saves that the gradients of a packed projection are written where they belong.

    python benchmarks/packed_step.py

A training step of x -> Linear -> q, k, v -> attention -> Linear, compiled by the backend as it is
and with the packed op switched off, measured in turn in one run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fa_inductor.backend import fa_inductor
from fa_inductor.patterns import sdpa

SHAPES = ((8, 1024, 16, 64), (4, 4096, 16, 128), (1, 16384, 16, 128))  # (B, S, H, D)
ROUNDS, STEPS = 9, 5


class Block(nn.Module):
    """Attention with one projection for q, k and v."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        width = heads * dim
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = packed.unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def compiled_step(block: Block, x: Tensor, packed: bool) -> Callable[[], None]:
    """One forward and backward, compiled on its first call, which is made here."""

    def backend(gm: Any, inputs: Any) -> Any:  # one of its own: else both would share their code
        return fa_inductor(gm, inputs)

    # Sizes that are symbolic since an earlier shape was another are not packed.
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=False)

    def step() -> None:
        compiled(x).float().square().mean().backward()
        block.zero_grad()

    off = mock.patch.object(sdpa, "packed_source", return_value=None)
    with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        if packed:
            step()
        else:
            with off:
                step()
    return step


def milliseconds(step: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / STEPS


def peak_megabytes(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def main() -> None:
    table = Table("B, S, H, D", "packed, ms", "apart, ms", "ratio", "packed, MB", "apart, MB")
    table.title = f"training step on {torch.cuda.get_device_name()}, bfloat16, causal"
    for batch, length, heads, dim in SHAPES:
        block = Block(heads, dim).to("cuda", torch.bfloat16)
        x = torch.randn(batch, length, heads * dim, device="cuda", dtype=torch.bfloat16)
        x.requires_grad_()
        steps = [compiled_step(block, x, packed) for packed in (True, False)]
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for each, step in zip(times, steps, strict=True):
                each.append(milliseconds(step))
        packed, apart = (sorted(each)[ROUNDS // 2] for each in times)
        peaks = [f"{peak_megabytes(step):.0f}" for step in steps]
        cells = (f"{packed:.3f}", f"{apart:.3f}", f"{apart / packed:.3f}x", *peaks)
        table.add_row(f"{batch}, {length}, {heads}, {dim}", *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
