"""Plans of cuDNN that outlive their process, without cuDNN: when one is read, built or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cudnn_stub import PROBLEM, Machine, backward, forward, inputs_of, install, plans

from fa_inductor import jit_monitor, object_cache
from fa_inductor.errors import JitError
from fa_inductor.jit_monitor import Stats
from fa_inductor.kernels import cudnn, cudnn_graph, cudnn_plans
from fa_inductor.problem import Problem
from fa_inductor.target import Target


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(jit_monitor, "_stats", Stats())
    return tmp_path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, root: Path) -> Machine:
    made = install(monkeypatch)
    new_process(monkeypatch)
    monkeypatch.setenv(object_cache.SWITCH, "1")
    monkeypatch.setenv(object_cache.DIRECTORY, str(root))
    be_a(monkeypatch, "sm_90a", 132)
    return made


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_devices", cudnn._Devices())
    cudnn_plans._store.cache_clear()


def be_a(monkeypatch: pytest.MonkeyPatch, arch: str, sms: int) -> None:
    target = Target(arch, sm_count=sms)
    monkeypatch.setattr(cudnn_plans, "_target", lambda device: target)
    cudnn_plans._store.cache_clear()


def counts() -> tuple[int, int]:
    """Plans built, and read."""
    return jit_monitor.stats().plan_builds, jit_monitor.stats().plan_loads


def test_a_second_process_builds_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And executes what it has read with the same pointers."""
    machine.library.graph_class.workspace = 64
    monkeypatch.setattr(cudnn_graph, "empty_on_current_gpu", lambda *of: torch.empty(of[0]))
    inputs = inputs_of()
    forward(inputs)
    backward(inputs)
    assert counts() == (2, 0)
    before = [(plan.sources, plan.workspace) for plan in plans()]
    new_process(monkeypatch)
    jit_monitor.on_jit("error")
    try:
        forward(inputs)
        backward(inputs)
    finally:
        jit_monitor.on_jit("ignore")
    assert counts() == (2, 2)
    assert [(plan.sources, plan.workspace) for plan in plans()] == before
    for plan in plans():
        ((pointers, workspace, handle, index),) = plan.graph.executed
        assert pointers[0] == inputs.q.data_ptr()
        assert workspace
        assert (handle, index) == (machine.library.handles, 0)


@pytest.mark.parametrize("what", ["scale", "stride", "dtype", "lse", "band"])
def test_another_attention_has_another_plan(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    forward(inputs_of())
    new_process(monkeypatch)
    inputs, problem = inputs_of(), PROBLEM
    if what == "scale":
        problem = Problem(0.1250001)
    elif what == "band":
        problem = Problem(0.125, "top_left")
    elif what == "stride":
        inputs = inputs._replace(q=inputs.q.contiguous())
    elif what == "dtype":
        inputs = inputs_of(dtype=torch.float16)
    forward(inputs, problem, with_lse=what != "lse")
    assert counts() == (2, 0)


@pytest.mark.parametrize(("arch", "sms", "version"), [
    ("sm_100a", 132, 91900), ("sm_90a", 114, 91900), ("sm_90a", 132, 92600),
])  # fmt: skip
def test_a_plan_of_another_gpu_or_cudnn_is_not_looked_at(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, arch: str, sms: int, version: int
) -> None:
    forward(inputs_of())
    new_process(monkeypatch)
    be_a(monkeypatch, arch, sms)
    machine.library.version = version
    forward(inputs_of())
    assert counts() == (2, 0)
    assert len(list(object_cache.stores())) == 2


def test_a_plan_that_cudnn_does_not_take_back_is_built(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward(inputs_of())
    new_process(monkeypatch)
    machine.library.graph_class.deserialize = refuse
    forward(inputs_of())
    assert counts() == (2, 0)
    assert "cuDNN does not take back the plan" in caplog.text
    assert "not today" in caplog.text
    jit_monitor.on_jit("error")
    try:
        new_process(monkeypatch)
        with pytest.raises(JitError):
            forward(inputs_of())
    finally:
        jit_monitor.on_jit("ignore")


def refuse(graph: object, handle: int, data: bytes) -> None:
    raise RuntimeError("not today")


def test_damaged_plans_are_put_aside_and_built_anew(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    forward(inputs_of())
    (file,) = root.glob("cudnn-*/forward/*.o")
    file.write_bytes(b"damaged")
    new_process(monkeypatch)
    forward(inputs_of())
    assert counts() == (2, 0)
    new_process(monkeypatch)
    forward(inputs_of())
    assert counts() == (2, 1)


def test_only_so_many_are_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setattr(cudnn_plans, "CAPACITY", 2)
    for length in (5, 6, 7):
        forward(inputs_of(sq=length))
    assert len(list(root.glob("cudnn-*/forward/*.o"))) == 2


def test_nothing_is_kept_where_the_cache_is_off(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setenv(object_cache.SWITCH, "0")
    forward(inputs_of())
    assert not list(root.iterdir())
