"""A report as data: read, put together, summed up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import OptionError

Data = Mapping[str, Any]
KNOWN_VERSION = 2
PARTS = ("sites", "graphs", "graph_breaks", "not_finite")


def read(path: Path) -> dict[str, Any]:
    """The report in a JSON file. Raises `OptionError` if it holds none of a known version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: not a report: {error}") from error
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != KNOWN_VERSION or not all(part in found for part in PARTS):
        raise OptionError(
            f"{path}: a report of schema_version {version}; this fa_inductor reads {KNOWN_VERSION}."
        )
    return found


def merged(reports: Iterable[tuple[str, Data]]) -> dict[str, Any]:
    """Several reports in one, each with the name of the test that it is from ("" for none)."""
    parts: dict[str, list[Any]] = {part: [] for part in PARTS}
    for test, data in reports:
        for part in PARTS:
            parts[part].extend({**each, "test": test} if test else each for each in data[part])
    return {
        "schema_version": KNOWN_VERSION,
        "coverage": coverage(parts["sites"]),
        **parts,
    }


def coverage(sites: Sequence[Data]) -> float:
    """As `Report.coverage`."""
    return sum(s["kernel"] is not None for s in sites) / len(sites) if sites else 1.0


def summary(data: Data) -> str:
    """One line: graphs, breaks, sites by kernel."""
    counts = Counter(site["kernel"] or "fallback" for site in data["sites"])
    kinds = ", ".join(f"{count} on {name}" for name, count in counts.items())
    if not any(data[part] for part in PARTS):
        kinds = "nothing was compiled"  # what proves nothing must not look as if all were well
    return (
        f"{len(data['graphs'])} graph(s), {len(data['graph_breaks'])} break(s), "
        f"{len(data['sites'])} attention site(s)" + (f": {kinds}" if kinds else "")
    )


def reason_texts(site: Data) -> list[str]:
    """`fa4: dropout_p=0.1 > 0 (...)`, one for each kernel and reason."""
    return [f"{name}: {text}" for name, texts in site["reasons"].items() for text in texts]


def copied_texts(site: Data) -> list[str]:
    """`copied: k (stride 33 elements, ...)`, one for each input that the kernel copies."""
    return [f"copied: {name} ({why})" for name, why in site["copied"].items()]


def remarks(site: Data) -> list[str]:
    """All that is to be said of a site: reasons, copies, notes."""
    return [*reason_texts(site), *copied_texts(site), *site["notes"]]


def grouped(sites: Iterable[Data]) -> list[list[Data]]:
    """Sites that differ in nothing but their module and test, together: one row of a table."""
    groups: dict[object, list[Data]] = {}
    for site in sites:
        key = (site["source"], site["attention"], site["kernel"], *remarks(site))
        groups.setdefault(key, []).append(site)
    return list(groups.values())


def modules(alike: Sequence[Data]) -> str:
    """The modules of a group: the only one, or the first and the last, and how many."""
    names = list(dict.fromkeys(site["module"] for site in alike))
    if len(names) == 1:
        return str(names[0])
    return f"{names[0]} … {names[-1]} ({len(names)} sites)"


def break_title(broken: Data) -> str:
    """`GB0025 Call to ...`, or the reason alone where Dynamo has no id for it."""
    return f"{broken['gb_id']} {broken['reason']}".strip()
