"""The one place that touches Dynamo's interfaces which are private or differ between versions.

Like `torch_compat.py`, and exercised by `tests/test_torch_compat.py` too. Importing this module
does not import Dynamo.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def graph_break_reason(gm: torch.fx.GraphModule) -> tuple[str, str] | None:
    """(reason, `file:line` of the user's frame) of the break that ended this graph, or None."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    return str(reason.reason), f"{frame.filename}:{frame.lineno}" if frame else ""


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
