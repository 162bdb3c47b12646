"""The README's support matrix and pattern list, made from the support table and the families.

`python -m fa_inductor.matrix README.md` rewrites the generated parts of a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .patterns import FAMILIES
from .support import ROWS, Row

_ARCH_NAMES = {8: "sm_80", 9: "sm_90", 10: "sm_10x", 12: "sm_12x"}


def support_markdown() -> str:
    """One table row a limit: kernel, feature, GPUs, pass, what is possible, source."""
    lines = [
        "| kernel | about | GPUs | pass | what it takes | source |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        cells = (row.kernel, row.feature, _archs(row), row.passes, row.limit, row.source)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def patterns_markdown() -> str:
    """One table row a family: what is rewritten, what is left alone."""
    lines = ["| pattern | rewritten | left as written |", "|---|---|---|"]
    for family in FAMILIES:
        found = ", ".join(example.name for example in family.examples())
        left = ", ".join(example.name for example in family.counterexamples())
        lines.append(f"| {family.NAME} | {found} | {left} |")
    return "\n".join(lines)


_PARTS = {"support": support_markdown, "patterns": patterns_markdown}


def regenerate(text: str) -> str:
    """`text` with what stands between `<!-- generated: NAME -->` and `<!-- end -->` made anew."""
    for name, make in _PARTS.items():
        start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if found:
            text = before + start + make() + "\n" + end + rest.partition(end)[2]
    return text


def _archs(row: Row) -> str:
    return ", ".join(_ARCH_NAMES[family] for family in row.families) or "all"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(regenerate(path.read_text()))
