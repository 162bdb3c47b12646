"""Attention on the GPU: our ops beside PyTorch's attentions, FA4's own entry and flex_attention.

    python benchmarks/attention.py --json out.json --plot out.png
    python benchmarks/attention.py --read out.json --plot out.png --write-table times.json

The shapes are in `grid.py`, what is compared in `contestants.py`, how it is timed in `timing.py`.
Some five minutes on an H200 when FA4's kernels are in its cache; `--only` takes a part of the
grid. The JSON is written after each row, so an aborted run keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tables
import torch
import torch.nn.functional as F
from contestants import REFUSALS, Call, Contestant, Refused, contestants, core_backend
from grid import SHAPES, Shape, Tensors, input_sets
from rich.console import Console
from timing import CpuTimer, GpuTimer, Timed, Timer, host_us, measure, one_line
from torch import Tensor

from fa_inductor.target import Target, installed_libraries

# Results further apart than this are not of the same problem (bfloat16 gives below 0.01).
DIFFERENCE = 0.03
HOST_LENGTH, HOST_ROUNDS = 512, 5  # up to this length, and for decoding, the host counts


@dataclass(frozen=True)
class Ready:
    """A contestant that can run a shape."""

    contestant: Contestant
    call: Call
    timed: Timed


def main() -> None:
    arguments = _arguments()
    console = Console(width=None if sys.stdout.isatty() else 190)
    data = json.loads(arguments.read.read_text()) if arguments.read else run(arguments, console)
    tables.print_all(data, console)
    if arguments.write_table:
        arguments.write_table.write_text(tables.times_table(data))
    if arguments.plot:
        import plot

        console.print(plot.write(data, arguments.plot))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--plot", type=Path, help="write a figure here (needs matplotlib)")
    parser.add_argument("--write-table", type=Path, help="write fa_inductor's table of times here")
    parser.add_argument("--read", type=Path, help="measure nothing, take this --json of before")
    parser.add_argument("--flex", choices=("all", "some", "none"), default="some")
    parser.add_argument(
        "--only",
        default="",
        help="only the shapes whose name has one of these, parted by commas, in it",
    )
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)  # on a CPU
    return parser.parse_args()


def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure the grid."""
    dry = arguments.dry_run
    if not dry:
        # PyTorch prefers cuDNN on Hopper by itself only once an attention has run.
        tiny = torch.zeros(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
        F.scaled_dot_product_attention(tiny, tiny, tiny)
    timer = CpuTimer() if dry else GpuTimer()
    everyone = list(contestants("none" if dry else arguments.flex, cpu=dry))
    names = [contestant.name for contestant in everyone]
    rows: list[dict[str, Any]] = []
    data = {"machine": machine(dry), "contestants": names, "rows": rows}
    started = time.perf_counter()
    for shape in SHAPES:
        if not any(part in str(shape) for part in arguments.only.split(",")):
            continue
        shape = shape.tiny() if dry else shape
        for passed in shape.passes:
            row = measured(shape, passed, everyone, timer, "cpu" if dry else "cuda")
            rows.append(row)
            line = " ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
            console.print(f"{time.perf_counter() - started:4.0f} s  {shape}, {passed}: {line}")
            if arguments.json:
                arguments.json.write_text(json.dumps(data, indent=1))
    return data


def machine(dry: bool) -> dict[str, Any]:
    return {
        "gpu": "none, a dry run" if dry else torch.cuda.get_device_name(),
        "arch": "sm_90a" if dry else Target.of_device(torch.device("cuda")).arch,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **installed_libraries(),
    }


def measured(
    shape: Shape, passed: str, everyone: Sequence[Contestant], timer: Timer, device: str
) -> dict[str, Any]:
    """One row: a shape and a pass, all contestants."""
    backward = passed != "fwd"
    torch.manual_seed(0)
    sets = input_sets(shape, device)
    errors: dict[str, str] = {}
    differs: dict[str, float] = {}
    ready: dict[str, Ready] = {}
    reference: tuple[Tensor, ...] | None = None
    for contestant in everyone:
        name = contestant.name
        try:
            call, results = _first_call(contestant, shape, backward, sets[0])
            timer.settle()
            if reference is None:
                reference = results
            elif not shape.dropout and (apart := _difference(results, reference)) > DIFFERENCE:
                differs[name] = round(apart, 4)
            del results
            ready[name] = Ready(contestant, call, timer.prepare(call, sets, contestant.context))
        except REFUSALS as error:
            errors[name] = one_line(error)
        # A GPU that an illegal access has broken raises here, and ends the run.
        timer.settle()
    del reference
    timed = {name: each.timed for name, each in ready.items()}
    measure(timed)
    row = {
        "shape": shape.to_json(),
        "name": str(shape),
        "pass": passed,
        "flops": shape.flops(passed),
        "us": {name: round(each.median, 3) for name, each in timed.items()},
        "spread": {name: round(each.spread, 4) for name, each in timed.items()},
        "host_us": _host(shape, ready, sets[0]) if device == "cuda" else {},
        "not_captured": {
            name: each.how for name, each in timed.items() if each.how.startswith("events")
        },
        "errors": errors,
        "differs": differs,
        "core_backend": core_backend(shape, backward, sets[0]),
    }
    ready.clear()
    timed.clear()
    if device == "cuda":  # each graph had memory of its own
        torch.cuda.empty_cache()
    return row


def _first_call(
    contestant: Contestant, shape: Shape, backward: bool, given: Tensors
) -> tuple[Call, tuple[Tensor, ...]]:
    """The call, and what it gives; raises one of `REFUSALS`.

    PyTorch says in warnings why it has no kernel: they become the reason.
    """
    call = contestant.build(shape, backward)
    with warnings.catch_warnings(record=True) as caught, contestant.context():
        warnings.simplefilter("always")
        try:
            return call, call(given)
        except RuntimeError as error:
            said = [str(each.message).split(" (Triggered")[0] for each in caught]
            reasons = [s for s in said if "disabled" not in s and "not used because" not in s]
            no_kernel = re.search("No (available kernel|viable backend)", str(error))
            if not no_kernel or not reasons:
                raise
            raise Refused("; ".join(dict.fromkeys(reasons))) from error


def _difference(results: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """The largest relative difference, in the 2-norm, of out and the gradients."""

    def norm(tensor: Tensor) -> float:
        return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32))

    pairs = zip(results, reference, strict=True)
    return max(norm(ours - theirs) / max(norm(theirs), 1e-30) for ours, theirs in pairs)


def _host(shape: Shape, ready: Mapping[str, Ready], given: Tensors) -> dict[str, float]:
    """Host microseconds a call, where they count."""
    if shape.lengths[0] > 1 and max(shape.lengths) > HOST_LENGTH:
        return {}
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(HOST_ROUNDS):
        for name, each in ready.items():
            with each.contestant.context():
                times[name].append(host_us(lambda call=each.call: call(given)))
    return {name: round(sorted(each)[HOST_ROUNDS // 2], 2) for name, each in times.items()}


if __name__ == "__main__":
    main()
