"""A report on a terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from . import paths
from .data import Data, break_title, grouped, modules, remarks, summary

if TYPE_CHECKING:
    from rich.console import RenderableType


def table(data: Data, root: Path | None = None) -> RenderableType:
    """A renderable: one row for each kind of site, then the graph breaks.

    root: the folder that paths are relative to; without one, they are cut to their last two parts.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def place(source: str) -> str:
        return "/".join(source.split("/")[-2:]) if root is None else paths.shown(source, root)

    rows = Table(title=summary(data), title_justify="left")
    for heading in ("source", "module", "attention", "kernel", "why not another; notes"):
        rows.add_column(heading, overflow="fold")
    for alike in grouped(data["sites"]):
        site = alike[0]
        rows.add_row(
            Text(place(site["source"])),
            Text(modules(alike)),
            Text(site["attention"]),
            Text(site["kernel"] or "fallback", style="green" if site["kernel"] else "yellow"),
            Text("\n".join(remarks(site))),
        )
    breaks = [
        Text(
            f"graph break at {place(b['source'])}: {break_title(b)}\n  {b['explanation']}".rstrip()
        )
        for b in data["graph_breaks"]
    ]
    return Group(rows, *breaks)


def plain(data: Data, root: Path) -> str:
    """The table as text without colours, for a file."""
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=160).print(table(data, root))
    return text.getvalue()
