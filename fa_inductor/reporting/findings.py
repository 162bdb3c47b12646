"""What of a report somebody should look at: one finding for each place and kind."""

from __future__ import annotations

import hashlib
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
    first. tests: the tests in which it was met.
    """

    rule: str
    source: str
    code: str
    where: str
    message: str
    kind: str = ""
    stack: tuple[tuple[str, str], ...] = ()
    tests: tuple[str, ...] = ()

    def key(self, root: Path) -> str:
        """The same for the same finding on another machine, and after lines were added above."""
        path = paths.portable(paths.split(self.source)[0], root)
        # A line that is gone or generated has no text: its number is all there is.
        line = self.code or str(paths.split(self.source)[1])
        parts = (self.rule, path, line, self.where, self.kind)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def findings(data: Data, root: Path) -> list[Finding]:
    """The findings of a report, each once however many tests met it, in the report's order."""
    found: dict[str, Finding] = {}
    for each in _all(data):
        key = each.key(root)
        known = found.get(key, replace(each, tests=()))
        tests = dict.fromkeys((*known.tests, *each.tests))
        found[key] = replace(known, tests=tuple(tests))
    return list(found.values())


def _all(data: Data) -> Iterator[Finding]:
    yield from _graph_breaks(data)
    yield from _sites(data)
    yield from _recompiles(data)
    for each in data["not_finite"]:
        message = f"{each['output']} of {each['function']} holds NaN or infinity"
        yield Finding(
            "nan", each["source"], "", each["function"], message, each["output"], (), _tests(each)
        )


def _graph_breaks(data: Data) -> Iterator[Finding]:
    for each in data["graph_breaks"]:
        stack = tuple((frame["source"], frame["function"]) for frame in each["stack"])
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
        attention = site["attention"]
        if site["kernel"] is None:
            message = f"{attention}: left to PyTorch. {' · '.join(reason_texts(site))}"
            yield Finding("fallback", *place, message, tests=_tests(site))
        for name, why in site["copied"].items():
            message = f"{site['kernel']} reads a copy of {name}: {why} ({attention})"
            yield Finding("copy", *place, message, name, (), _tests(site))


def _recompiles(data: Data) -> Iterator[Finding]:
    """A graph that Dynamo made because those it had did not do, where one of them is ours."""
    graphs_of: dict[tuple[str, ...], list[Data]] = {}
    for graph in data["graphs"]:
        frame = graph["compile_id"].split("/")[0]
        key = (graph.get("test", ""), frame, graph["function"], graph["source"])
        graphs_of.setdefault(key, []).append(graph)
    for (_, _, function, source), graphs in graphs_of.items():
        again = [graph for graph in graphs if graph["recompiled"] is not None]
        if len(graphs) > 1 and again:
            reasons = " · ".join(dict.fromkeys(graph["recompiled"] for graph in again))
            message = f"{function} was compiled {len(graphs)} times: {reasons}"
            yield Finding(
                "recompile", source, "", function, message, function, (), _tests(again[0])
            )


def _tests(item: Data) -> tuple[str, ...]:
    return (item["test"],) if item.get("test") else ()
