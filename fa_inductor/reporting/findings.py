"""What of a report somebody should look at: one finding for each place and kind."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from . import paths
from .data import Data, break_title, reason_texts


@dataclass(frozen=True)
class Finding:
    """One thing to look at.

    rule: of `rules.RULES`. source: `file:line`. where: the module or function that it is in.
    kind: tells apart what one rule finds at one line. stack: (`file:line`, function), outermost
    first. tests: the tests in which it was met. nth: which of several lines that are all alike in
    the rest, as a line's number is no part of what a finding is known by.
    """

    rule: str
    source: str
    code: str
    where: str
    message: str
    kind: str = ""
    stack: tuple[tuple[str, str], ...] = ()
    tests: tuple[str, ...] = ()
    nth: int = 0

    def key(self, root: Path) -> str:
        """The same for the same finding on another machine, and after lines were added above.

        The callers are part of it, by file and function: a line that all models share may be
        known to fall back in one of them, and be new in another.
        """
        # A line that is gone or generated has no text: its number is all there is.
        path, number = paths.split(self.source)
        parts = [self.rule, paths.portable(path, root), self.code or str(number)]
        parts += [self.where, self.kind, str(self.nth)]
        for place, function in self.stack:
            caller = paths.portable(paths.split(place)[0], root)
            if not caller.startswith("site-packages/torch/"):  # PyTorch's own, which it rearranges
                parts += [caller, function]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def users_place(self, root: Path) -> str:
        """The innermost place that is inside the root: a library's line is nobody's to look at."""
        for source, _ in reversed(self.stack):
            if paths.inside(paths.split(source)[0], root) is not None:
                return source
        return self.source


def findings(data: Data, root: Path) -> list[Finding]:
    """The findings of a report, each once however many tests met it, in the report's order."""
    alike: dict[str, dict[str, list[Finding]]] = {}
    for each in _all(data):
        alike.setdefault(each.key(root), {}).setdefault(each.source, []).append(each)
    nth = {
        (key, source): number
        for key, sources in alike.items()
        for number, source in enumerate(sorted(sources, key=paths.split))
    }
    found = []
    for key, sources in alike.items():
        for source, same in sources.items():
            tests = dict.fromkeys(test for each in same for test in each.tests)
            found.append(replace(same[0], tests=tuple(tests), nth=nth[key, source]))
    return found


def _all(data: Data) -> Iterator[Finding]:
    yield from _graph_breaks(data)
    yield from _sites(data)
    yield from _recompiles(data)
    for each in data["not_finite"]:
        holds = f"{each['output']} of {each['function']} holds NaN or infinity"
        message = each.get("text") or holds
        yield Finding(
            "nan",
            each["source"],
            each["code"],
            each["function"],
            message,
            each["output"],
            tests=_tests(each),
        )


def _graph_breaks(data: Data) -> Iterator[Finding]:
    for each in data["graph_breaks"]:
        stack = _stack(each)
        left = " The whole function is left to Python." if each["skipped"] else ""
        hints = "".join(f" Hint: {hint}" for hint in each["hints"])
        message = f"{break_title(each)}. {each['explanation']}{left}{hints}".replace("..", ".")
        yield Finding(
            "graph-break",
            each["source"],
            each["code"],
            stack[-1][1] if stack else "",
            message.strip(),
            each["gb_id"] or each["reason"],
            stack,
            _tests(each),
        )


def _sites(data: Data) -> Iterator[Finding]:
    for site in data["sites"]:
        place = (site["source"], site["code"], site["module"])
        stack = _stack(site)
        attention = site["attention"]
        if site["kernel"] is None:
            texts = reason_texts(site)
            message = f"{attention}: left to PyTorch. {' · '.join(texts)}"
            kind = _without_numbers(" · ".join(sorted(texts)))
            yield Finding("fallback", *place, message, kind, stack, _tests(site))
        for name, why in site["copied"].items():
            message = f"{site['kernel']} reads a copy of {name}: {why} ({attention})"
            yield Finding("copy", *place, message, name, stack, _tests(site))


def _recompiles(data: Data) -> Iterator[Finding]:
    """A graph that Dynamo made because those it had did not do, where one of them is ours: in
    whichever test, as a model that several tests share is compiled in the first of them."""
    graphs_of: dict[tuple[str, ...], list[Data]] = {}
    for graph in data["graphs"]:
        frame = graph["compile_id"].split("/")[0]
        graphs_of.setdefault((frame, graph["function"], graph["source"]), []).append(graph)
    for (_, function, source), graphs in graphs_of.items():
        first = min(map(_number, graphs))
        again = [g for g in graphs if g["recompiled"] is not None and _number(g) > first]
        for graph in again:
            kind = _without_numbers(graph["recompiled"])
            same = [g for g in again if _without_numbers(g["recompiled"]) == kind]
            message = (
                f"{function} was compiled again ({len(same)} times): {same[0]['recompiled']}"
                if len(same) > 1
                else f"{function} was compiled again: {graph['recompiled']}"
            )
            yield Finding(
                "recompile", source, graph["code"], function, message, kind, tests=_tests(graph)
            )


def _number(graph: Data) -> int:
    """Which of its frame's graphs it is, from 0."""
    number = graph["compile_id"].rpartition("/")[2]
    return int(number) if number.isdigit() else 0


def _without_numbers(text: str) -> str:
    """What stays of a reason when sizes change."""
    return re.sub(r"\d+", "#", text)


def _stack(item: Data) -> tuple[tuple[str, str], ...]:
    return tuple((frame["source"], frame["function"]) for frame in item["stack"])


def _tests(item: Data) -> tuple[str, ...]:
    return (item["test"],) if item.get("test") else ()
