"""A report as the properties of a JUnit test case."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from . import paths
from .data import Data
from .findings import findings


def properties(data: Data, root: Path) -> list[tuple[str, str]]:
    """Names and values: coverage, numbers, sites by kernel, and each finding with its place."""
    kernels = Counter(site["kernel"] or "fallback" for site in data["sites"])
    found = findings(data, root)
    named = [
        ("fa.coverage", f"{data['coverage']:.4f}"),
        ("fa.sites", str(len(data["sites"]))),
        ("fa.graphs", str(len(data["graphs"]))),
        ("fa.graph_breaks", str(len(data["graph_breaks"]))),
        *((f"fa.sites.{kernel}", str(count)) for kernel, count in sorted(kernels.items())),
    ]
    named += [
        (f"fa.finding.{each.rule}", f"{paths.shown(each.source, root)}: {each.message}")
        for each in found
    ]
    return named
