"""What happened: sites, graphs and graph breaks, for people and for CI.

`Report.to_json` is the report as data of a versioned schema (`data/report.schema.json`); all
formats in `reporting/` are made of that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from . import dynamo_compat
from .dynamo_compat import Attempt, DynamoWatch
from .errors import CoverageError, FallbackError
from .graph_breaks import GraphBreak, understand
from .rewrite import SiteRecord
from .user_code import qualified_function, source_line

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class GraphRecord:
    """One graph that Dynamo handed over: its number of nodes and of attention sites.

    compile_id: Dynamo's `frame/compile`, where `compile` counts the graphs of the frame.
    function, source: whose frame it is, and its `file:line`; known once its compile has ended.
    recompiled: why the graphs that the frame had already did not do; None for a first one.
    """

    nodes: int
    sites: int
    compile_id: str = ""
    function: str = ""
    source: str = ""
    recompiled: str | None = None


@dataclass(frozen=True)
class NotFinite:
    """An output of a compiled call that holds NaN or infinity.

    source: `file:line` of the compiled function; output: where in what it returned.
    text: what `fa.guard` says, where that has found it: of an attention, at `source`.
    """

    function: str
    source: str
    output: str
    text: str = ""


@dataclass
class Report:
    """Sites, graphs and graph breaks of one or more compiles.

    not_finite: outputs found not to be finite, by those who look (the pytest fixture).
    pass_seconds: time that the pass itself took in them.
    """

    sites: list[SiteRecord] = field(default_factory=list)
    graphs: list[GraphRecord] = field(default_factory=list)
    graph_breaks: list[GraphBreak] = field(default_factory=list)
    not_finite: list[NotFinite] = field(default_factory=list)
    pass_seconds: float = 0.0

    def add(
        self,
        nodes: int,
        sites: Sequence[SiteRecord],
        broken: GraphBreak | None,
        compile_id: str = "",
    ) -> GraphRecord:
        """Add one graph."""
        graph = GraphRecord(nodes, len(sites), compile_id)
        self.graphs.append(graph)
        self.sites.extend(sites)
        if broken is not None:
            self.graph_breaks.append(broken)
        return graph

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
        """The report as JSON-ready data, `schema_version` 2."""
        return {
            "schema_version": SCHEMA_VERSION,
            "coverage": self.coverage,
            "sites": [
                {
                    "family": site.family,
                    "source": site.source,
                    "code": source_line(site.source),
                    "module": site.module,
                    "attention": str(site.spec) if site.spec else site.family,
                    "spec": site.spec.to_json() if site.spec else None,
                    "kernel": site.kernel,
                    "reasons": {name: list(texts) for name, texts in site.reasons.items()},
                    "copied": dict(site.copied),
                    "notes": list(site.notes),
                    "stack": [frame.to_json() for frame in site.stack],
                }
                for site in self.sites
            ],
            "graphs": [
                {
                    **vars(graph),
                    "function": qualified_function(graph.source, graph.function),
                    "code": source_line(graph.source),
                }
                for graph in self.graphs
            ],
            "graph_breaks": [
                {
                    "reason": each.reason,
                    "source": each.source,
                    "code": source_line(each.source),
                    "explanation": each.explanation,
                    "hints": list(each.hints),
                    "gb_id": each.gb_id,
                    "skipped": each.skipped,
                    "stack": [frame.to_json() for frame in each.stack],
                }
                for each in self.graph_breaks
            ],
            "not_finite": [
                {**vars(each), "code": source_line(each.source)} for each in self.not_finite
            ],
        }

    def dumps(self) -> str:
        """`to_json` as text."""
        return json.dumps(self.to_json(), indent=2)

    def render(self, form: str) -> str:
        """The report as text: "rich", "json", "markdown", "sarif" or "html".

        Raises `OptionError` for another form.
        """
        from .reporting import render

        return render(self.to_json(), form)

    def __rich__(self) -> RenderableType:
        from .reporting.table import table

        return table(self.to_json())

    def summary(self) -> str:
        """One line: graphs, breaks, sites by kernel."""
        from .reporting.data import summary

        return summary(self.to_json())


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


# --- Collecting -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Added:
    """What one graph has put into a report."""

    attempt: Attempt | None
    graph: GraphRecord
    sites: Sequence[SiteRecord]
    broken: GraphBreak | None


class _Collector:
    """A report that grows with every compile, and what must still be known for it."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.watch = DynamoWatch()
        self.added: list[_Added] = []
        self.places: dict[str, tuple[str, str]] = {}  # function and source, by frame

    def add(self, nodes: int, sites: Sequence[SiteRecord], broken: GraphBreak | None) -> None:
        self._take_frames()
        attempt = dynamo_compat.attempt()
        if attempt is not None:
            for earlier in self.added.copy():
                if earlier.attempt is not None and earlier.attempt.of is attempt.of:
                    self._drop(earlier)
        if broken in self.report.graph_breaks:  # told of when this code was compiled before
            broken = None
        graph = self.report.add(nodes, sites, broken, attempt.compile_id if attempt else "")
        self.added.append(_Added(attempt, graph, sites, broken))
        self._take_breaks()

    def settle(self) -> None:
        """Take in what Dynamo has told nobody: frames that it gave up, breaks without a graph."""
        self._take_frames()
        self._take_breaks()

    def _take_frames(self) -> None:
        for frame in self.watch.new_frames():
            number = frame.compile_id.split("/")[0]
            if frame.source:
                self.places[number] = (frame.function, frame.source)
            if frame.failure == "Unsupported":
                at = frame.failed_at or self.places.get(number, ("", ""))[1]
                self._add_break(understand(frame.message, (), dynamo_compat.graph_break_ids(), at))
            for added in self.added.copy():
                if added.attempt is not None and added.attempt.compile_id == frame.compile_id:
                    # What our own policy refused stays: the report is where it says why.
                    if frame.failure is None or FallbackError.__name__ in frame.message:
                        self._complete(added, frame)
                    else:
                        self._drop(added)

    def _take_breaks(self) -> None:
        for message, stack in self.watch.new_breaks():
            self._add_break(understand(message, stack, dynamo_compat.graph_break_ids()))

    def _add_break(self, broken: GraphBreak) -> None:
        """... unless a graph told of it: Dynamo meets a break again in the callee, and anew."""
        known = {(each.reason, each.source) for each in self.report.graph_breaks}
        if (broken.reason, broken.source) not in known:
            self.report.graph_breaks.append(broken)

    def _complete(self, added: _Added, frame: dynamo_compat.CompiledFrame) -> None:
        reason = frame.recompile_reason
        whole = replace(
            added.graph,
            function=frame.function,
            source=frame.source,
            recompiled=_guard(reason) if reason else None,
        )
        graphs = self.report.graphs
        graphs[_place(graphs, added.graph)] = whole
        self.added.remove(added)  # its compile has ended: it is not given up any more

    def _drop(self, added: _Added) -> None:
        """Take out a graph that Dynamo gave up."""
        del self.report.graphs[_place(self.report.graphs, added.graph)]
        for site in added.sites:
            del self.report.sites[_place(self.report.sites, site)]
        if added.broken is not None:
            del self.report.graph_breaks[_place(self.report.graph_breaks, added.broken)]
        self.added.remove(added)


def _guard(reason: str) -> str:
    """The guard that failed, without the graph's number before it and the user's code behind."""
    return re.sub(r"^\d+/\d+: ", "", reason.split("\n")[0].split("  #")[0]).strip()


def _place(items: Sequence[object], wanted: object) -> int:
    """Where the very object is: records of two graphs may be equal."""
    return next(index for index, each in enumerate(items) if each is wanted)


_collector: ContextVar[_Collector | None] = ContextVar("fa_inductor_report", default=None)


@contextmanager
def collecting(report: Report | None = None) -> Iterator[Report]:
    """Collect what every compile inside does into one `Report`.

    Where Dynamo leaves a frame to Python without any graph, that is a graph break too. Whose frame
    a graph is, and breaks without one, are known when the next compile begins or this ends.
    """
    report = Report() if report is None else report
    outer = _collector.get()
    if outer is not None:
        outer.settle()
    collector = _Collector(report)
    token = _collector.set(collector)
    try:
        yield report
    finally:
        collector.settle()
        _collector.reset(token)
        if outer is not None:  # what happened inside was told to the inner report alone
            outer.watch = DynamoWatch()


@contextmanager
def timed_pass() -> Iterator[None]:
    """Add the time spent inside to the collecting report's `pass_seconds`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        if (collecting_now := _collector.get()) is not None:
            collecting_now.report.pass_seconds += time.perf_counter() - started


def add_graph(nodes: int, sites: Sequence[SiteRecord], broken: GraphBreak | None) -> None:
    """Add the graph that Dynamo is compiling to the report that is collecting now, if any.

    A graph of an earlier attempt at the same compile is taken out: Dynamo gave it up.
    """
    if (collector := _collector.get()) is not None:
        collector.add(nodes, sites, broken)


def settled() -> None:
    """Have the report that is collecting now, if any, hold all that is known by now."""
    if (collector := _collector.get()) is not None:
        collector.settle()
