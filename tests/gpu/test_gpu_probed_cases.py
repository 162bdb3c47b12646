"""The cases of bug reports in every way in which the probe runs an attention."""

from __future__ import annotations

import pytest
import torch
from probed_cases import ALL, CASES, ProbedCase

from fa_inductor.probing.cells import WAYS, Cell
from fa_inductor.probing.judging import Setting, judge


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.ids)
def test_right_in_every_way(case: ProbedCase, kernel: str) -> None:
    """No cell is bad; what a kernel does not take is a limit of the support table, by name."""
    setting = Setting(case.sizes, torch.bfloat16, torch.device("cuda"))
    bad, ran = [], 0
    for length in case.lengths:
        for way in WAYS:
            if way == "eager" or (way == "dynamic" and length == 1):
                continue  # eager is PyTorch's own; a symbol is never 1
            cell = Cell(length, way, "fwd+bwd", case.data)
            outcome = judge(case.subject(kernel), cell, setting)
            ran += outcome.verdict == "ok"
            if outcome.is_bad:
                bad.append(f"{cell}: {outcome.verdict}: {outcome.detail}")
            if outcome.verdict == "not applicable":
                assert f"{kernel}: " in outcome.detail
    assert bad == []
    print(f"{case.ids} on {kernel}: {ran} cells ok")
