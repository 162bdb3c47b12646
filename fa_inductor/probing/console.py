"""`fa-inductor probe`: a progress bar, the tables, and what is written to a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .bisect import bisect
from .cells import DATA, Outcome
from .probe import probe, self_test
from .results import ProbeResult


def run(
    functions: Sequence[Any],
    cells: tuple[str | None, str | None, str],
    backend: str,
    causal: bool,
    output: Path | None,
    jobs: int,
) -> int:
    """Probe each function; the exit status, 1 if a cell is bad or if none could be tried.

    cells: lengths, ways and data, separated by commas; None for the default, "all" for all data.
    """
    lengths, ways, data = cells
    console, is_bad = Console(), False
    chosen: dict[str, Any] = {
        "lengths": None if lengths is None else [int(each) for each in lengths.split(",")],
        "ways": None if ways is None else [each.strip() for each in ways.split(",")],
        "data": DATA if data == "all" else tuple(each.strip() for each in data.split(",")),
    }
    for function in functions or (None,):
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("probing", total=None)

            def advance(outcome: Outcome, progress: Progress = progress, task: Any = task) -> None:
                progress.update(task, advance=1, description=str(outcome.cell))

            result = probe(
                function, causal=causal, backend=backend, jobs=jobs, progress=advance, **chosen
            )
        console.print(result)
        if output is not None:
            _write(result, output, console)
        is_bad |= not result.is_right
    return int(is_bad)


def _write(result: ProbeResult, folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = result.subject.name
    (folder / f"{name}.json").write_text(result.dumps())
    try:
        result.write_picture(folder / f"{name}.png")
    except ModuleNotFoundError as missing:
        console.print(f"No picture: {missing.name} is not installed.")
    for file in result.write_repros(folder / f"{name}_repros"):
        console.print(f"{file}")


def run_bisect(made: Any, kernels: tuple[str, ...]) -> int:
    """Replay every attention of `made`, (fn, args, kwargs); the exit status, 1 if one is bad."""
    fn, args, kwargs = made
    found = bisect(fn, args, kwargs, {"fa.kernels": kernels})
    Console().print(found)
    return int(not found.is_right)


def run_self_test() -> int:
    """Try the controls; the exit status, 1 if a fault is missed or seen where there is none."""
    console = Console()
    table = Table("fault", "S", "has to be", "found", "without it")
    missed = False
    for control, faulty, repaired in self_test():
        right = faulty.verdict == control.verdict and repaired.verdict == "ok"
        missed |= not right
        found = f"{faulty.verdict}: {faulty.detail}" if faulty.detail else faulty.verdict
        length = str(control.cell.length)
        table.add_row(control.name, length, control.verdict, found, repaired.verdict)
    console.print(table)
    return int(missed)
