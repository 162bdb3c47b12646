"""The one place that touches Dynamo's interfaces which are private or differ between versions.

Like `torch_compat.py`, and exercised by `tests/test_torch_compat.py` too. Importing this module
does not import Dynamo.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.torch_version import TorchVersion

from .torch_compat import adapted, sdp_backends

# --- What Dynamo is compiling ---------------------------------------------------------------


def is_sub_graph(graph: torch.fx.Graph) -> bool:
    """Whether `graph` belongs to a sub-module of a graph that Dynamo is compiling now.

    Dynamo sets `compile_subgraph_reason` on the graphs it hands to a backend, and on no
    sub-graph of theirs.
    """
    compile_context = adapted(torch._guards, "CompileContext")
    if compile_context.current_compile_id() is None:
        return False
    return not hasattr(graph.owning_module, "compile_subgraph_reason")


@dataclass(frozen=True)
class Attempt:
    """One attempt of Dynamo at a frame: it may give an attempt up, graph and all, and start anew.

    compile_id: `frame/compile`, where `compile` counts the frame's graphs. of: the same object for
        all attempts at one compile, and for nothing else. number: 0 for the first.
    """

    compile_id: str
    of: Any
    number: int


def attempt() -> Attempt | None:
    """The attempt that Dynamo is at now, None outside a Dynamo compile."""
    context = adapted(torch._guards, "CompileContext").try_get()
    if context is None or context.compile_id is None:
        return None
    return Attempt(str(context.compile_id), context, adapted(context, "attempt"))


def write_trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Add a JSON file to the trace that `TORCH_TRACE` asks for; `payload` is only called then."""
    from torch import _logging

    adapted(_logging, "trace_structured")(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=payload,
        expect_trace_id=False,
    )


def guard_sdp_backends() -> None:
    """Make the graph that Dynamo is compiling now valid only under the present SDP flags.

    Dynamo itself does not guard them. Outside a Dynamo compile this does nothing.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard

    expected = sdp_backends()
    guards = context.guards_context.dynamo_guards
    if any(getattr(g.create_fn, "_fa_inductor_flags", None) == expected for g in guards):
        return

    def install(builder: Any, guard: Guard) -> None:
        builder.guard_manager.root.add_lambda_guard(
            lambda _: sdp_backends() == expected,
            [f"sdpa_kernel backends == {expected}"],
            guard.user_stack,
        )

    install._fa_inductor_flags = expected  # type: ignore[attr-defined]
    guards.add(Guard(GlobalStateSource(), install))


# --- Where Dynamo ended graphs, and frames it compiled ---------------------------------------

Break = tuple[str, Sequence[traceback.FrameSummary]]


def graph_break_reason(gm: torch.fx.GraphModule) -> Break | None:
    """(Dynamo's message, the user's stack) of the break that ended this graph, or None."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return str(reason.reason), reason.user_stack


@functools.cache
def graph_break_ids() -> Mapping[str, str]:
    """Dynamo's ids of its graph breaks by the first line of their messages: `GB0170`."""
    from torch._dynamo import exc

    return adapted(exc, "_load_gb_type_to_gb_id_map")()


@dataclass(frozen=True)
class CompiledFrame:
    """A frame that Dynamo compiled, or gave up.

    function, source: the user's function and its `file:line`; empty where Dynamo looked at none.
    recompile_reason: why the graphs that the frame had already did not do, or None.
    failure: the class of the error that ended the compile, or None; message: its text;
    failed_at: `file:line` of the user's code.
    """

    compile_id: str
    function: str
    source: str
    recompile_reason: str | None
    failure: str | None
    message: str
    failed_at: str


class DynamoWatch:
    """What Dynamo does from now on that no backend is told."""

    def __init__(self) -> None:
        metrics = _compilation_metrics()
        self._last = metrics[-1] if metrics else None
        self._seen: list[Any] = list(_break_reasons())

    def new_frames(self) -> list[CompiledFrame]:
        """Frames compiled since the last call; of more than 64, the last 64."""
        metrics = _compilation_metrics()
        known = [i for i, each in enumerate(metrics) if each is self._last]
        fresh = metrics[known[-1] + 1 :] if known else metrics
        self._last = metrics[-1] if metrics else None
        # Of a frame that it refused to compile once more, Dynamo does not say which way it goes.
        return [_frame_of(m) for m in fresh if m.is_forward is not False and m.compile_id]

    def new_breaks(self) -> list[Break]:
        """Breaks since the last call, with a graph before them or without."""
        reasons = _break_reasons()
        known = {id(old) for old in self._seen}
        fresh = [reason for reason in reasons if id(reason) not in known]
        self._seen = list(reasons)
        return [(str(each.reason), each.user_stack) for each in fresh]


def _compilation_metrics() -> list[Any]:
    if "torch._dynamo" not in sys.modules:  # nothing was compiled: do not pay for its import
        return []
    from torch._dynamo import utils

    return list(adapted(utils, "get_compilation_metrics")())


def _break_reasons() -> list[Any]:
    if "torch._dynamo" not in sys.modules:
        return []
    from torch._dynamo import output_graph

    return adapted(output_graph, "graph_break_reasons")


def _frame_of(metrics: Any) -> CompiledFrame:
    def place(file: str | None, line: int | None) -> str:
        return f"{file}:{line}" if file else ""

    return CompiledFrame(
        str(metrics.compile_id),
        users_function(metrics.co_name or ""),
        place(metrics.co_filename, metrics.co_firstlineno),
        metrics.recompile_reason,
        metrics.fail_type,
        metrics.fail_reason or "",
        place(metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno),
    )


def users_function(name: str) -> str:
    """The function that the user wrote, of the name of one that goes on after a graph break."""
    return re.sub(r"^(?:torch_dynamo_resume_in_)+(.+?)(?:_at_\d+)+$", r"\1", name)


# --- Functions that Dynamo must not trace -----------------------------------------------------


def substitute_in_graphs(original: Callable[..., Any], traceable: Callable[..., Any]) -> None:
    """Have Dynamo trace `traceable` wherever code calls `original`, or compiles it itself."""
    from torch._dynamo import decorators

    register = adapted(decorators, "substitute_in_graph")
    register(original, skip_signature_check=True)(traceable)
    if not compiles_polyfilled_functions():
        # Where torch 2.11 looks for the function to compile when it is given a wrapper.
        original._torchdynamo_orig_callable = traceable  # type: ignore[attr-defined]
        original._torchdynamo_wrapper_id = id(original)  # type: ignore[attr-defined]


def compiles_polyfilled_functions() -> bool:
    """Whether `torch.compile(original)` takes a substitute by itself (torch >= 2.13)."""
    return TorchVersion(torch.__version__) >= TorchVersion("2.13")


def never_trace_module(name: str) -> None:
    """Have Dynamo break the graph at functions defined in a package, not trace them."""
    from torch._dynamo import trace_rules

    adapted(trace_rules, "add")(name)


def never_compile(function: Any) -> None:
    """Have Dynamo leave a function alone, and all that it calls, when it runs between graphs."""
    from torch._C._dynamo import eval_frame
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    adapted(eval_frame, "set_code_exec_strategy")(function.__code__, skip)


# --- Running Dynamo without a trace ----------------------------------------------------------


def compile_isolated(fn: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile(fn, backend=backend)` with cache entries of its own where torch has them."""
    options: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch >= 2.13
        options["isolate_recompiles"] = True
    return torch.compile(fn, backend=backend, **options)


def backend_named(name: str) -> Callable[..., Any]:
    """The function behind `torch.compile(backend=name)`."""
    from torch._dynamo.backends import registry

    found: Callable[..., Any] = adapted(registry, "lookup_backend")(name)
    return found


@contextmanager
def untouched_dynamo() -> Iterator[None]:
    """Undo what compiling inside leaves in Dynamo: cache entries, shape profile, counters.

    Code that had no cache entry before is reset. Where a cache entry of the user's must stay,
    torch 2.11 keeps a dead entry of ours beside it, which counts towards its recompile limit;
    torch >= 2.13 keeps isolated entries apart (`compile_isolated`).
    """
    from torch._C._dynamo import eval_frame
    from torch._dynamo import convert_frame, pgo, utils

    entries_of = adapted(eval_frame, "_debug_get_cache_entry_list")
    seen: dict[int, Any] = {}
    kept: dict[int, list[Any]] = {}

    def remember(code: Any, _: Any) -> None:
        if id(code) not in seen:
            seen[id(code)] = code
            kept[id(code)] = entries_of(code)

    profile = copy.deepcopy(adapted(pgo, "_CODE_STATE"))
    counters = copy.deepcopy(utils.counters)
    handle = adapted(convert_frame, "register_bytecode_hook")(remember)
    try:
        yield
    finally:
        handle.remove()
        for key, code in seen.items():
            if not kept[key]:
                adapted(eval_frame, "reset_code")(code)
                continue
            for entry in entries_of(code):
                if not any(entry is old for old in kept[key]):
                    _invalidate(entry)
        pgo._CODE_STATE = profile
        utils.counters.clear()
        utils.counters.update(counters)


def _invalidate(entry: Any) -> None:
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    state = adapted(entry.guard_manager, "extra_state")
    state.invalidate(entry, DeletedGuardManagerWrapper("compiled for fa_inductor.explain"))
