"""What the pass does with an entry, as the cells of one row of the table."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass

import torch

from fa_inductor import Report, explain
from fa_inductor.rewrite import SiteRecord
from fa_inductor.spec import AttentionSpec
from fa_inductor.times import CORE

from .entry import Entry

HEADINGS = (
    "model",
    "attention",
    "input",
    "sites found",
    "rewritten",
    "mask as understood",
    "kernels",
    "why not rewritten",
)
_REASON_WIDTH = 110


@dataclass(frozen=True)
class Row:
    """One entry's cells from "sites found" on, under `HEADINGS`."""

    entry: Entry
    cells: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.entry.model, self.entry.attention, self.entry.given


def understood(spec: AttentionSpec) -> str:
    """What the pass knows about which keys are seen, and about what else changes the scores."""
    parts = []
    if spec.causal != "none":
        parts.append("causal" if spec.causal == "top_left" else "causal from the last key")
    if spec.window != (None, None):
        parts.append("window ({}, {})".format(*("∞" if w is None else w for w in spec.window)))
    if spec.has_seqlens:
        parts.append("lengths")
    if spec.mask:
        parts.append(spec.mask)
    if spec.softcap:
        parts.append(f"softcap {spec.softcap:g}")
    if spec.has_sink:
        parts.append("sink")
    return ", ".join(parts) or "none"


def plan(entry: Entry, target: str) -> Report:
    """The report of the entry's inference in bfloat16, planned for `target` on the CPU."""
    case = entry.build().moved("cpu", torch.bfloat16)
    with torch.no_grad():
        return explain(case.model, target=target)(**case.inputs)


def planned(entry: Entry, target: str) -> Row:
    """The entry's row for `target`; one that says so where its package is missing."""
    return row_of_missing(entry) if entry.missing else row_of(entry, plan(entry, target))


def row_of_missing(entry: Entry) -> Row:
    return Row(entry, ("", "", "", "", entry.missing or ""))


def row_of(entry: Entry, report: Report) -> Row:
    """The row of a report, planned or run."""
    sites = report.sites
    rewritten = sum(site.kernel not in (None, CORE) for site in sites)
    masks = [understood(site.spec) if site.spec else "not understood" for site in sites]
    kernels = [site.kernel or "fallback" for site in sites]
    return Row(
        entry,
        (
            f"{len(sites)} of {entry.sites}",
            str(rewritten),
            _counted(masks),
            _counted(kernels),
            "; ".join(_reasons(entry, report)),
        ),
    )


def _counted(texts: list[str]) -> str:
    """Each text once, with its number where there are several."""
    counts = Counter(texts)
    if len(counts) == 1:
        return texts[0]
    return "; ".join(f"{count} × {text}" for text, count in counts.items())


def _reasons(entry: Entry, report: Report) -> list[str]:
    """Why sites are not rewritten, each reason once, and where the graph was broken."""
    texts = []
    if len(report.sites) < entry.sites:
        texts.append("no pattern matches")
    for site in report.sites:
        texts += _reasons_of(site)
    for broken in report.graph_breaks:
        place = "/".join(broken.source.split("/")[-2:])
        texts.append(f"graph break at {place}: {broken.reason}")
    once = dict.fromkeys(texts)
    return [textwrap.shorten(text, _REASON_WIDTH, placeholder=" …") for text in once]


def _reasons_of(site: SiteRecord) -> list[str]:
    return site.reason_texts if site.kernel in (None, CORE) else []
