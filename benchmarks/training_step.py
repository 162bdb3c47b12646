"""Training step of the demo model: `backend="fa_inductor"` beside `backend="inductor"`.

    python benchmarks/training_step.py --lengths 2048 8192 16384 --json step.json

Both are measured in one run, alternating, so that clocks and temperature are the same for both;
each figure is the median of CUDA-event times. Compare the ratios, not the milliseconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from fa_inductor.demo import DemoModel

BACKENDS = ("fa_inductor", "inductor")


def step_of(model: torch.nn.Module, tokens: torch.Tensor, backend: str) -> Callable[[], object]:
    """One training step, loss and gradients, compiled with `backend`."""
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(compiled(tokens), parameters)


def milliseconds(run: Callable[[], object]) -> float:
    """Time of one call on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(length: int, repeats: int) -> dict[str, float]:
    """Median milliseconds a step at one sequence length, by backend."""
    torch._dynamo.reset()
    model = DemoModel(1024, 16, 4, layers=4, vocabulary=1024).to("cuda", torch.bfloat16)
    tokens = torch.randint(1024, (2, length), device="cuda")
    steps = {backend: step_of(model, tokens, backend) for backend in BACKENDS}
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(repeats):
        for backend, step in steps.items():
            times[backend].append(milliseconds(step))
    return {backend: sorted(each)[repeats // 2] for backend, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    table = Table("length", *(f"{backend}, ms" for backend in BACKENDS), "ratio", title=machine)
    results = []
    for length in arguments.lengths:
        times = measure(length, arguments.repeats)
        ratio = times["inductor"] / times["fa_inductor"]
        results.append({"length": length, "milliseconds": times, "ratio": ratio})
        table.add_row(str(length), *(f"{times[b]:.2f}" for b in BACKENDS), f"{ratio:.2f}x")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2))


if __name__ == "__main__":
    main()
