"""A report as one HTML page that needs nothing from elsewhere: no script, font or image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from . import paths
from .data import Data, break_title, grouped, modules, remarks, summary
from .findings import Finding, findings
from .rules import RULES


def page(data: Data, root: Path, new: Iterable[str] | None = None) -> str:
    """A report as HTML; root and new as for `markdown`."""
    import jinja2

    source = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found = findings(data, root)
    fresh = None if new is None else set(new)
    kernels = Counter(site["kernel"] or "fallback" for site in data["sites"])

    def is_new(finding: Finding) -> bool:
        return fresh is not None and finding.key(root) in fresh

    return environment.from_string(source).render(
        summary=summary(data),
        coverage=f"{data['coverage']:.0%}",
        rules=[_rule(rule, found, is_new) for rule in RULES],
        compared=fresh is not None,
        kernels=[
            {"name": name, "count": count, "share": 100 * count / len(data["sites"])}
            for name, count in kernels.most_common()
        ],
        sites=[
            {
                "source": paths.shown(alike[0]["source"], root),
                "code": alike[0]["code"],
                "module": modules(alike),
                "attention": alike[0]["attention"],
                "kernel": alike[0]["kernel"],
                "remarks": remarks(alike[0]),
            }
            for alike in grouped(data["sites"])
        ],
        breaks=_breaks(data, root),
        fresh=[_finding(each, root) for each in found if is_new(each)],
        others=[_finding(each, root) for each in found if each.rule in ("recompile", "nan")],
        graphs=[{**g, "source": paths.shown(g["source"], root)} for g in data["graphs"]],
    )


def _rule(rule: Any, found: list[Finding], is_new: Any) -> dict[str, Any]:
    mine = [each for each in found if each.rule == rule.id]
    return {
        "id": rule.id,
        "short": rule.short,
        "level": rule.level,
        "count": len(mine),
        "new": sum(map(is_new, mine)),
    }


def _finding(finding: Finding, root: Path) -> dict[str, str]:
    return {
        "rule": finding.rule,
        "source": paths.shown(finding.users_place(root), root),
        "where": finding.where,
        "message": finding.message,
    }


def _breaks(data: Data, root: Path) -> list[dict[str, Any]]:
    once = {(b["source"], b["reason"], str(b["stack"])): b for b in data["graph_breaks"]}
    return [
        {
            **each,
            "title": break_title(each),
            "source": paths.shown(each["source"], root),
            "stack": [
                {**frame, "source": paths.shown(frame["source"], root)} for frame in each["stack"]
            ],
        }
        for each in once.values()
    ]
