"""Plans of cuDNN without cuDNN: when one is built, found, dropped, bound, executed or refused."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention_inputs import lengths, rng
from cudnn_stub import (
    BF16,
    PROBLEM,
    Machine,
    StubLibrary,
    backward,
    described,
    forward,
    inputs_of,
    install,
    plans,
)
from torch import Tensor

from fa_inductor.errors import (
    AdapterError,
    CaptureError,
    DerivativeError,
    DeviceError,
    DtypeError,
    MissingLibraryError,
    PlanError,
    ShapeError,
)
from fa_inductor.kernels import cudnn, cudnn_graph
from fa_inductor.kernels.cudnn_graph import build
from fa_inductor.problem import Inputs, Problem

LIBRARY = cudnn_graph.library


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


# --- What a plan is kept for ----------------------------------------------------------------------


def test_everything_that_a_plan_depends_on_is_in_its_description(machine: Machine) -> None:
    """Dtype, sizes, strides, tensors, numbers, GPU and the version of cuDNN."""
    inputs = inputs_of()
    q, k, v = inputs[:3]
    everything = [
        described(inputs),
        described(inputs, kind="backward"),
        described(inputs, device=1),
        described(inputs, Problem(0.25)),
        described(inputs, Problem(0.125, "top_left")),
        described(inputs, Problem(0.125, "bottom_right")),
        described(inputs, Problem(0.125, "none", 3)),
        described(inputs, Problem(0.125, "none", None, 3)),
        described(inputs, Problem(0.125, dropout_p=0.5)),
        described(inputs, Problem(0.125, dropout_p=0.25)),
        described(inputs, Problem(0.125, deterministic=True), "backward"),
        described(inputs_of(dtype=torch.float16)),
        described(inputs_of(sk=7)),
        described(Inputs(q.contiguous(), k, v)),
        described(Inputs(q, k[:, :1].expand_as(k), v)),
        described(inputs_of(bias=torch.zeros(1, 1, 5, 6, dtype=BF16))),
        described(inputs_of(bias=torch.zeros(1, 1, 1, 6, dtype=BF16))),
        described(inputs_of(bias=torch.zeros(1, 1, 5, 6))),
        described(inputs_of(sink=torch.zeros(4))),
        described(inputs_of(seqlens_q=lengths(1, 2), seqlens_k=lengths(1, 2))),
    ]
    machine.library.version = 92600
    everything.append(described(inputs))
    assert len(set(everything)) == len(everything)


def test_what_a_plan_does_not_depend_on_is_not(machine: Machine) -> None:
    """Strides of dimensions of size 1, determinism of a forward, either alignment of a square."""
    packed = torch.zeros(1, 4, 5, 8, dtype=BF16)
    odd = packed.as_strided(packed.shape, (7, 40, 8, 1))
    assert odd.stride() != packed.stride()
    one = described(Inputs(packed, packed, packed))
    assert described(Inputs(odd, odd, odd)) == one
    assert described(Inputs(packed, packed, packed), Problem(0.125, deterministic=True)) == one
    square = inputs_of(sk=5)
    alignments = [Problem(0.125, causal) for causal in ("top_left", "bottom_right")]
    assert described(square, alignments[0]) == described(square, alignments[1])


def test_a_second_call_finds_the_plan(machine: Machine) -> None:
    """Other tensors that lie the same way are the same class; statistics count both."""
    for _ in range(2):
        forward(inputs_of())
        backward(inputs_of())
    assert len(machine.library.graphs) == 2
    assert cudnn.statistics == cudnn.Statistics(built=2, found=2)
    assert [len(graph.executed) for graph in machine.library.graphs] == [2, 2]


def test_the_least_recently_used_plan_is_dropped(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "CAPACITY", 3)

    def built(length: int) -> bool:
        before = cudnn.statistics.built
        forward(inputs_of(sk=length))
        return cudnn.statistics.built > before

    assert [built(length) for length in (1, 2, 3, 1, 4)] == [True, True, True, False, True]
    assert [plan.description["k"].size[2] for plan in plans()] == [3, 1, 4]
    assert [built(length) for length in (1, 2)] == [False, True]
    assert [plan.description["k"].size[2] for plan in plans()] == [4, 1, 2]


# --- Threads, devices, streams --------------------------------------------------------------------


def test_each_thread_and_device_has_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's handles are not thread-safe, and a plan belongs to a GPU."""

    def run_on(device: int) -> None:
        monkeypatch.setattr(Tensor, "get_device", lambda tensor: device)
        forward(inputs_of())

    run_on(0)
    run_on(1)
    run_on(0)
    other = threading.Thread(target=run_on, args=(0,))
    other.start()
    other.join()
    assert [graph.options["handle"] for graph in machine.library.graphs] == [1, 2, 3]
    executed = [[run[2] for run in graph.executed] for graph in machine.library.graphs]
    assert executed == [[1, 1], [2], [3]]
    assert sorted(cudnn._devices.by_index) == [0, 1]


def test_the_stream_is_set_when_it_has_changed(machine: Machine) -> None:
    """Before building and before each execution, and never for nothing."""
    _, _, repeat = forward(inputs_of())
    assert machine.library.streams == [(1, 7)]
    forward(inputs_of())
    machine.stream = 9
    _, _, repeat = forward(inputs_of())
    assert machine.library.streams == [(1, 7), (1, 9)]
    machine.stream = 7
    inputs = inputs_of()
    repeat((*inputs, torch.zeros_like(inputs.q), torch.zeros(2, 4, 5)))
    assert machine.library.streams == [(1, 7), (1, 9), (1, 7)]


def test_no_plan_is_built_while_a_graph_is_captured(machine: Machine) -> None:
    """One that is there is executed."""
    forward(inputs_of())
    machine.capturing = True
    forward(inputs_of())
    with pytest.raises(CaptureError, match=r"no plan yet for this attention forward.*run it once"):
        forward(inputs_of(sk=7))
    with pytest.raises(CaptureError, match="attention backward"):
        backward(inputs_of())


# --- Executing ------------------------------------------------------------------------------------


def test_pointers_are_handed_over_in_the_order_of_the_uids(machine: Machine) -> None:
    """Each tensor's own; the dropout's offset lies behind its seed."""
    inputs = inputs_of(rng=rng(3, 5), bias=torch.zeros(2, 1, 5, 6, dtype=BF16))
    out, lse, repeat = forward(inputs, Problem(0.125, dropout_p=0.5))
    (plan,) = plans()
    assert inputs.rng is not None
    named = {**inputs._asdict(), "out": out, "lse": lse, "seed": inputs.rng}
    ((pointers, workspace, _, index),) = plan.graph.executed
    wanted = {
        operand.name: inputs.rng.data_ptr() + 8
        if operand.name == "offset"
        else named[operand.name].data_ptr()
        for operand in plan.description.operands
    }
    assert pointers == [*wanted.values()]
    assert (workspace, index) == (0, 0)
    others = (*inputs_of(rng=rng(1), bias=inputs.bias), out.clone(), lse.clone())
    repeat(others)
    again = plan.graph.executed[-1][0]
    assert again[0] == others[0].data_ptr()
    assert set(again).isdisjoint(p for name, p in wanted.items() if name != "bias")


def test_the_workspace_is_torch_s_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocated for each execution, so that graphs captured by PyTorch keep it."""
    made: list[Tensor] = []

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(torch.empty_strided(size, stride, dtype=dtype))
        return made[-1]

    machine.library.graph_class.workspace = 4096
    monkeypatch.setattr(cudnn_graph, "empty_on_current_gpu", empty)
    forward(inputs_of())
    forward(inputs_of())
    assert [(each.numel(), each.dtype) for each in made] == [(4096, torch.uint8)] * 2
    (graph,) = machine.library.graphs
    assert [run[1] for run in graph.executed] == [each.data_ptr() for each in made]


CHANGES: dict[str, tuple[str, Callable[[Tensor], Tensor | None], str]] = {
    "stride": ("k", lambda k: k.contiguous(), r"declares k as \(2, 4, 6, 8\) with strides \("),
    "dtype": ("v", lambda v: v.half(), r"declares v .* torch.bfloat16, .* torch.float16: it is"),
    "missing": ("bias", lambda bias: None, "needs bias, which is not given"),
    "bias": ("bias", lambda bias: bias.mT.contiguous().mT, "declares bias as"),
}


@pytest.mark.parametrize(("name", "change", "words"), CHANGES.values(), ids=CHANGES.keys())
def test_a_plan_is_not_executed_on_tensors_it_was_not_declared_for(
    name: str,
    change: Callable[[Tensor], Tensor | None],
    words: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN itself would read them wrongly, and say nothing: also if our own key were wrong."""
    inputs = inputs_of(bias=torch.zeros(2, 1, 5, 6, dtype=BF16))
    out, lse, _ = forward(inputs)
    (plan,) = plans()
    tensors = dict(zip(cudnn._FORWARD, (*inputs, out, lse), strict=True))
    plan.bind([*tensors.values()])
    changed = {**tensors, name: change(tensors[name])}
    with pytest.raises(PlanError, match=words):
        plan.bind([*changed.values()])
    if changed[name] is None:
        return
    (device,) = cudnn._devices.by_index.values()
    monkeypatch.setattr(device, "plan", lambda description: plan)
    with pytest.raises(PlanError, match=words):
        forward(inputs._replace(**{name: changed[name]}))
    assert len(plan.graph.executed) == 1


# --- Sequence lengths -----------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["seqlens_q", "seqlens_k"])
def test_one_side_s_lengths_are_completed(given: str, machine: Machine) -> None:
    """cuDNN wants both or none. What it leaves of rows past the length is mended each time."""
    inputs = inputs_of(**{given: lengths(0, 3)})
    out, lse = torch.ones_like(inputs.q), torch.ones(2, 4, 5)
    assert cudnn.forward(PROBLEM, inputs, out, lse) is None
    (graph,) = machine.library.graphs
    ((_, arguments),) = graph.calls
    assert arguments["use_padding_mask"] is True
    hidden = [out[0], out[1, :, 3:]] if given == "seqlens_q" else [out[0]]
    assert all(rows.eq(0).all() for rows in hidden)
    assert lse[0].isneginf().all()
    assert out[1, :, :3].eq(1).all()
    assert lse[1, :, :3].eq(1).all()


# --- Refusals -------------------------------------------------------------------------------------


def test_cudnn_s_refusal_is_told_in_its_own_words(machine: Machine) -> None:
    machine.library.graph_class.refuses = "bottom right needs s_q <= s_kv"
    with pytest.raises(PlanError, match="refuses this attention forward: bottom right needs s_q"):
        forward(inputs_of())
    with pytest.raises(PlanError, match="refuses this attention backward"):
        backward(inputs_of())
    assert cudnn.statistics.built == 0


def test_the_first_plan_that_builds_is_taken(machine: Machine) -> None:
    machine.library.graph_class.plans = ("no engine 7", None, None)
    forward(inputs_of())
    (graph,) = machine.library.graphs
    assert graph.built == [1]
    assert graph.executed[0][3] == 1
    assert plans()[0].index == 1


def test_no_plan_builds(machine: Machine) -> None:
    machine.library.graph_class.plans = ("no engine 7", "no shared memory")
    with pytest.raises(PlanError, match=r"no plan for this attention forward.*7.*memory"):
        build(described(inputs_of()), 1)


REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "softcap": (lambda: forward(inputs_of(), Problem(1.0, softcap=30.0)), ShapeError, "got 30.0"),
    "dropout": (
        lambda: forward(inputs_of(rng=rng(0)), Problem(1.0, dropout_p=1.0)),
        ShapeError,
        "dropout_p below 1, got 1.0",
    ),
    "dtype": (lambda: forward(inputs_of(dtype=torch.float32)), DtypeError, "got torch.float32"),
    "backward": (lambda: backward(inputs_of(), Problem(1.0, softcap=2.0)), ShapeError, "got 2.0"),
    "gradient of lse": (
        lambda: backward(inputs_of(), grad_lse=torch.zeros(2, 4, 5)),
        DerivativeError,
        "no gradient through lse",
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cudnn_cannot_is_refused_by_name(
    call: Callable[[], Any], error: type[Exception], words: str, machine: Machine
) -> None:
    with pytest.raises(error, match=words):
        call()
    assert machine.library.graphs == []


def test_tensors_on_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", False)
    for call in (forward, backward):
        with pytest.raises(DeviceError, match="CUDA tensors, got tensors on cpu"):
            call(inputs_of())


def _frontend(monkeypatch: pytest.MonkeyPatch, compiled: Any) -> None:
    module = ModuleType("cudnn")
    module.__version__, module._pybind_module = "1.33.0", compiled
    monkeypatch.setitem(sys.modules, "cudnn", module)


@pytest.mark.parametrize("name", cudnn_graph._USED)
def test_a_frontend_without_a_private_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version that has moved something says what, before anything runs."""
    names = {used: None for used in cudnn_graph._USED if used != name}
    _frontend(monkeypatch, SimpleNamespace(**names))
    with pytest.raises(AdapterError, match=f"cudnn-frontend 1.33.0 has no {name}"):
        LIBRARY.__wrapped__()
    complete = StubLibrary()
    _frontend(monkeypatch, complete)
    assert LIBRARY.__wrapped__() is complete


def test_a_frontend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(MissingLibraryError, match=r"pip install .nvidia-cudnn-frontend>=1.32"):
        LIBRARY.__wrapped__()
