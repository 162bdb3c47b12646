"""Stands in for cudnn-frontend's compiled module, which cannot load here; keeps what it is told."""

from __future__ import annotations

import ctypes
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_inputs import qkv
from torch import Tensor

from fa_inductor import object_cache
from fa_inductor.kernels import cudnn, cudnn_graph
from fa_inductor.kernels.cudnn_graph import Description, Layout, Operand
from fa_inductor.op_memory import gradients, outputs
from fa_inductor.problem import Gradients, Inputs, Problem

PROBLEM = Problem(0.125)
BF16 = torch.bfloat16


class Refused(Exception):
    """The frontend's error for what cuDNN does not take."""


@dataclass
class StubTensor:
    """A tensor of a graph, with what was declared of it."""

    declared: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda value: self.declared.update({name.removeprefix("set_"): value})


class StubGraph:
    """A graph that takes everything, but for `refuses` and the `plans` that do not build.

    calls: (name of the operation, its arguments). executed: (pointers, workspace, handle, plan).
    """

    refuses: str | None = None
    plans: tuple[str | None, ...] = (None,)  # why each plan does not build
    workspace = 0

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.made: list[StubTensor] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.executed: list[tuple[list[int], int, int, int]] = []
        self.built: list[int] = []

    def _make_tensor(self, **declared: Any) -> StubTensor:
        self.made.append(StubTensor(declared))
        return self.made[-1]

    def _outputs(self, count: int) -> list[StubTensor]:
        made = [StubTensor() for _ in range(count)]
        self.made.extend(made)
        return made

    def sdpa(self, **arguments: Any) -> list[StubTensor]:
        self.calls.append(("sdpa", arguments))
        return self._outputs(2)

    def sdpa_backward(self, **arguments: Any) -> list[StubTensor]:
        self.calls.append(("sdpa_backward", arguments))
        return self._outputs(3)

    def validate(self) -> None:
        if self.refuses:
            raise Refused(self.refuses)

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: list[Any]) -> None: ...

    def check_support(self) -> None: ...

    def get_execution_plan_count(self) -> int:
        return len(self.plans)

    def build_plan_at_index(self, index: int) -> None:
        if reason := self.plans[index]:
            raise Refused(reason)
        self.built.append(index)

    def serialize(self, *, as_bytes: bool) -> bytes:
        assert as_bytes
        assert self.built, "no built execution plan"
        return pickle.dumps((self._get_variant_pack_uids_sorted(), self.workspace))

    def deserialize(self, handle: int, data: bytes) -> None:
        if self.refuses:
            raise Refused(self.refuses)
        uids, self.workspace = pickle.loads(data)
        self.made = [StubTensor({"uid": uid}) for uid in uids]

    def get_workspace_size(self) -> int:
        return self.workspace

    def _prepare_variant_pack_template(self) -> None: ...

    def _get_variant_pack_uids_sorted(self) -> list[int]:
        return sorted(t.declared["uid"] for t in self.made if "uid" in t.declared)

    def _execute_with_raw_ptrs(
        self, pointers: int, count: int, workspace: int, handle: int, index: int
    ) -> None:
        given = list((ctypes.c_void_p * count).from_address(pointers))
        self.executed.append((given, workspace, handle, index))


class StubLibrary:
    """The compiled module. graphs: all that were made; streams: (handle, stream) in order."""

    cudnnGraphNotSupportedError = Refused
    data_type = SimpleNamespace(
        HALF="half", BFLOAT16="bfloat16", FLOAT="float", INT32="int32", INT64="int64"
    )
    heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    diagonal_alignment = SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right")

    def __init__(self) -> None:
        self.version = 91900
        self.graphs: list[StubGraph] = []
        self.handles = 0
        self.streams: list[tuple[int, int]] = []
        self.graph_class = type("Graph", (StubGraph,), {})

    def backend_graph(self, **options: Any) -> StubGraph:
        self.graphs.append(self.graph_class(**options))
        return self.graphs[-1]

    def create_handle(self) -> int:
        self.handles += 1
        return self.handles

    def _raw_set_stream(self, handle: int, stream: int) -> None:
        self.streams.append((handle, stream))

    def backend_version(self) -> int:
        return self.version


class Machine(SimpleNamespace):
    """library: the stub. stream: the current one. capturing: whether it is being captured."""

    library: StubLibrary
    stream: int
    capturing: bool


def install(monkeypatch: pytest.MonkeyPatch, *, cuda_tensors: bool = True) -> Machine:
    """A GPU with a stub for cuDNN, whose tensors are the CPU's."""
    made = Machine(library=StubLibrary(), stream=7, capturing=False)
    for module in (cudnn, cudnn_graph):
        monkeypatch.setattr(module, "library", lambda: made.library)
    monkeypatch.setattr(cudnn, "_devices", cudnn._Devices())
    monkeypatch.setenv(object_cache.SWITCH, "0")
    monkeypatch.setattr(cudnn, "statistics", cudnn.Statistics())
    stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, stream, lambda index: made.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    if cuda_tensors:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return made


def inputs_of(**changed: Any) -> Inputs:
    """bfloat16 unless said otherwise; with tensors by name."""
    extras = {name: changed.pop(name) for name in Inputs._fields[3:] if name in changed}
    return Inputs(*qkv(**{"dtype": BF16, **changed}), **extras)


def described(
    inputs: Inputs, problem: Problem = PROBLEM, kind: str = "forward", device: int = 0
) -> Description:
    """Of a forward without log-sum-exp."""
    operands = {**cudnn._operands(inputs, problem), "out": Layout.of(inputs.q)}
    named = tuple(Operand(name, slot, each) for slot, (name, each) in enumerate(operands.items()))
    return cudnn._description(kind, problem, named, device)


def forward(inputs: Inputs, problem: Problem = PROBLEM, with_lse: bool = True) -> Any:
    """(out, lse, repeat) of `cudnn.forward`."""
    out, lse = outputs(inputs.q, inputs.v, "BSHD", True)
    repeat = cudnn.forward(problem, inputs, out.zero_(), lse.zero_() if with_lse else None)
    return out, lse, repeat


def backward(
    inputs: Inputs, problem: Problem = PROBLEM, grad_lse: Tensor | None = None, **grads: Tensor
) -> Gradients:
    out, lse = outputs(inputs.q, inputs.v, "BSHD", True)
    made = Gradients(*(grad.zero_() for grad in gradients(*inputs[:3])), **grads)
    cudnn.backward(problem, inputs, out, lse, torch.ones_like(out), grad_lse, made)
    return made


def plans() -> list[cudnn_graph.Plan]:
    """This thread's, the least recently used first."""
    (device,) = cudnn._devices.by_index.values()
    return [*device.plans.values()]


def declared(plan: cudnn_graph.Plan) -> dict[str, dict[str, Any]]:
    """What the graph was told of each tensor of its description."""
    names = [operand.name for operand in plan.description.operands]
    told = [t.declared for t in plan.graph.made if "uid" in t.declared]
    return {names[each["uid"] - 1]: each for each in told}
