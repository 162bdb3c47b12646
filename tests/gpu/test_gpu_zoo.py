"""Every model of the zoo on a GPU, as `benchmarks/models.py --run` runs it."""

from __future__ import annotations

import contextlib

import pytest

from poison import poisoned
from zoo import ENTRIES, Entry
from zoo.judging import compile_default, judge
from zoo.planning import row_of


def _poisoned() -> contextlib.AbstractContextManager[None]:
    # Without PyTorch's deterministic mode, which would ask other kernels of the pass.
    return poisoned(deterministic_fill=False)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_model_is_right(entry: Entry) -> None:
    if entry.missing:
        pytest.skip(entry.missing)
    judged = judge(entry, compile_default, _poisoned)
    print(*row_of(entry, judged.report).cells, f"{judged.error:.1e} {judged.eager_error:.1e}")
    assert judged.right, judged
    assert len(judged.report.sites) == entry.sites
