"""The findings that are known and put up with, in a file: only what is not there is new."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..errors import OptionError
from . import paths
from .findings import Finding

VERSION = 1


def read(path: Path) -> set[str]:
    """The keys of the findings in a baseline. Raises `OptionError` if the file is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: not a baseline: {error}") from error
    version = found.get("baseline_version") if isinstance(found, dict) else None
    if version != VERSION:
        raise OptionError(
            f"{path}: a baseline of version {version}; this fa_inductor reads {VERSION}."
        )
    entries = found.get("findings")
    if not isinstance(entries, list) or not all(
        isinstance(each, dict) and isinstance(each.get("key"), str) for each in entries
    ):
        raise OptionError(f"{path}: not a baseline: it has no list of findings with a key each.")
    return {each["key"] for each in entries}


def write(path: Path, found: Iterable[Finding], root: Path) -> None:
    """Write a baseline of these findings, sorted, so that a change of it reads well."""
    entries = [
        {
            "rule": each.rule,
            "source": paths.portable(paths.split(each.source)[0], root),
            "code": each.code,
            "where": each.where,
            "kind": each.kind,
            "key": each.key(root),
        }
        for each in found
    ]
    entries.sort(key=lambda entry: tuple(entry.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"baseline_version": VERSION, "findings": entries}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
