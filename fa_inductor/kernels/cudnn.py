"""cuDNN's fused attention, through cudnn-frontend's graph API.

Graphs are declared from the tensors' own strides, so no layout is copied or named. Plans, handles
and the stream they are set to belong to one thread and one device, as cuDNN asks.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import jit_monitor, torch_compat
from ..call_cache import forget_at_exit
from ..errors import CaptureError, DerivativeError, DeviceError, DtypeError, ShapeError
from ..problem import Gradients, Inputs, Problem
from .cudnn_graph import Description, Layout, Operand, Plan, build, library
from .cudnn_plans import plan_of

CAPACITY = 128  # plans that each thread keeps for each device

Repeat = Callable[[Sequence[Any]], None]

# The order of the op's tensors, see `fa_inductor.kernels`.
_FORWARD = (*Inputs._fields, "out", "lse")
_BACKWARD = (*_FORWARD, "grad_out", "grad_lse", *(f"grad_{name}" for name in Gradients._fields))


@dataclass
class Statistics:
    """Of all threads: plans built, and found built when a new class of metadata came."""

    built: int = 0
    found: int = 0


statistics = Statistics()


class _Device:
    """What one thread holds for one GPU: a handle, the stream it was set to, and its plans, the
    least recently used dropped."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle: int = library().create_handle()
        self.stream: int | None = None
        self.plans: OrderedDict[Description, Plan] = OrderedDict()
        forget_at_exit(self.plans)

    def handle_on_current_stream(self) -> int:
        stream = torch_compat.current_raw_stream(self.index)
        if stream != self.stream:
            library()._raw_set_stream(self.handle, stream)
            self.stream = stream
        return self.handle

    def plan(self, description: Description) -> Plan:
        plan = self.plans.get(description)
        if plan is not None:
            statistics.found += 1
            jit_monitor.count("plan_hits")
            self.plans.move_to_end(description)
            return plan
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"cuDNN has no plan yet for this attention {description.kind}, and cannot build "
                "one while a CUDA graph is captured: run it once with these shapes before."
            )
        handle = self.handle_on_current_stream()
        plan = plan_of(description, handle, lambda: self._built(description, handle))
        self.plans[description] = plan
        while len(self.plans) > CAPACITY:
            self.plans.popitem(last=False)
        return plan

    def _built(self, description: Description, handle: int) -> Plan:
        jit_monitor.about_to(
            "cuDNN builds a plan", description.fields, lambda: [d.fields for d in self.plans]
        )
        started = time.perf_counter()
        plan = build(description, handle)
        jit_monitor.count("plan_seconds", time.perf_counter() - started)
        jit_monitor.count("plan_builds")
        statistics.built += 1
        return plan


class _Devices(threading.local):
    def __init__(self) -> None:
        self.by_index: dict[int, _Device] = {}

    def of(self, tensor: Tensor) -> _Device:
        index = tensor.get_device()
        if index not in self.by_index:
            self.by_index[index] = _Device(index)
        return self.by_index[index]


_devices = _Devices()


def forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor | None) -> Repeat | None:
    """See `fa_inductor.kernels`."""
    _check(problem, inputs)
    inputs, mends = _with_both_lengths(inputs)
    given, inputs = inputs, _with_float32_sink(inputs)
    tensors = (*inputs, out, lse)
    operands = _operands(inputs, problem)
    operands["out"] = Layout.of(out)
    if lse is not None:
        operands["lse"] = Layout.of(lse, (*lse.shape, 1))
    run = _runner("forward", problem, operands, tensors)
    run(tensors)
    if mends:
        _mend_forward(inputs, out, lse)
    return run if given is inputs and not mends else None


def backward(
    problem: Problem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grads: Gradients,
) -> Repeat | None:
    """See `fa_inductor.kernels`. Raises `DerivativeError` where lse has a gradient."""
    _check(problem, inputs)
    if grad_lse is not None:
        raise DerivativeError(
            "Kernel cudnn has no gradient through lse; use lse.detach(), or name fa4."
        )
    inputs, mends = _with_both_lengths(inputs)
    if mends and grads.bias is not None:
        raise ShapeError("Kernel cudnn has no gradient of a bias beside sequence lengths.")
    given, inputs = inputs, _with_float32_sink(inputs)
    grad_bias, grad_sink = grads.bias, grads.sink
    if grad_sink is not None and given is not inputs:
        grad_sink = torch.empty_like(grad_sink, dtype=torch.float32)
    if grad_bias is not None and inputs.bias is not None and inputs.bias.shape[2] == 1:
        # cuDNN 9.19 is silently wrong for a bias that is broadcast over the queries: whole, then
        # summed.
        size = (*inputs.bias.shape[:2], inputs.q.shape[2], inputs.bias.shape[3])
        grad_bias = inputs.bias.new_empty(size)
    tensors = (*inputs, out, lse, grad_out, None, *grads[:3], grad_bias, grad_sink)
    operands = _operands(inputs, problem)
    operands["out"], operands["grad_out"] = Layout.of(out), Layout.of(grad_out)
    operands["lse"] = Layout.of(lse, (*lse.shape, 1))
    for name, grad in zip(("grad_q", "grad_k", "grad_v"), grads[:3], strict=True):
        operands[name] = Layout.of(grad)
    if grad_bias is not None:
        operands["grad_bias"] = Layout.of(grad_bias)
    if grad_sink is not None:
        operands["grad_sink"] = Layout.of(grad_sink, (1, grad_sink.shape[0], 1, 1))
    run = _runner("backward", problem, operands, tensors)
    run(tensors)
    if mends:
        _mend_backward(inputs, grads)
    if grad_bias is not grads.bias:
        assert grads.bias is not None
        assert grad_bias is not None
        torch.sum(grad_bias, dim=2, keepdim=True, out=grads.bias)
    if grads.sink is not None and grad_sink is not None and grad_sink is not grads.sink:
        grads.sink.copy_(grad_sink)
    as_given = given is inputs and grad_bias is grads.bias and not mends
    return run if as_given else None


def _check(problem: Problem, inputs: Inputs) -> None:
    q = inputs.q
    if not q.is_cuda:
        raise DeviceError(f"Kernel cudnn runs on CUDA tensors, got tensors on {q.device}.")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise DtypeError(f"Kernel cudnn takes float16 and bfloat16, got {q.dtype}.")
    if problem.softcap:
        raise ShapeError(f"Kernel cudnn has no softcap, got {problem.softcap}; name fa4.")
    if problem.dropout_p >= 1.0:
        raise ShapeError("Kernel cudnn takes dropout_p below 1, got 1.0: its output is zero.")
    if inputs.sink is not None and (inputs.seqlens_q is not None or inputs.seqlens_k is not None):
        raise ShapeError("Kernel cudnn has no sink beside sequence lengths; name fa4.")


@dataclass(frozen=True)
class _Runner:
    """Executes a plan on tensors that lie as those it was bound to."""

    plan: Plan
    device: _Device

    def __call__(self, tensors: Sequence[Any]) -> None:
        self.plan.execute(tensors, self.device.handle_on_current_stream())

    # Only the pointers are taken from the tensors: their order of dimensions does not matter.
    on_bshd = __call__


def _runner(
    kind: str, problem: Problem, layouts: dict[str, Layout], tensors: Sequence[Any]
) -> Repeat:
    """Executes the plan for tensors that lie as these do."""
    order = _FORWARD if kind == "forward" else _BACKWARD
    slots = {name: order.index(name) for name in layouts if name in order}
    slots.update(seed=order.index("rng"), offset=order.index("rng"))
    offsets = {"offset": torch.int64.itemsize}
    operands = tuple(
        Operand(name, slots[name], layout, offsets.get(name, 0)) for name, layout in layouts.items()
    )
    device = _devices.of(tensors[0])
    plan = device.plan(_description(kind, problem, operands, device.index))
    plan.bind(tensors)

    return _Runner(plan, device)


def _description(
    kind: str, problem: Problem, operands: tuple[Operand, ...], device: int
) -> Description:
    """Only what a plan depends on. With equal lengths both alignments are the same band, and
    cuDNN takes more beside top-left."""
    layouts = {operand.name: operand.layout for operand in operands}
    equal = layouts["q"].size[2] == layouts["k"].size[2] and "seqlens_q" not in layouts
    left, right = problem.band
    return Description(
        kind,
        problem.scale,
        left,
        right,
        top_left=problem.is_top_left or equal or (left is None and right is None),
        dropout_p=problem.dropout_p,
        deterministic=problem.deterministic and kind == "backward",
        operands=operands,
        device=device,
        version=int(library().backend_version()),
    )


def _operands(inputs: Inputs, problem: Problem) -> dict[str, Layout]:
    """What forward and backward both read."""
    q, k = inputs.q, inputs.k
    layouts = {name: Layout.of(tensor) for name, tensor in zip("qkv", inputs[:3], strict=True)}
    if inputs.bias is not None:
        # A dimension of size 1 for the queries would be read wrongly in the backward.
        size = (*inputs.bias.shape[:2], q.shape[2], k.shape[2])
        layouts["bias"] = Layout.of(inputs.bias, size)
    if inputs.sink is not None:
        layouts["sink"] = Layout.of(inputs.sink, (1, q.shape[1], 1, 1))
    if inputs.seqlens_q is not None and inputs.seqlens_k is not None:
        for name in ("seqlens_q", "seqlens_k"):
            layouts[name] = Layout.of(getattr(inputs, name), (q.shape[0], 1, 1, 1))
    if problem.dropout_p:
        one = Layout((1, 1, 1, 1), (1, 1, 1, 1), torch.int64)
        layouts["seed"] = layouts["offset"] = one
    return layouts


def _with_float32_sink(inputs: Inputs) -> Inputs:
    """cuDNN takes a sink in float32 only."""
    if inputs.sink is None or inputs.sink.dtype == torch.float32:
        return inputs
    return inputs._replace(sink=inputs.sink.float())


# --- Sequence lengths -----------------------------------------------------------------------------


def _with_both_lengths(inputs: Inputs) -> tuple[Inputs, bool]:
    """cuDNN wants lengths of queries and keys, or none; and whether results need mending."""
    q, k = inputs.q, inputs.k
    if inputs.seqlens_q is None and inputs.seqlens_k is None:
        return inputs, False
    whole = {"seqlens_q": q.shape[2], "seqlens_k": k.shape[2]}
    missing = {
        name: torch.full((q.shape[0],), size, dtype=torch.int32, device=q.device)
        for name, size in whole.items()
        if getattr(inputs, name) is None
    }
    return inputs._replace(**missing), True


def _is_empty(inputs: Inputs) -> Tensor:
    """(B, 1, 1): sequences without a key, for which cuDNN before 9.25 gives NaN."""
    assert inputs.seqlens_k is not None
    return (inputs.seqlens_k == 0).view(-1, 1, 1)


def _mend_forward(inputs: Inputs, out: Tensor, lse: Tensor | None) -> None:
    """Rows past their sequence's length, or without a key, give 0 and lse -inf."""
    assert inputs.seqlens_q is not None
    row = torch.arange(out.shape[2], device=out.device)
    hidden = (row >= inputs.seqlens_q[:, None])[:, None] | _is_empty(inputs)
    out.masked_fill_(hidden[..., None], 0.0)
    if lse is not None:
        lse.masked_fill_(hidden, float("-inf"))


def _mend_backward(inputs: Inputs, grads: Gradients) -> None:
    empty = _is_empty(inputs)[..., None]
    for grad in grads[:3]:
        grad.masked_fill_(empty, 0.0)
