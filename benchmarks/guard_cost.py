"""What `fa.guard` costs a training step of the demo, beside the same without, in one run.

    python benchmarks/guard_cost.py [--lengths 2048 8192]

Median time of a step on the GPU, all in turn; and that of the host alone to start one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fa_inductor import demo

ROUNDS = 60
SETTINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "finite": {"fa.guard": "finite"},
    "oracle, every 100": {"fa.guard": "oracle"},
    "oracle, every 1": {"fa.guard": "oracle", "fa.guard_every": 1},
}


def steps(length: int) -> dict[str, Callable[[], Any]]:
    """A training step of each setting, compiled and warm."""
    model, _, _ = demo.make()
    tokens = torch.randint(1024, (2, length), device="cuda")
    parameters = list(model.parameters())
    made = {}
    for name, options in SETTINGS.items():
        torch._dynamo.reset()
        compiled = torch.compile(
            model, backend="fa_inductor", options={"fa.kernels": ("fa4",), **options}
        )

        def step(compiled: Callable[..., Any] = compiled) -> Any:
            return torch.autograd.grad(compiled(tokens), parameters)

        for _ in range(3):
            step()
        made[name] = step
    return made


def measured(length: int) -> dict[str, tuple[float, float]]:
    """Medians of each setting, in milliseconds: of the GPU's time, of the host's."""
    each = steps(length)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in each}
    for _ in range(ROUNDS):
        for name, step in each.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # so that the host is ahead, and only the GPU counts
            start.record()
            begun = time.perf_counter()
            step()
            host = time.perf_counter() - begun
            end.record()
            end.synchronize()
            times[name].append((start.elapsed_time(end), host * 1e3))
    return {
        name: (statistics.median(a for a, _ in rounds), statistics.median(b for _, b in rounds))
        for name, rounds in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    lengths = parser.parse_args().lengths
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {ROUNDS} rounds"
    table = Table(title=title)
    for heading in ("tokens", "fa.guard", "GPU ms", "against off", "host ms", "against off"):
        table.add_column(heading)
    for length in lengths:
        figures = measured(length)
        gpu_off, host_off = figures["off"]
        for name, (gpu, host) in figures.items():
            table.add_row(
                *(str(length), name, f"{gpu:.3f}", f"{gpu / gpu_off:.4f}"),
                *(f"{host:.3f}", f"{host / host_off:.3f}"),
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
