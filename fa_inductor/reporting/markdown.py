"""A report as Markdown, for the summary of a CI job."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import paths
from .data import Data, break_title, grouped, modules, remarks, summary
from .findings import Finding, findings
from .rules import RULES


def markdown(data: Data, root: Path, new: Iterable[str] | None = None) -> str:
    """A report as GitHub-flavoured Markdown.

    root: the folder that paths are relative to. new: the keys of the findings that no baseline
    holds, where there is a baseline.
    """
    found = findings(data, root)
    fresh = None if new is None else set(new)
    lines = ["## Attention in compiled graphs", "", _text(summary(data)) + ".", ""]
    headings = ["finding", "count"] + (["new"] if fresh is not None else [])
    rows = []
    for rule in RULES:
        keys = {each.key(root) for each in found if each.rule == rule.id}
        row = [f"`{rule.id}`", str(len(keys))]
        rows.append(row + ([str(len(keys & fresh))] if fresh is not None else []))
    lines += [*_table(headings, rows), ""]
    lines += _listed("New", [each for each in found if fresh and each.key(root) in fresh], root)
    if data["sites"]:
        lines += ["### Sites", ""]
        rows = [
            [
                _code(paths.shown(alike[0]["source"], root)),
                _text(modules(alike)),
                _text(alike[0]["attention"]),
                "**fallback**" if alike[0]["kernel"] is None else _code(alike[0]["kernel"]),
                "<br>".join(map(_text, remarks(alike[0]))),
            ]
            for alike in grouped(data["sites"])
        ]
        columns = ["source", "module", "attention", "kernel", "why not another; notes"]
        lines += [*_table(columns, rows), ""]
    if data["graph_breaks"]:
        lines += ["### Graph breaks", ""]
        for each in _once(data["graph_breaks"]):
            lines += [*_break(each, root), ""]
    for heading, name in (("Compiled more than once", "recompile"), ("Not finite", "nan")):
        lines += _listed(heading, [each for each in found if each.rule == name], root)
    return "\n".join(lines).rstrip() + "\n"


def _listed(heading: str, found: Iterable[Finding], root: Path) -> list[str]:
    """A section with a line for each finding, or nothing."""
    items = [
        f"- `{each.rule}` at {_code(paths.shown(each.users_place(root), root))}"
        f"{' in ' + _code(each.where) if each.where else ''}: {_text(each.message)}"
        for each in found
    ]
    return [f"### {heading}", "", *items, ""] if items else []


def _once(breaks: Iterable[Data]) -> list[Data]:
    """Each graph break once, however many tests met it."""
    return list({(b["source"], b["reason"], str(b["stack"])): b for b in breaks}.values())


def _break(broken: Data, root: Path) -> list[str]:
    place = paths.shown(broken["source"], root)
    lines = [f"- **{_text(break_title(broken))}** at {_code(place)}"]
    if broken["code"]:
        lines.append(f"  {_code(broken['code'])}")
    lines.append(f"  {_text(broken['explanation'])}")
    if broken["skipped"]:
        lines.append("  The whole function is left to Python.")
    lines += [f"  - {_text(hint)}" for hint in broken["hints"]]
    if len(broken["stack"]) > 1:
        frames = " → ".join(
            f"{_code(f['function'])} {_code(paths.shown(f['source'], root))}"
            for f in broken["stack"]
        )
        lines.append(f"  - called by {frames}")
    return lines


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---"] * len(headings)
    return ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows)]


def _text(text: str) -> str:
    """Text that shows as it is: no markup, no HTML, no end of a table's cell."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    for character in "\\`*_[]|~$":  # the last is mathematics on GitHub
        escaped = escaped.replace(character, "\\" + character)
    return escaped


def _code(text: str) -> str:
    """The same as code; a backtick or bar inside would end it."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    return f"<code>{_marked(escaped)}</code>"


def _marked(text: str) -> str:
    """Characters that are markup even inside HTML, as entities."""
    return "".join(f"&#{ord(c)};" if c in "\\`*_[]|~" else c for c in text)
