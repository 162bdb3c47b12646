"""What happened: sites, graphs and graph breaks, for people and for CI."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import CoverageError
from .rewrite import SiteRecord, source_line

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class GraphRecord:
    """One graph that Dynamo handed over: its number of nodes and of attention sites."""

    nodes: int
    sites: int


@dataclass(frozen=True)
class GraphBreak:
    """Why Dynamo ended a graph, and where (`file:line`)."""

    reason: str
    source: str


@dataclass
class Report:
    """Sites, graphs and graph breaks of one or more compiles.

    pass_seconds: time that the pass itself took in them.
    """

    sites: list[SiteRecord] = field(default_factory=list)
    graphs: list[GraphRecord] = field(default_factory=list)
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    pass_seconds: float = 0.0

    def add(self, nodes: int, sites: Sequence[SiteRecord], broken: GraphBreak | None) -> None:
        """Add one graph."""
        self.graphs.append(GraphRecord(nodes, len(sites)))
        self.sites.extend(sites)
        if broken is not None:
            self.graph_breaks.append(broken)

    @property
    def coverage(self) -> float:
        """Share of the sites that run on the kernel chosen for them, PyTorch's own where it is
        faster included; 1.0 when there is no site."""
        if not self.sites:
            return 1.0
        return sum(site.kernel is not None for site in self.sites) / len(self.sites)

    def assert_coverage(self, fraction: float) -> None:
        """Raise `CoverageError`, listing every fallback, unless `coverage >= fraction`."""
        if self.coverage >= fraction:
            return
        left = [site for site in self.sites if site.kernel is None]
        raise CoverageError(
            f"{self.coverage:.0%} of {len(self.sites)} attention sites run on a kernel of "
            f"fa_inductor, {fraction:.0%} were asked for:\n"
            + "\n".join(f"  {s.source}: {' · '.join(s.reason_texts)}" for s in left)
        )

    def assert_no_graph_breaks(self) -> None:
        """Raise `CoverageError`, listing every graph break, if there is one."""
        if self.graph_breaks:
            raise CoverageError(
                f"{len(self.graph_breaks)} graph break(s):\n"
                + "\n".join(f"  {b.source}: {b.reason}" for b in self.graph_breaks)
            )

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready data, `schema_version` 1."""
        return {
            "schema_version": SCHEMA_VERSION,
            "coverage": self.coverage,
            "sites": [
                {
                    "family": site.family,
                    "source": site.source,
                    "code": source_line(site.source),
                    "module": site.module,
                    "spec": site.spec.to_json() if site.spec else None,
                    "kernel": site.kernel,
                    "reasons": {name: list(texts) for name, texts in site.reasons.items()},
                    "copied": dict(site.copied),
                    "notes": list(site.notes),
                }
                for site in self.sites
            ],
            "graphs": [{"nodes": g.nodes, "sites": g.sites} for g in self.graphs],
            "graph_breaks": [{"reason": b.reason, "source": b.source} for b in self.graph_breaks],
        }

    def dumps(self) -> str:
        """`to_json` as text."""
        return json.dumps(self.to_json(), indent=2)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.summary(), title_justify="left")
        for heading in ("source", "module", "attention", "kernel", "why not another; notes"):
            table.add_column(heading, overflow="fold")
        for alike in _grouped(self.sites):
            site = alike[0]
            copied = [f"copied: {name} ({why})" for name, why in site.copied.items()]
            notes = [*site.reason_texts, *copied, *site.notes]
            table.add_row(
                Text(_short(site.source)),
                Text(_modules(alike)),
                Text(str(site.spec) if site.spec else site.family),
                Text(site.kernel or "fallback", style="green" if site.kernel else "yellow"),
                Text("\n".join(notes)),
            )
        breaks = [Text(f"graph break at {_short(b.source)}: {b.reason}") for b in self.graph_breaks]
        return Group(table, *breaks)

    def summary(self) -> str:
        """One line: graphs, breaks, sites by kernel."""
        counts: dict[str, int] = {}
        for site in self.sites:
            name = site.kernel or "fallback"
            counts[name] = counts.get(name, 0) + 1
        kinds = ", ".join(f"{count} on {name}" for name, count in counts.items())
        return (
            f"{len(self.graphs)} graph(s), {len(self.graph_breaks)} break(s), "
            f"{len(self.sites)} attention site(s)" + (f": {kinds}" if kinds else "")
        )


def fallback_line(sites: Sequence[SiteRecord]) -> str | None:
    """How many sites of how many were left to PyTorch, with each reason once; None if none."""
    left = [site for site in sites if site.kernel is None]
    if not left:
        return None
    reasons = dict.fromkeys(text for site in left for text in site.reason_texts)
    return (
        f"{len(left)} of {len(sites)} attention sites left to PyTorch "
        f"(first at {left[0].source}): " + " · ".join(reasons)
    )


def _grouped(sites: Sequence[SiteRecord]) -> list[list[SiteRecord]]:
    """Sites that differ in nothing but their module, together: one row of a table."""
    groups: dict[object, list[SiteRecord]] = {}
    for site in sites:
        notes = (*site.reason_texts, *site.copied.values(), *site.notes)
        groups.setdefault((site.source, str(site.spec), site.kernel, notes), []).append(site)
    return list(groups.values())


def _modules(alike: Sequence[SiteRecord]) -> str:
    if len(alike) == 1:
        return alike[0].module
    return f"{alike[0].module} … {alike[-1].module} ({len(alike)} sites)"


def _short(source: str) -> str:
    return "/".join(source.split("/")[-2:])


_collector: ContextVar[Report | None] = ContextVar("fa_inductor_report", default=None)


@contextmanager
def collecting(report: Report | None = None) -> Iterator[Report]:
    """Collect what every compile inside does into one `Report`."""
    report = Report() if report is None else report
    token = _collector.set(report)
    try:
        yield report
    finally:
        _collector.reset(token)


@contextmanager
def timed_pass() -> Iterator[None]:
    """Add the time spent inside to the collecting report's `pass_seconds`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        if (collecting_now := _collector.get()) is not None:
            collecting_now.pass_seconds += time.perf_counter() - started


def collector() -> Report | None:
    """The report that is collecting now, if any."""
    return _collector.get()
