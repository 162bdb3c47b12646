"""The ways of running an attention: each makes a function of inputs that can be called again with
others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .data import Drawn
from .launches import Graphs, watched_backend
from .poison import NAN
from .subjects import Subject

# [out], or [out, dq, dk, dv] where there is a backward.
Run = Callable[[Drawn], list[Tensor]]
NEED_GPU = ("reduce-overhead", "max-autotune", "cuda graph", "two streams")
_WARM_UPS = 3


def prepare(subject: Subject, way: str, backward: bool, graphs: Graphs) -> Run:
    """`subject` in a way of `cells.WAYS`, compiled on its first call."""
    if way == "eager":
        return _direct(subject, subject.eager or subject.fn, backward)
    if way in ("reduce-overhead", "max-autotune"):
        return _stepwise(_direct(subject, _compiled(subject, graphs, mode=way), backward))
    if way == "dynamic":
        return _direct(subject, _compiled(subject, graphs), backward, dynamic=True)
    if way == "checkpoint":
        return _direct(subject, _compiled(subject, graphs, _checkpointed(subject.fn)), backward)
    run = _direct(subject, _compiled(subject, graphs), backward)
    if way == "cuda graph":
        return _CudaGraph(run)
    return _TwoStreams(run) if way == "two streams" else run


def _compiled(
    subject: Subject,
    graphs: Graphs,
    fn: Callable[..., Tensor] | None = None,
    *,
    mode: str | None = None,
) -> Callable[..., Tensor]:
    options = dict(subject.options)
    if mode is not None and subject.backend == "fa_inductor":
        options["fa.mode"] = mode
    elif mode is not None:
        options |= torch._inductor.list_mode_options(mode)
    backend = watched_backend(subject.backend, options, graphs)
    made: Callable[..., Tensor] = torch.compile(fn or subject.fn, backend=backend, fullgraph=True)
    return made


def _checkpointed(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    from torch.utils.checkpoint import checkpoint

    def run(*args: Any) -> Tensor:
        out: Tensor = checkpoint(fn, *args, use_reentrant=False)
        return out

    return run


def _direct(
    subject: Subject, fn: Callable[..., Tensor], backward: bool, *, dynamic: bool = False
) -> Run:
    """dynamic: with the length as a symbol."""

    def run(drawn: Drawn) -> list[Tensor]:
        others = subject.arguments(drawn)
        leaves = [tensor.detach().requires_grad_(backward) for tensor in drawn.tensors]
        if dynamic:
            for tensor in leaves:
                torch._dynamo.mark_dynamic(tensor, 2)
            for tensor in others:
                if tensor is not None:
                    torch._dynamo.mark_dynamic(tensor, 1)
        if not backward:
            with torch.no_grad():
                return [fn(*leaves, *others)]
        out = fn(*leaves, *others)
        return [out.detach(), *torch.autograd.grad(out, leaves, drawn.grad_out)]

    return run


def _stepwise(run: Run) -> Run:
    """Inductor's CUDA graphs give out memory that the next step writes over."""

    def step(drawn: Drawn) -> list[Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        return [tensor.clone() for tensor in run(drawn)]

    def again(drawn: Drawn) -> list[Tensor]:
        # Warm-up and recording come first, on whichever inputs: a replay is what is looked at.
        for _ in range(_WARM_UPS - 1):
            step(drawn)
        return step(drawn)

    return again


class _CudaGraph:
    """Captured once; later inputs are copied to where the graph reads them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, drawn: Drawn) -> list[Tensor]:
        if self._graph is None:
            self._capture(drawn)
        assert self._graph is not None
        for mine, given in zip(self._inputs(self._static), self._inputs(drawn), strict=True):
            mine.copy_(given)
        for tensor in self._made:
            tensor.fill_(NAN)  # memory of the graph's own, which no other poison reaches
        self._graph.replay()
        return [tensor.clone() for tensor in self._made]

    @staticmethod
    def _inputs(drawn: Drawn) -> Sequence[Tensor]:
        tensors = [*drawn.tensors, drawn.grad_out]
        return tensors if drawn.kept is None else [*tensors, drawn.kept]

    def _capture(self, drawn: Drawn) -> None:
        self._static = Drawn(
            [tensor.clone() for tensor in drawn.tensors],
            drawn.grad_out.clone(),
            None if drawn.kept is None else drawn.kept.clone(),
        )
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._run(self._static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._made = self._run(self._static)
        self._graph = graph


class _TwoStreams:
    """The same attention on two streams at once, on inputs of their own; what the second one makes
    is handed out, after the first has had its chance to spoil it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, drawn: Drawn) -> list[Tensor]:
        other = Drawn(
            [tensor.flip(2).clone() for tensor in drawn.tensors], drawn.grad_out, drawn.kept
        )
        streams = [torch.cuda.Stream() for _ in range(2)]
        made: list[list[Tensor]] = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for stream, inputs in zip((*streams, *streams), (other, drawn, other, drawn), strict=True):
            with torch.cuda.stream(stream):
                made.append(self._run(inputs))
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        return made[-1]
