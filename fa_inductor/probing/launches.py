"""Which attention a captured graph holds, and which attention kernels really ran."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .. import dynamo_compat
from ..config import Config
from ..rewrite import rewrite
from ..torch_compat import fake_tensors

_TORCH_NAMESPACES = frozenset(("aten", "prims", "prim", "inductor", "higher_order", "rngprims"))
# How libraries name their attention kernels on a GPU.
_KERNELS = re.compile(r"flash|fmha|sdpa|attention|_mha_", re.IGNORECASE)
_CORE_OPS = re.compile(r"aten::_scaled_dot_product|aten::_flash_attention|aten::_efficient_att")
# Ops of ours that only prepare an attention.
_HELPERS = frozenset(("fa_inductor::mask_blocks",))


@dataclass
class Graphs:
    """The graphs that Dynamo captured for one function.

    attentions: calls of them in all graphs. written_out: attentions that are not called, but
    written by hand. nodes: what they call, for people. faults: opaque ops whose
    result is not laid out as they promise.
    """

    count: int = 0
    attentions: int = 0
    written_out: int = 0
    opaque: set[str] = field(default_factory=set)
    nodes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def watched_backend(
    name: str, options: Mapping[str, Any], graphs: Graphs
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """The backend `name`, noting in `graphs` what it is given."""
    compiler = dynamo_compat.backend_named(name)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        opaque = list(_opaque_ops(gm))
        graphs.count += 1
        graphs.opaque.update(opaque)
        own = [name for name in opaque if name.startswith("fa_inductor::")]
        # Attention written by hand may well be left to products and a softmax.
        found = rewrite(gm, Config(kernels=("reference",)), apply=False)
        sites = [site for site in found if site.family != "eager"]
        graphs.written_out += len(found) - len(sites)
        graphs.attentions += len(sites) + len(opaque) - min(len(own), len(sites))
        graphs.nodes += [
            getattr(node.target, "__name__", str(node.target))
            for node in gm.graph.nodes
            if node.op in ("call_function", "call_method")
        ]
        keywords = {"options": dict(options)} if options else {}
        compiled = compiler(gm, example_inputs, **keywords)
        return _once_checked(compiled, graphs)

    return backend


def _once_checked(compiled: Any, graphs: Graphs) -> Callable[..., Any]:
    """`compiled`, and on its first call a look at what its opaque ops give."""
    waiting = [True]

    def call(*args: Any) -> Any:
        if not waiting:
            return compiled(*args)
        waiting.clear()
        with _LayoutCheck(graphs.faults):
            return compiled(*args)

    return call


class _LayoutCheck(TorchDispatchMode):
    """Holds each opaque op that is called against its own fake version.

    In the compiled run itself: the captured graph, run as it is written, would make what compiled
    code never holds, such as masks of S x S elements.
    """

    def __init__(self, faults: list[str]) -> None:
        super().__init__()
        self.faults = faults

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_opaque(func):
            with fake_tensors() as mode:
                fakes = tree_map(
                    lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, (args, kwargs)
                )
                promised = func(*fakes[0], **fakes[1])
            for real, fake in zip(tree_leaves(result), tree_leaves(promised), strict=True):
                if isinstance(real, Tensor) and (fault := _difference(fake, real)):
                    self.faults.append(f"{func.name()}: {fault}")
        return result


def _difference(promised: Tensor, real: Tensor) -> str | None:
    for what in ("shape", "dtype"):
        one, other = getattr(promised, what), getattr(real, what)
        if one != other:
            return f"{what} promised {one}, real {other}"
    moves = [size > 1 for size in real.shape]
    strides = [
        tuple(stride for stride, move in zip(t.stride(), moves, strict=True) if move)
        for t in (promised, real)
    ]
    if real.numel() and strides[0] != strides[1]:
        return f"strides promised {promised.stride()}, real {real.stride()}"
    return None


def _opaque_ops(gm: fx.GraphModule) -> Iterator[str]:
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            target = node.target
            if isinstance(target, torch._ops.OpOverloadPacket):
                target = getattr(target, target.overloads()[0])
            if isinstance(target, torch._ops.OpOverload) and _is_opaque(target):
                yield target._schema.name


def _is_opaque(target: torch._ops.OpOverload) -> bool:
    return target.namespace not in _TORCH_NAMESPACES and target._schema.name not in _HELPERS


@dataclass
class Launched:
    """kernels: names of the attention kernels of one run (on a CPU of the ops), in order.
    syncs: how often the host waited for the GPU; 0 on a CPU."""

    kernels: list[str] = field(default_factory=list)
    syncs: int = 0


@contextmanager
def launches(opaque: set[str], on_gpu: bool) -> Iterator[Launched]:
    """What runs inside. opaque: names of further ops that count as attention."""
    from torch.profiler import ProfilerActivity, profile

    launched = Launched()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler, _syncs(launched, on_gpu):
        yield launched
        if on_gpu:
            torch.cuda.synchronize()
    for event in profiler.events() or ():
        if on_gpu:
            is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
            if is_kernel and _KERNELS.search(event.name) and "fa_inductor::" not in event.name:
                launched.kernels.append(event.name)
        elif _is_attention(event.name, opaque) and not _is_inside(event, opaque):
            launched.kernels.append(event.name)


def _is_attention(name: str, opaque: set[str]) -> bool:
    ours = name.startswith("fa_inductor::attention") or name in opaque
    forward = "backward" not in name and "gradients" not in name
    return forward and (ours or bool(_CORE_OPS.match(name)))


def _is_inside(event: Any, opaque: set[str]) -> bool:
    """Whether an event is part of an attention that is counted already."""
    parent = event.cpu_parent
    while parent is not None:
        if _is_attention(parent.name, opaque):
            return True
        parent = parent.cpu_parent
    return False


@contextmanager
def _syncs(launched: Launched, on_gpu: bool) -> Iterator[None]:
    if not on_gpu:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    launched.syncs = sum("synchronizing CUDA operation" in str(each.message) for each in caught)
