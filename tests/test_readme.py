"""The README's generated parts are the support table and the pattern families as they are."""

from __future__ import annotations

from pathlib import Path

from fa_inductor import matrix
from fa_inductor.support import ROWS

README = Path(__file__).parents[1] / "README.md"


def test_generated_parts_are_up_to_date() -> None:
    text = README.read_text()
    assert matrix.regenerate(text) == text, "run: python -m fa_inductor.matrix README.md"


def test_every_row_is_in_the_readme() -> None:
    text = README.read_text()
    for row in ROWS:
        assert row.source in text
