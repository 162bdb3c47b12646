"""The report in the trace that `TORCH_TRACE` asks for, as tlparse shows it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from report_readers import check_report
from torch import Tensor
from torch._logging import _internal

from fa_inductor.explaining import planning_backend

TLPARSE = Path(sys.executable).with_name("tlparse")
OPTIONS = {"fa.kernels": ("reference",), "fa.on_fallback": "ignore"}


def _attend(x: Tensor, mask: Tensor) -> Tensor:
    x = F.scaled_dot_product_attention(x, x, x)
    torch._dynamo.graph_break()
    return F.scaled_dot_product_attention(x, x, x, mask)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, by the handler that PyTorch adds at its import where `TORCH_TRACE` is set."""
    folder = tmp_path_factory.mktemp("trace")
    handler = _internal.LazyTraceHandler(str(folder))
    handler.setFormatter(_internal.TorchLogsFormatter(trace=True))
    level = _internal.trace_log.level
    _internal.trace_log.addHandler(handler)
    _internal.trace_log.setLevel(logging.DEBUG)
    try:
        torch._dynamo.reset()
        compiled = torch.compile(_attend, backend=planning_backend(OPTIONS, None))
        compiled(torch.randn(1, 2, 4, 8).bfloat16(), torch.zeros(4, 4))
    finally:
        _internal.trace_log.setLevel(level)
        _internal.trace_log.removeHandler(handler)
        handler.close()
    (found,) = folder.glob("*.log")
    return found


def _artifacts(log: Path) -> list[tuple[dict[str, Any], Any]]:
    """What each `fa_inductor_report` line is about, and its payload: the lines behind, indented."""
    lines = log.read_text().splitlines()
    found = []
    for number, line in enumerate(lines):
        _, _, text = line.partition("] ")
        if '"fa_inductor_report"' not in text:
            continue
        payload = []
        for following in lines[number + 1 :]:
            if not following.startswith("\t"):
                break
            payload.append(following)
        found.append((json.loads(text), json.loads("".join(payload))))
    return found


def test_each_graph_has_its_report(log: Path) -> None:
    """... beside Dynamo's own lines on that graph."""
    (first, before), (second, behind) = _artifacts(log)
    for report in (before, behind):
        check_report(report)
    assert [site["kernel"] for site in before["sites"]] == ["reference"]
    assert [each["gb_id"] for each in before["graph_breaks"]] == ["GB0025"]
    assert [site["kernel"] for site in behind["sites"]] == [None]
    for metadata, report in ((first, before), (second, behind)):
        assert metadata["artifact"]["encoding"] == "json"
        compiled = f"{metadata['frame_id']}/{metadata['frame_compile_id']}"
        assert [graph["compile_id"] for graph in report["graphs"]] == [compiled]
    assert first["frame_id"] != second["frame_id"]


def test_tlparse_shows_it(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    subprocess.run([TLPARSE, str(log), "-o", str(out), "--no-browser"], check=True)
    files = list(out.rglob("fa_inductor_report*.json"))
    assert len(files) == 2
    assert "fa_inductor_report" in (out / "index.html").read_text()
    kernels = {json.loads(file.read_text())["sites"][0]["kernel"] for file in files}
    assert kernels == {"reference", None}
