"""The cases of bug reports under the probe, on the reference kernel."""

from __future__ import annotations

import pytest
import torch
from probed_cases import CASES

from fa_inductor.probing.cells import Cell
from fa_inductor.probing.judging import Setting, judge

# Each in one way, and no two of a kind; on a GPU all run in all ways.
CHOSEN = {
    "ST-04 HSBD": "compiled",
    "ST-08 every second": "dynamic",
    "ST-14": "checkpoint",
    "ST-15": "compiled",
    "MK-01 additive": "checkpoint",
    "MK-09": "compiled",
    "DY-03": "dynamic",
    "HD-02 192, 128 and 64": "compiled",
}


@pytest.mark.parametrize("ids", CHOSEN)
def test_right(ids: str) -> None:
    (case,) = (each for each in CASES if each.ids == ids)
    setting = Setting(case.sizes, torch.float32, torch.device("cpu"))
    cell = Cell(case.lengths[0], CHOSEN[ids], "fwd+bwd", case.data)
    outcome = judge(case.subject("reference"), cell, setting)
    assert (outcome.verdict, outcome.detail) == ("ok", "")
