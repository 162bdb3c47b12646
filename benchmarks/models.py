"""Which real models are covered: the table of the zoo.

    python benchmarks/models.py --target sm_90a --write README.md   # plan, on any machine
    python benchmarks/models.py --target sm_90a --check README.md   # is it so there?
    python benchmarks/models.py --run --json models.json            # run and judge, on a GPU

Planned or run, every model has random weights, and the columns are the same. A run compares its
output, made in memory full of NaN, with a float32 eager copy, and exits with 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from zoo import ENTRIES, Entry
from zoo.judging import compile_default, judge
from zoo.planning import HEADINGS, planned, row_of, row_of_missing
from zoo.table import markdown, written

_TESTS = Path(__file__).parents[1] / "tests"


def plan_all(entries: Sequence[Entry], target: str) -> str:
    """The table."""
    return markdown([planned(entry, target) for entry in entries], target)


def run_all(entries: Sequence[Entry], path: Path | None) -> bool:
    """Run, print and write as JSON; whether all were right."""
    sys.path.append(str(_TESTS))
    from poison import poisoned

    def poisoned_gpu() -> AbstractContextManager[None]:
        # Without PyTorch's deterministic mode, which would ask other kernels of the pass.
        return poisoned(deterministic_fill=False)

    found: list[dict[str, Any]] = []
    try:
        for entry in entries:
            found.append(_run(entry, poisoned_gpu))
    finally:  # what ran before an exception is not lost
        _show(found)
        if path is not None:
            about = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
            path.write_text(json.dumps({"about": about, "models": found}, indent=2) + "\n")
    return all(each.get("right", True) for each in found)


def _run(entry: Entry, poisoned: Any) -> dict[str, Any]:
    if entry.missing:
        row = row_of_missing(entry)
        return dict(zip(HEADINGS, (*row.key, *row.cells), strict=True))
    judged = judge(entry, compile_default, poisoned)
    row = row_of(entry, judged.report)
    return {
        **dict(zip(HEADINGS, (*row.key, *row.cells), strict=True)),
        "error": judged.error,
        "eager error": judged.eager_error,
        "right": judged.right,
    }


def _show(found: Sequence[dict[str, Any]]) -> None:
    table = Table(*HEADINGS, "error", "eager error", "")
    for each in found:
        numbers = [f"{each[name]:.1e}" if name in each else "" for name in ("error", "eager error")]
        verdict = {True: "right", False: "WRONG", None: ""}[each.get("right")]
        table.add_row(*(each[heading] for heading in HEADINGS), *numbers, verdict)
    Console(width=220).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="sm_90a", help="GPU to plan for")
    parser.add_argument("--write", type=Path, metavar="README", help="write between its markers")
    parser.add_argument("--check", type=Path, metavar="README", help="exit with 1 if it differs")
    parser.add_argument("--run", action="store_true", help="run on the GPU instead")
    parser.add_argument("--json", type=Path, help="write what was run there")
    parser.add_argument("--only", default="", help="entries whose name contains this")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    entries = [entry for entry in ENTRIES if arguments.only in entry.name]
    if arguments.run:
        sys.exit(0 if run_all(entries, arguments.json) else 1)
    readme = arguments.write or arguments.check
    if readme and arguments.only:
        parser.error("a README has the whole table: leave --only out")
    table = plan_all(entries, arguments.target)
    if not readme:
        print(table)
        return
    before = readme.read_text()
    after = written(before, table)
    if arguments.write:
        readme.write_text(after)
    elif after != before:
        sys.exit(f"{readme} has another table; --write makes it anew")


if __name__ == "__main__":
    main()
