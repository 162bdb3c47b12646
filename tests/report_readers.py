"""Readers of what reports are written as: schemas, and a page's text and tables."""

from __future__ import annotations

import functools
import json
from collections import Counter
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema

import fa_inductor

# Of the npm package @microsoft/jest-sarif 1.0.0-beta.0 (MIT): the schema that OASIS published.
SARIF_SCHEMA = Path(__file__).parent / "data" / "sarif-2.1.0-rtm.5.json"


def check_report(data: Any) -> None:
    """Raise `jsonschema.ValidationError` unless this is a report."""
    _report_validator().validate(data)


def check_sarif(log: Any) -> None:
    """Raise `jsonschema.ValidationError` unless this is SARIF 2.1.0."""
    _sarif_validator().validate(log)


@functools.cache
def _report_validator() -> Any:
    text = resources.files(fa_inductor).joinpath("data/report.schema.json").read_text()
    schema = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@functools.cache
def _sarif_validator() -> Any:
    return jsonschema.Draft4Validator(json.loads(SARIF_SCHEMA.read_text()))


class Page(HTMLParser):
    """Counts elements, keeps text, rows of tables and what is asked for from elsewhere."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: Counter[str] = Counter()
        self.text, self.style = "", ""
        self.rows: list[list[str]] = []
        self.external: list[str] = []

    @classmethod
    def of(cls, html: str) -> Page:
        parser = cls()
        parser.feed(html)
        parser.close()
        assert parser.open == []
        return parser

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.external += [str(value) for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.style += data
            return
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
