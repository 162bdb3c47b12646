"""What is tried: the cells of a probe, each one length in one way, and what can come out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OptionError, nearest

KIB = 1024
LENGTHS = (
    *(n * KIB for n in (1, 4, 8, 16, 32, 64, 128)),
    *(63488, 65535, 65536 + 64, 4096 + 64, 1088, 4097, 16385),
)
# Long enough for each fault that a CPU can show, short enough for one.
CPU_LENGTHS = (128, 192, 257, 1088)
WAYS = (
    *("eager", "compiled", "dynamic", "reduce-overhead", "max-autotune"),
    *("cuda graph", "checkpoint", "two streams"),
)
CPU_WAYS = ("eager", "compiled", "dynamic", "checkpoint")
PASSES = ("fwd", "fwd+bwd")
DATA = ("normal", "large logits", "outliers", "constant", "masked rows")
# On an H200 masks of S x S elements are as much as can be held besides; and other data are tried
# where a length has whole blocks, a part of one, and a single row more.
_LENGTHS_OF_DATA = (1024, 1088, 4097, 16384)

VERDICTS = (
    *("ok", "unlaunched", "unwritten", "NaN", "stale", "layout", "wrong", "moved", "fewer"),
    *("error", "not applicable"),
)


@dataclass(frozen=True)
class Cell:
    """length: Sq = Sk. way, passes, data: of `WAYS`, `PASSES`, `DATA`."""

    length: int
    way: str
    passes: str
    data: str = "normal"

    def __str__(self) -> str:
        return f"S={self.length} {self.way} {self.passes} {self.data}"


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    verdict: of `VERDICTS`; detail: in words, with the number that it is about.
    errors: relative error by tensor, of the sampled rows against float64.
    kernels: names of the attention kernels that ran, or of the ops on a CPU.
    launched, expected: attention kernels of one run, and the attentions in its graph; None where
        there is no graph.
    repeatable: whether two runs gave the same bits. recompiles: graphs beyond the first.
    syncs: times that the host waited for the GPU in one run.
    """

    cell: Cell
    subject: str
    verdict: str
    detail: str = ""
    errors: tuple[tuple[str, float], ...] = ()
    kernels: tuple[str, ...] = ()
    launched: int = 0
    expected: int | None = None
    repeatable: bool = True
    recompiles: int = 0
    syncs: int = 0
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        return self.verdict not in ("ok", "not applicable")


def cells(
    lengths: Sequence[int],
    ways: Sequence[str],
    passes: Sequence[str] = PASSES,
    data: Sequence[str] = ("normal",),
) -> list[Cell]:
    """The full product. Raises `OptionError` for a word that is not known."""
    for given, known in ((ways, WAYS), (passes, PASSES), (data, DATA)):
        for word in given:
            if word not in known:
                raise OptionError(f"{word!r}: expected one of {known}." + nearest(word, known))
    if any(length < 1 for length in lengths):
        raise OptionError(f"lengths {tuple(lengths)}: expected numbers from 1 on.")
    return [Cell(*each) for each in itertools.product(lengths, ways, passes, data)]


def default_cells(on_gpu: bool) -> list[Cell]:
    """The default matrix. On a GPU every length in every way with gradients, and every kind of
    data at a few lengths, compiled and not: 14 x 8 + 4 x 2 x 2 x 4 = 176 cells."""
    if not on_gpu:
        return cells(CPU_LENGTHS, CPU_WAYS)
    made = cells(LENGTHS, WAYS, ("fwd+bwd",))
    return made + cells(_LENGTHS_OF_DATA, ("eager", "compiled"), PASSES, DATA[1:])
