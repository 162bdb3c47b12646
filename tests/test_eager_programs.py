"""Hundreds of random attention programs: the pass never makes another number of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from attention_programs import attention_program

from fa_inductor.config import Config
from fa_inductor.masks import spaces, terms
from fa_inductor.rewrite import rewrite
from poison import poisoned

PROGRAMS, CHUNKS = 500, 2


def disagreements(seeds: Iterable[int]) -> tuple[list[int], Counter[str]]:
    wrong, kinds = [], Counter[str]()
    for seed in seeds:
        made = attention_program(seed)
        (site,) = rewrite(made.module, Config(kernels=("reference",)))
        kinds["band" if site.spec and site.spec.proven else site.kernel or "left"] += 1
        with poisoned():
            out = made.module(**made.inputs)
        if not torch.allclose(out.nan_to_num(0.0), made.expected, rtol=1e-4, atol=1e-5):
            wrong.append(seed)
    return wrong, kinds


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs(chunk: int) -> None:
    wrong, kinds = disagreements(range(chunk, PROGRAMS, CHUNKS))
    assert wrong == []
    # Enough of each, that the test means something.
    assert kinds["band"] > 15
    assert kinds["reference"] > 100


def test_an_error_by_one_in_the_band_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails if a bound is off by one."""
    right = spaces.band_side

    def off_by_one(expr: terms.Expr) -> tuple[str, object] | None:
        side = right(expr)
        return None if side is None else (side[0], side[1] + 1)

    monkeypatch.setattr(terms, "band_side", off_by_one)
    wrong, _ = disagreements(range(100))
    assert len(wrong) > 5
