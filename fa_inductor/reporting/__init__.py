"""A report for those who read it: people, CI jobs, code scanning, test reports.

All is made of `Report.to_json`, so that what was written yesterday or by another process renders
the same. `data/report.schema.json` is its schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError, nearest

FORMATS = ("rich", "json", "markdown", "sarif", "html")


def render(data: Mapping[str, Any], form: str, root: Path | None = None) -> str:
    """A report, as `Report.to_json` gives it, as text.

    form: one of `FORMATS`. root: the folder that paths are shown relative to, the current one if
        left out. Raises `OptionError` for another form.
    """
    root = Path.cwd() if root is None else root
    if form == "rich":
        from .table import plain

        return plain(data, root)
    if form == "json":
        import json

        return json.dumps(data, indent=2) + "\n"
    if form == "markdown":
        from .markdown import markdown

        return markdown(data, root)
    if form == "sarif":
        from .sarif import sarif

        return sarif(data, root)
    if form == "html":
        from .page import page

        return page(data, root)
    raise OptionError(
        f"Unknown format {form!r}; a report renders as {', '.join(FORMATS)}."
        + nearest(form, FORMATS)
    )
