"""The probe: known faults are found and named, and what is right is found to be right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fa_inductor
from fa_inductor import call_cache
from fa_inductor.errors import OptionError, ProbeError
from fa_inductor.probing import controls, fa4_control
from fa_inductor.probing.cells import DATA, LENGTHS, WAYS, Cell, default_cells
from fa_inductor.probing.data import Sizes, draw
from fa_inductor.probing.judging import Setting, judge
from fa_inductor.probing.launches import Graphs, watched_backend
from fa_inductor.probing.oracle import Attention, sample
from fa_inductor.probing.probe import run_cells
from fa_inductor.probing.results import ProbeResult
from fa_inductor.probing.subjects import Subject, kernel_subject
from helpers import oracle

SETTING = Setting(Sizes(1, 4, 2, 16), torch.float32, torch.device("cpu"))
CONTROLS = controls.controls()


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_known_fault_is_found_and_named(control: controls.Control) -> None:
    """At the shortest length at which it can show; without its fault the cell is right."""
    faulty = judge(control.subject(True), control.cell, SETTING)
    assert (faulty.verdict, faulty.is_bad) == (control.verdict, True)
    repaired = judge(control.subject(False), control.cell, SETTING)
    assert (repaired.verdict, repaired.detail) == ("ok", "")


@pytest.mark.skipif(not fa4_control.is_installed(), reason="needs FlashAttention-4")
def test_flash_attention_said_to_be_fake_launches_nothing() -> None:
    """It traces on a CPU as well: all that asks for a GPU is behind the question that is answered
    wrongly."""
    setting = Setting(Sizes(1, 4, 2, 64), torch.bfloat16, torch.device("cpu"))
    outcome = judge(fa4_control.fa4_subject(True), Cell(1024, "compiled", "fwd"), setting)
    assert outcome.verdict == "unlaunched"
    assert "empty" in outcome.detail


def test_the_half_block_fault_shows_nowhere_else() -> None:
    control = CONTROLS[-1]
    assert judge(control.subject(True), Cell(1024, *_ways(control)), SETTING).verdict == "ok"


def _ways(control: controls.Control) -> tuple[str, str]:
    return control.cell.way, control.cell.passes


@pytest.mark.parametrize("way", ["eager", "compiled", "dynamic", "checkpoint"])
def test_our_op_is_right(way: str) -> None:
    result = run_cells(kernel_subject("reference"), [Cell(129, way, "fwd+bwd")], SETTING)
    (outcome,) = result.outcomes
    assert outcome.verdict == "ok", outcome.detail
    assert [name for name, _ in outcome.errors] == ["out", "dq", "dk", "dv"]
    assert outcome.launched >= 1
    assert (outcome.expected, outcome.recompiles) == (None if way == "eager" else 1, 0)


@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data(kind: str) -> None:
    outcome = judge(kernel_subject("reference"), Cell(65, "compiled", "fwd+bwd", kind), SETTING)
    assert outcome.verdict == "ok", outcome.detail


def test_a_cell_is_what_the_first_call_of_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(call_cache, "forget", lambda: forgotten.append(True))
    judge(kernel_subject("reference"), Cell(64, "compiled", "fwd"), SETTING)
    assert forgotten == [True]


def test_nothing_runs_but_what_is_compiled() -> None:
    """The graph as it was written would make masks of S x S elements that compiled code never
    holds: its ops are held against their fakes in the first run itself."""
    calls: list[bool] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(True)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    op = torch.library.custom_op("fa_inductor_tests::counted", attend, mutates_args=())
    op.register_fake(lambda q, k, v: q.new_empty((q.shape[2], *q.shape[:2], q.shape[3])))
    graphs = Graphs()
    compiled = torch.compile(op, backend=watched_backend("aot_eager", {}, graphs))
    compiled(*draw("normal", 64, SETTING.sizes, SETTING.device, SETTING.dtype, 1).tensors)
    assert len(calls) == 1
    assert graphs.faults == [
        "fa_inductor_tests::counted: shape promised torch.Size([64, 1, 4, 16]), real "
        "torch.Size([1, 4, 64, 16])"
    ]


def test_processes_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same outcomes in the same order, of right cells and of wrong ones."""
    heard: list[Cell] = []
    chosen: dict[str, Any] = {"lengths": [64, 96], "ways": ["compiled"], "passes": ["fwd"]}
    result = fa_inductor.probe(
        broken, backend="inductor", jobs=2, progress=lambda each: heard.append(each.cell), **chosen
    )
    assert [(each.cell.length, each.verdict) for each in result.outcomes] == [
        (64, "wrong"),
        (96, "wrong"),
    ]
    assert {cell.length for cell in heard} == {64, 96}
    assert result.subject.source == "from test_probe import broken as fn"
    with pytest.raises(OptionError, match="cannot import"):
        fa_inductor.probe(lambda q, k, v: q, jobs=2, **chosen)
    with pytest.raises(OptionError, match="jobs=0"):
        fa_inductor.probe(broken, jobs=0, **chosen)


def test_a_process_that_dies_is_an_error() -> None:
    result = fa_inductor.probe(dying, lengths=[64], ways=["eager"], passes=["fwd"], jobs=2)
    assert [outcome.verdict for outcome in result.outcomes] == ["error"]
    assert "a process died" in result.outcomes[0].detail


def test_what_runs_out_of_memory_runs_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHERS", str(tmp_path))
    result = fa_inductor.probe(crowded, lengths=[64, 96], ways=["eager"], passes=["fwd"], jobs=2)
    assert [outcome.verdict for outcome in result.outcomes] == ["ok", "ok"]
    assert len(list(tmp_path.iterdir())) == 2


def crowded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Out of memory at the first call with a length."""
    ran = Path(os.environ["OTHERS"]) / str(q.shape[2])
    if not ran.exists():
        ran.touch()
        raise torch.OutOfMemoryError("no room")
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dying(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    os._exit(3)


def test_a_wrong_number_is_wrong() -> None:
    """Off by one key, which only a few rows show."""

    def off_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(1)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    result = fa_inductor.probe(
        off_by_one, lengths=[64], ways=["compiled"], passes=["fwd"], backend="inductor"
    )
    assert [outcome.verdict for outcome in result.bad] == ["wrong"]
    with pytest.raises(ProbeError, match="out is wrong by"):
        result.assert_right()


def test_attention_by_hand_is_no_missing_launch() -> None:
    """Products and a softmax are right too, where nobody promised a kernel."""
    result = fa_inductor.probe(
        by_hand, lengths=[64], ways=["compiled"], passes=["fwd"], backend="inductor"
    )
    assert [(each.verdict, each.launched) for each in result.outcomes] == [("ok", 0)]


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    place = torch.arange(q.shape[2], device=q.device)
    scores = torch.where(place <= place[:, None], q @ k.mT * q.shape[3] ** -0.5, -torch.inf)
    return scores.softmax(-1) @ v


def test_a_probe_that_tries_nothing_is_not_right() -> None:
    """A kernel that cannot run here: every cell is left out, and that is said."""
    result = fa_inductor.probe("fa4", lengths=[64], ways=["compiled"], passes=["fwd"])
    assert [outcome.verdict for outcome in result.outcomes] == ["not applicable"]
    assert not result.is_right
    with pytest.raises(ProbeError, match="fa4"):
        result.assert_right()


def test_the_oracle_is_attention() -> None:
    """Against attention with all scores at once, outputs and gradients."""
    drawn = draw("normal", 70, SETTING.sizes, SETTING.device, torch.float32, 0)
    found = sample(Attention(0.3, True), drawn.tensors, drawn.grad_out)
    leaves = [tensor.double().requires_grad_() for tensor in drawn.tensors]
    out = oracle(*leaves, causal="top_left", scale=0.3)
    grads = torch.autograd.grad(out, leaves, drawn.grad_out.double())
    for _, ours, theirs in found.pairs([out.detach(), *grads]):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_the_default_matrix() -> None:
    on_gpu = default_cells(True)
    assert len(set(on_gpu)) == len(on_gpu) >= 150
    assert {cell.way for cell in on_gpu} == set(WAYS)
    assert {cell.data for cell in on_gpu} == set(DATA)
    assert any(length % 128 == 64 for length in LENGTHS)
    assert any(length % 32 == 1 for length in LENGTHS)


def test_unknown_words() -> None:
    for words in ({"ways": ["compild"]}, {"lengths": [0]}, {"data": ["normals"]}):
        with pytest.raises(OptionError):
            fa_inductor.probe("reference", **words)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="reference"):
        fa_inductor.probe("referense")


def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Not causal, though it is said to be."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_what_is_written_down(tmp_path: Path) -> None:
    """JSON, and a script for each bad cell that fails by itself."""
    subject = Subject("broken", broken, "inductor", source="from test_probe import broken as fn")
    result = run_cells(subject, [Cell(64, "eager", "fwd")], SETTING)
    assert json.loads(result.dumps())["outcomes"][0]["verdict"] == "wrong"
    (script,) = result.write_repros(tmp_path)
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": f"{here.parent}:{here}", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "verdict='wrong'" in done.stdout
    _check_picture(result, tmp_path / "cells.png")


def _check_picture(result: ProbeResult, file: Path) -> None:
    result.write_picture(file)
    assert file.read_bytes().startswith(b"\x89PNG")
