"""The measurements of `attention.py` as tables for people, and as one for fa_inductor."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from choice import default_choice
from contestants import CORE_CUDNN, CORE_DEFAULT, FA4_EAGER, OURS
from grid import Shape, spec_of
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fa_inductor import times as known_times

Row = dict[str, Any]
DOUBTFUL = 0.1  # part of the median that the middle half of the rounds may span
# (title, ours, theirs): what each of ours is held against.
AGAINST = (
    ("ours fa4 / FA4 eager", OURS["fa4"], FA4_EAGER),
    ("ours cudnn / core cuDNN", OURS["cudnn"], CORE_CUDNN),
)


def print_all(data: dict[str, Any], console: Console) -> None:
    rows = data["rows"]
    console.print(", ".join(f"{name} {value}" for name, value in data["machine"].items()))
    console.print(_times("GPU microseconds", "us", data))
    if any(row["host_us"] for row in rows):
        console.print(_times("Host microseconds, short shapes", "host_us", data))
    _print_notes(rows, console)
    _print_ratios(rows, console)
    _print_default_choice(rows, data["machine"]["arch"], console)


def _times(title: str, key: str, data: dict[str, Any]) -> Table:
    """All figures, the fastest of each row in bold."""
    table = Table("shape", "pass", title=title)
    for name in data["contestants"]:
        table.add_column(name, justify="right")
    if key == "us":
        table.add_column("PyTorch picks")
    for row in data["rows"]:
        times = row[key]
        if not times:
            continue
        fastest = min(times, key=lambda name: times[name])
        cells = [_cell(times.get(name), name == fastest) for name in data["contestants"]]
        picks = [(row["core_backend"] or "").removesuffix("_ATTENTION")] if key == "us" else []
        table.add_row(row["name"], row["pass"], *cells, *picks)
    return table


def _cell(time: float | None, best: bool) -> str:
    if time is None:
        return "–"
    text = f"{time:.1f}" if time < 1000 else f"{time:.0f}"
    return f"[bold]{text}[/bold]" if best else text


def _print_notes(rows: Iterable[Row], console: Console) -> None:
    """Why figures are missing or doubtful, each reason once."""
    found: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))  # who, where
    for row in rows:
        where = f"{row['name']}, {row['pass']}"
        notes = [(name, f"refused: {error}", "") for name, error in row["errors"].items()]
        notes += [(name, f"not captured: {how}", "") for name, how in row["not_captured"].items()]
        for name, apart in row["differs"].items():
            notes.append((name, "GIVES OTHER RESULTS", f" ({apart:.2g})"))
        for name, spread in row["spread"].items():
            if spread > DOUBTFUL:
                notes.append((name, f"varies by more than {DOUBTFUL:.0%} from round to round", ""))
        for name, text, detail in notes:
            found[text][0].append(name)
            found[text][1].append(where + detail)
    for text, (names, places) in found.items():
        places = list(dict.fromkeys(places))
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        who = ", ".join(dict.fromkeys(names))
        note = f"- {text}: {who}; {' | '.join(places[:3])}{more}"
        console.print(escape(note), highlight=False)


def _ratio(row: Row, ours: str, theirs: str) -> float | None:
    times = row["us"]
    return times[ours] / times[theirs] if ours in times and theirs in times else None


def _print_ratios(rows: Iterable[Row], console: Console) -> None:
    """Our kernels against the same kernels elsewhere, the worst first."""
    ratios = {id(row): [_ratio(row, *pair[1:]) for pair in AGAINST] for row in rows}

    def worst(row: Row) -> float:
        return max((ratio for ratio in ratios[id(row)] if ratio is not None), default=0.0)

    table = Table("shape", "pass", "fastest", title="Worst first; above 1 is slower")
    for title, *_ in AGAINST:
        table.add_column(title, justify="right")
    for row in sorted(rows, key=worst, reverse=True):
        times = row["us"]
        fastest = min(times, key=lambda name: times[name], default="–")
        cells = ["–" if ratio is None else f"{ratio:.3f}" for ratio in ratios[id(row)]]
        table.add_row(row["name"], row["pass"], fastest, *cells)
    console.print(table)
    for index, (title, *_) in enumerate(AGAINST):
        found = [ratio for each in ratios.values() if (ratio := each[index]) is not None]
        console.print(f"{title}: {_summary(found)}")


def _print_default_choice(rows: Iterable[Row], arch: str, console: Console) -> None:
    """The kernel that fa_inductor picks, against what PyTorch picks."""
    table = Table("shape", "pass", "picked", "PyTorch picks", "ratio", "fastest")
    table.title = "fa_inductor's default choice / core default, the 12 worst"
    found: list[tuple[float, Row, str]] = []
    for row in rows:
        spec = spec_of(Shape.from_json(row["shape"]), row["pass"])
        kernel = default_choice(spec, arch)
        picked = CORE_DEFAULT if kernel is None else OURS[kernel]
        ratio = _ratio(row, picked, CORE_DEFAULT)
        if ratio is not None:
            found.append((ratio, row, picked))
    found.sort(key=lambda each: -each[0])
    for ratio, row, picked in found[:12]:
        fastest = min(row["us"], key=lambda name: row["us"][name])
        table.add_row(
            row["name"], row["pass"], picked, row["core_backend"], f"{ratio:.3f}", fastest
        )
    console.print(table)
    for passed in ("fwd", "fwd+bwd"):
        part = [ratio for ratio, row, _ in found if row["pass"] == passed]
        console.print(f"default choice / core default, {passed}: {_summary(part)}")
    everything = [ratio for ratio, *_ in found]
    console.print(f"default choice / core default, all: {_summary(everything)}")


def _summary(ratios: list[float]) -> str:
    if not ratios:
        return "nothing to compare"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    ends = f"worst {max(ratios):.3f}, best {min(ratios):.3f}"
    return f"geometric mean {mean:.3f}, {ends}, of {len(ratios)}"


# --- For fa_inductor ------------------------------------------------------------------------------


def times_table(data: dict[str, Any]) -> str:
    """JSON with a row a line, in an order that does not depend on the run's.

    What `fa_inductor.times` reads; "core" is what PyTorch picks by itself.
    """
    kernels = {**OURS, "core": CORE_DEFAULT}
    lines = []
    for row in data["rows"]:
        us = {k: _significant(row["us"][name]) for k, name in kernels.items() if name in row["us"]}
        if not us:
            continue
        shape = Shape.from_json(row["shape"])
        measured = known_times.Measured(
            passes="fwd" if row["pass"] == "fwd" else "bwd",
            kind=known_times.kind_of(spec_of(shape, row["pass"])),
            batch=shape.batch,
            heads_q=shape.heads[0],
            heads_kv=shape.heads[1],
            sq=shape.lengths[0],
            sk=shape.lengths[1],
            d=shape.dims[0],
            dv=shape.dims[1],
            microseconds=us,
        )
        lines.append(json.dumps(dataclasses.asdict(measured)))
    body = ",\n  ".join(sorted(lines))
    head = json.dumps(data["machine"], sort_keys=True)
    return f'{{\n "machine": {head},\n "rows": [\n  {body}\n ]\n}}\n'


def _significant(time: float) -> float:
    """Four digits: more would change from run to run."""
    return float(f"{time:.4g}")
