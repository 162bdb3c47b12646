"""What one look of `fa.guard` takes on the GPU, by how its launch is cut up.

    python benchmarks/guard_scan.py [--tokens 8192]

Each look follows a write of the same tensors, as it follows the attention that has made them; its
time is that of both less that of the write alone. Tensors are those of the demo: two sequences, 16
heads of 64, 4 key heads, bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fa_inductor import numerics
from fa_inductor.kernels import scan

BLOCKS, WARPS = (2048, 4096, 8192, 16384), (4, 8)
LOOKS, ROUNDS = 50, 7


def microseconds(run: Callable[[], object]) -> float:
    """Of one run on the GPU, the median of several rounds, the host being ahead."""
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        start.record()
        for _ in range(LOOKS):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LOOKS)
    return statistics.median(times)


def look_microseconds(
    row: numerics.Row, tensors: Sequence[Tensor], positive: bool, block: int, warps: int
) -> float:
    def write() -> None:
        for tensor in tensors:
            tensor.fill_(1.0)

    def write_and_look() -> None:
        write()
        scan.look(row, tensors, positive)

    with mock.patch.multiple(scan, _BLOCK=block, _WARPS=warps):
        scan.look(row, tensors, positive)
        return microseconds(write_and_look) - microseconds(write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    tokens = parser.parse_args().tokens
    made = numerics.table_of(torch.device("cuda", torch.cuda.current_device()))
    names = numerics.Names("here", "fa4", "forward")
    row = made.row(0, names, [numerics.Number("{}")] * 3, "warn")
    out, query, key, value = (
        torch.zeros(2, tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
        for heads in (16, 16, 4, 4)
    )
    lse = torch.zeros(2, 16, tokens, device="cuda")
    table = Table(title=f"{torch.cuda.get_device_name()}, {tokens} tokens: µs (TB/s)")
    for heading in ("elements a block", "warps", "out, lse", "dq, dk, dv"):
        table.add_column(heading)
    for block in BLOCKS:
        for warps in WARPS:
            cells = []
            for tensors, positive in (((out, lse), True), ((query, key, value), False)):
                taken = look_microseconds(row, tensors, positive, block, warps)
                speed = sum(tensor.nbytes for tensor in tensors) / taken / 1e6
                cells.append(f"{taken:.1f} ({speed:.1f})")
            table.add_row(str(block), str(warps), *cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
