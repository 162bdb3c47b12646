"""What a probe found: as a table, as JSON, as a picture, and each fault as a script."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cells import VERDICTS, Outcome
from .judging import Setting
from .subjects import Subject

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ProbeResult:
    """The outcomes of one subject, and what it was tried on."""

    subject: Subject
    setting: Setting
    machine: str
    outcomes: Sequence[Outcome]

    @property
    def bad(self) -> list[Outcome]:
        """The cells that are neither right nor left out."""
        return [outcome for outcome in self.outcomes if outcome.is_bad]

    @property
    def is_right(self) -> bool:
        """Whether cells were tried, and none is bad."""
        return not self.bad and any(outcome.verdict == "ok" for outcome in self.outcomes)

    def summary(self) -> str:
        """`fa4 on NVIDIA H200: 176 cells, 176 ok`"""
        counts = Counter(outcome.verdict for outcome in self.outcomes)
        parts = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
        cells = f"{len(self.outcomes)} cells, " + ", ".join(parts)
        return f"{self.subject.name} on {self.machine}: {cells}"

    def assert_right(self) -> None:
        """Raise `ProbeError`, listing every bad cell, if there is one, or if none was tried."""
        from ..errors import ProbeError

        if not self.is_right:
            shown = self.bad or self.outcomes[:1]
            lines = [f"  {each.cell}: {each.verdict}: {each.detail}" for each in shown]
            raise ProbeError(f"{self.summary()}\n" + "\n".join(lines))

    def to_json(self) -> dict[str, Any]:
        """JSON-ready data, `schema_version` 1."""
        sizes = dataclasses.asdict(self.setting.sizes)
        return {
            "schema_version": SCHEMA_VERSION,
            "subject": self.subject.name,
            "machine": self.machine,
            "dtype": str(self.setting.dtype).removeprefix("torch."),
            "sizes": sizes,
            "summary": self.summary(),
            "outcomes": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }

    def dumps(self) -> str:
        """`to_json` as text."""
        return json.dumps(self.to_json(), indent=1)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        lengths, ways = self._axes()
        table = Table(title=self.summary(), title_justify="left")
        table.add_column("S", justify="right")
        for way in ways:
            table.add_column(way)
        for length in lengths:
            table.add_row(str(length), *(_text(self._at(length, way)) for way in ways))
        shown = self.bad if self.bad or self.is_right else self.outcomes[:1]
        lines = [Text(f"{each.cell}: {each.verdict}: {each.detail}") for each in shown]
        return Group(table, *lines)

    def _axes(self) -> tuple[list[int], list[str]]:
        lengths = sorted({outcome.cell.length for outcome in self.outcomes})
        return lengths, list(dict.fromkeys(outcome.cell.way for outcome in self.outcomes))

    def _at(self, length: int, way: str) -> list[Outcome]:
        """Of all passes and kinds of data, those that apply."""
        here = [o for o in self.outcomes if (o.cell.length, o.cell.way) == (length, way)]
        return [outcome for outcome in here if outcome.verdict != "not applicable"]

    def write_picture(self, file: Path) -> None:
        """A heat map as PNG: length by way, green for right. Needs matplotlib."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        lengths, ways = self._axes()
        levels = [[_level(self._at(length, way)) for way in ways] for length in lengths]
        size = (3 + 0.7 * len(ways), 1.8 + 0.32 * len(lengths))
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        colours = matplotlib.colors.ListedColormap(["#e8e8e8", "#4c9f70", "#c0392b"])
        axes.imshow(levels, cmap=colours, vmin=0, vmax=2, aspect="auto")
        axes.set_xticks(range(len(ways)), ways, rotation=40, ha="right")
        axes.set_yticks(range(len(lengths)), list(map(str, lengths)))
        axes.set_ylabel("S")
        axes.set_title(self.summary(), fontsize=9)
        for y, length in enumerate(lengths):
            for x, way in enumerate(ways):
                axes.text(x, y, _text(self._at(length, way)), ha="center", va="center", fontsize=6)
        figure.savefig(file, dpi=130)
        pyplot.close(figure)

    def write_repros(self, folder: Path) -> list[Path]:
        """One stand-alone script for each bad cell; none where the function is not importable."""
        folder.mkdir(parents=True, exist_ok=True)
        return list(self._repros(folder))

    def _repros(self, folder: Path) -> Iterator[Path]:
        for number, outcome in enumerate(self.bad):
            if self.subject.source is not None:
                file = folder / f"{number:03}_{outcome.verdict.replace(' ', '_')}.py"
                file.write_text(repro(self.subject, self.setting, outcome))
                yield file


def repro(subject: Subject, setting: Setting, outcome: Outcome) -> str:
    """A script that runs one cell again, prints what comes of it, and fails if it is bad."""
    dtype = str(setting.dtype)
    return f'''"""{outcome.cell}: {outcome.verdict}: {outcome.detail.splitlines()[0]}"""

import torch

from fa_inductor.probing.cells import Cell
from fa_inductor.probing.data import Sizes
from fa_inductor.probing.judging import Setting, judge
from fa_inductor.probing.subjects import Subject
{subject.source}

subject = Subject(
    {subject.name!r},
    fn,
    {subject.backend!r},
    {dict(subject.options)!r},
    causal={subject.causal},
    scale={subject.scale},
    takes_kept={subject.takes_kept},
)
cell = {outcome.cell!r}
setting = Setting({setting.sizes!r}, {dtype}, torch.device({str(setting.device)!r}))
outcome = judge(subject, cell, setting)
print(outcome)
raise SystemExit(outcome.is_bad)
'''


def _text(outcomes: Sequence[Outcome]) -> str:
    """`12 ok`, or what is wrong with the worst of them."""
    if not outcomes:
        return "·"
    bad = [outcome for outcome in outcomes if outcome.is_bad]
    if not bad:
        return f"{len(outcomes)} ok" if len(outcomes) > 1 else "ok"
    wrong = [error for each in bad for _, error in each.errors if each.verdict == "wrong"]
    verdicts = dict.fromkeys(each.verdict for each in bad)
    return ", ".join(f"wrong by {max(wrong):.0e}" if v == "wrong" else v for v in verdicts)


def _level(outcomes: Sequence[Outcome]) -> int:
    if not outcomes:
        return 0
    return 2 if any(outcome.is_bad for outcome in outcomes) else 1
