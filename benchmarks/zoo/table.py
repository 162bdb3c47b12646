"""The table of the zoo in Markdown, and its place in the README."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from .planning import HEADINGS, Row

START, END = "<!-- generated: models -->\n", "<!-- end -->"
_PACKAGES = ("transformers", "diffusers")


def versions_line(target: str) -> str:
    """What the table depends on: packages and the GPU planned for."""
    return f"{', '.join(map(_package, _PACKAGES))}; planned for {target}."


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} is not installed"


def markdown(rows: Sequence[Row], target: str) -> str:
    """The generated part: versions, then one line for all rows of a model that say the same."""
    lines = [versions_line(target), "", _line(HEADINGS), "|---" * len(HEADINGS) + "|"]
    return "\n".join([*lines, *(_line(cells) for cells in merged(rows))])


def merged(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Cells of the table's lines: inputs that say the same together, then implementations."""
    by_input: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        model, attention, given = row.key
        by_input.setdefault((model, attention, *row.cells), []).append(given)
    by_attention: dict[tuple[str, ...], list[str]] = {}
    for (model, attention, *cells), given in by_input.items():
        by_attention.setdefault((model, ", ".join(given), *cells), []).append(attention)
    return [
        (model, ", ".join(attentions), given, *cells)
        for (model, given, *cells), attentions in by_attention.items()
    ]


def expanded(text: str) -> dict[tuple[str, str, str], tuple[str, ...]]:
    """The other way round: (model, attention, input) -> cells, from the table in a README."""
    found = {}
    part = text.partition(START)[2].partition(END)[0]
    for line in part.splitlines():
        if not line.startswith("| ") or line == _line(HEADINGS):
            continue
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        model, attentions, inputs, *rest = (cell.strip() for cell in cells)
        for attention, given in itertools.product(attentions.split(", "), inputs.split(", ")):
            found[model, attention, given] = tuple(rest)
    return found


def written(text: str, table: str) -> str:
    """`text` with what stands between the markers made anew. Raises `ValueError` without them."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"no {START.strip()} followed by {END} in the text")
    return before + START + table + "\n" + END + after


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
