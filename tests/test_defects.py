"""Versions that are known to be wrong: told once, where PyTorch may still call them."""

from __future__ import annotations

import logging
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fa_inductor import compile_pass
from fa_inductor.support import ROWS, defects
from fa_inductor.support_row import Defect
from fa_inductor.target import Target

HOPPER = Target.of_name("sm_90a")


def with_cudnn(version: str, target: Target = HOPPER) -> Target:
    return replace(target, libraries={**target.libraries, "cudnn": version})


@pytest.mark.parametrize(
    ("version", "sources"),
    [
        ("9.14.0", ["cuDNN release notes: wrong", "illegal memory access", "196678"]),
        ("9.19.0", ["196678"]),
        ("9.25.0", ["196678", "1072"]),
        ("9.26.1", ["1072"]),
        ("9.30.0", []),
        ("", []),
    ],
)
def test_by_version(version: str, sources: list[str]) -> None:
    lines = [line for line in defects(with_cudnn(version)) if line.startswith("cudnn")]
    assert len(lines) == len(sources)
    for line, source in zip(lines, sources, strict=True):
        assert line.startswith(f"cudnn {version} on sm_90a: ")
        assert source in line


def test_by_architecture() -> None:
    blackwell = with_cudnn("9.19.0", Target.of_name("sm_100a"))
    assert any("193893" in line for line in defects(blackwell))
    assert not any("196678" in line for line in defects(blackwell))


def test_a_defect_is_also_a_limit() -> None:
    """Whatever is warned of is refused by its own row: it names a version of a known library."""
    for row in ROWS:
        if row.defect is not None:
            assert row.defect.library in HOPPER.libraries
            assert row.kernel in ("fa4", "cudnn")
    assert sum(row.defect is not None for row in ROWS) == 6


def test_ends_are_part_of_it() -> None:
    defect = Defect("cudnn", "9.14.0", "9.15.0")
    found = [defect.is_in(with_cudnn(v)) for v in ("9.13.9", "9.14.0", "9.15.0", "9.15.1")]
    assert found == [False, True, True, False]


def test_told_once(caplog: pytest.LogCaptureFixture) -> None:
    compile_pass._warn_of_defects.cache_clear()
    with (
        mock.patch.object(Target, "of_device", return_value=with_cudnn("9.19.0")),
        caplog.at_level(logging.WARNING, "fa_inductor"),
    ):
        for _ in range(2):
            compile_pass._warn_of_defects(torch.device("cpu"))
    lines = [each.getMessage() for each in caplog.records if "196678" in each.getMessage()]
    assert len(lines) == 1
    assert "known to be wrong: cudnn 9.19.0 on sm_90a" in lines[0]
    compile_pass._warn_of_defects.cache_clear()
