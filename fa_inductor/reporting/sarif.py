"""A report as SARIF 2.1.0, which code scanning shows at the user's lines.

Source: OASIS Standard "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import paths
from .data import Data
from .findings import Finding, findings
from .rules import BY_ID, RULES

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
ROOT, PACKAGES = "SRCROOT", "PACKAGES"


def sarif(data: Data, root: Path, known: Iterable[str] | None = None) -> str:
    """A report as a SARIF log; paths inside `root` are relative to it.

    known: the keys of a baseline's findings; each result then says whether it is new.
    """
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    old = None if known is None else set(known)
    for each in findings(data, root):
        # Layers of a model that are alike are one result: code scanning shows each on its line.
        is_old = None if old is None else each.key(root) in old
        place = (each.rule, each.source, each.users_place(root), each.message, is_old)
        groups.setdefault(place, []).append(each)
    run = {
        "tool": {"driver": _driver()},
        "originalUriBaseIds": {
            ROOT: {"description": {"text": "The root of the checkout."}},
            PACKAGES: {"description": {"text": "Where packages are installed."}},
        },
        "columnKind": "unicodeCodePoints",
        "results": [_result(alike, root, place[-1]) for place, alike in groups.items()],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _driver() -> dict[str, Any]:
    rules = [
        {
            "id": rule.id,
            "name": rule.name,
            "shortDescription": {"text": rule.short},
            "fullDescription": {"text": rule.help},
            "help": {"text": rule.help, "markdown": rule.help},
            "defaultConfiguration": {"level": rule.level},
        }
        for rule in RULES
    ]
    driver: dict[str, Any] = {"name": "fa-inductor", "rules": rules}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a bare checkout
        driver["version"] = importlib.metadata.version("fa-inductor")
    return driver


def _result(alike: list[Finding], root: Path, is_old: bool | None) -> dict[str, Any]:
    first = alike[0]
    names = [each.where for each in alike if each.where]
    message = first.message
    if first.rule in ("fallback", "copy") and names:
        message += f" (in {', '.join(names)})"
    source = first.users_place(root)
    if source != first.source:
        message += f" (at {paths.shown(first.source, root)})"
    result = {
        "ruleId": first.rule,
        "ruleIndex": list(BY_ID).index(first.rule),
        "level": BY_ID[first.rule].level,
        "message": {"text": message},
        "locations": [_location(source, root, first.code if source == first.source else "")],
        "partialFingerprints": {"faInductor/v1": first.key(root)},
    }
    if first.stack:
        frames = [
            {"location": {**_location(place, root), "message": {"text": function}}}
            for place, function in reversed(first.stack)  # SARIF has the innermost first
        ]
        result["stacks"] = [{"message": {"text": "The user's stack."}, "frames": frames}]
    if is_old is not None:
        result["baselineState"] = "unchanged" if is_old else "new"
    return result


def _location(source: str, root: Path, code: str = "") -> dict[str, Any]:
    path, line = paths.split(source)
    relative, package = paths.inside(path, root), paths.installed(path)
    if relative is not None:
        artifact = {"uri": quote(relative), "uriBaseId": ROOT}
    elif package is not None:
        artifact = {"uri": quote(package), "uriBaseId": PACKAGES}
    elif Path(path).is_absolute():
        artifact = {"uri": Path(path).as_uri()}
    else:
        artifact = {"uri": quote(path)}
    region: dict[str, Any] = {"startLine": max(line, 1)}
    if code:
        region["snippet"] = {"text": code}
    return {"physicalLocation": {"artifactLocation": artifact, "region": region}}
