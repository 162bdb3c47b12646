"""Walk a Dynamo graph and its sub-graphs, working out what surrounds each node.

Higher-order ops (activation checkpointing, nested compile regions, `torch.cond`) keep their
bodies as sub-GraphModules. A body is entered only through ops whose operands are understood,
and only when all of its call sites agree on what they hand in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import symbolic, torch_compat
from .patterns.family import Scope, example_of

# How each understood higher-order op passes operands to its bodies: operands(args).
_OPERANDS: dict[str, Any] = {
    "tag_activation_checkpoint": lambda args: args[1:],
    "invoke_subgraph": lambda args: args[2:],
    "cond": lambda args: args[3] if len(args) > 3 else (),
}


@dataclass(frozen=True)
class _SdpState:
    """PyTorch's SDP flags: the enabled backends, and the preference among all of them."""

    enabled: frozenset[str]
    priority: tuple[str, ...]

    @staticmethod
    def now() -> _SdpState:
        return _SdpState(frozenset(torch_compat.sdp_backends()), torch_compat.sdp_priority())

    def entering(self, backends: Sequence[str], set_priority: bool) -> _SdpState:
        """The flags after `sdpa_kernel(backends, set_priority)`."""
        priority = self.priority
        if set_priority:
            priority = (*backends, *(name for name in priority if name not in backends))
        return _SdpState(frozenset(backends), priority)

    @property
    def restriction(self) -> tuple[str, ...] | None:
        """The enabled backends, most preferred first; None for PyTorch's default state."""
        default = torch_compat.default_sdp_priority()
        # OVERRIDEABLE is a hook for other vendors' devices, no choice among kernels here.
        everything = self.enabled >= set(default) - {"OVERRIDEABLE"}
        if everything and self.priority == default:
            return None
        return tuple(name for name in self.priority if name in self.enabled)


@dataclass
class _Call:
    """One place that runs a body: the op, its operands, the SDP flags in force there."""

    op: str
    operands: Sequence[Any]
    flags: _SdpState
    blocked: str | None


def scopes(
    root: fx.GraphModule, assumed_mask: str | None = None
) -> list[tuple[fx.GraphModule, Scope]]:
    """Every graph reachable from `root`, outermost first, with its `Scope`."""
    found: list[tuple[fx.GraphModule, Scope]] = []
    deterministic = torch.are_deterministic_algorithms_enabled()
    handed_in: dict[fx.Node, Sequence[Any]] = {}
    calls: dict[fx.GraphModule, list[_Call]] = {root: [_Call("root", (), _SdpState.now(), None)]}
    for module in _callers_first(root):
        entries = calls.get(module, [])
        if not entries:
            continue
        blocked = _blocked(module, entries)
        flags = dict(_sdp_states(module.graph, entries[0].flags))
        restrictions = {node: state.restriction for node, state in flags.items()}
        handed_in.update(_by_placeholder(module, entries))
        found.append((module, Scope(restrictions, blocked, deterministic, handed_in, assumed_mask)))
        for node, body, operands in _bodies(module):
            call = _Call(_name(node), operands, flags[node], blocked)
            calls.setdefault(body, []).append(call)
    return found


def _by_placeholder(
    module: fx.GraphModule, entries: Sequence[_Call]
) -> Iterator[tuple[fx.Node, list[Any]]]:
    """For each placeholder of a body, what its calls hand in, where all of them are nodes."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if any(len(call.operands) != len(placeholders) for call in entries):
        return
    for place, placeholder in enumerate(placeholders):
        operands = [call.operands[place] for call in entries]
        if operands and all(isinstance(each, fx.Node) for each in operands):
            yield placeholder, operands


def _name(node: fx.Node) -> str:
    assert isinstance(node.target, torch._ops.HigherOrderOperator)
    return node.target.name()


def _callers_first(root: fx.GraphModule) -> list[fx.GraphModule]:
    """Graph modules so that each comes after all that call it."""
    order: list[fx.GraphModule] = []

    def visit(module: fx.GraphModule) -> None:
        for _, body, _ in _bodies(module):
            if body not in order:
                visit(body)
        if module not in order:
            order.append(module)

    visit(root)
    return order[::-1]


def _bodies(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule, Sequence[Any]]]:
    """(op node, body, operands) for every sub-graph that a node of `module` runs."""
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        operands = _OPERANDS.get(_name(node))
        for argument in node.all_input_nodes:
            if argument.op != "get_attr":
                continue
            body = getattr(module, str(argument.target), None)
            if isinstance(body, fx.GraphModule):
                yield node, body, operands(node.args) if operands else ()


def program_order(root: fx.GraphModule) -> Iterator[fx.Node]:
    """Every node once, the nodes of a body where it is first run."""
    entered: list[fx.GraphModule] = [root]

    def walk(module: fx.GraphModule) -> Iterator[fx.Node]:
        bodies: dict[fx.Node, list[fx.GraphModule]] = {}
        for node, body, _ in _bodies(module):
            bodies.setdefault(node, []).append(body)
        for node in module.graph.nodes:
            yield node
            for body in bodies.get(node, []):
                if body not in entered:
                    entered.append(body)
                    yield from walk(body)

    return walk(root)


def _sdp_states(graph: fx.Graph, state: _SdpState) -> Iterator[tuple[fx.Node, _SdpState]]:
    """The flags in force at each node; `sdpa_kernel` leaves calls that set them."""
    set_flags, from_name = torch_compat.sdpa_kernel_targets()
    for node in graph.nodes:
        if node.target is set_flags:
            names = [name.args[0] for name in node.args[0] if name.target is from_name]
            state = state.entering(names, len(node.args) > 1 and bool(node.args[1]))
        yield node, state


def _blocked(module: fx.GraphModule, calls: Sequence[_Call]) -> str | None:
    """Why nothing in `module` may be rewritten, or None."""
    for call in calls:
        if call.blocked:
            return call.blocked
        if call.op != "root" and call.op not in _OPERANDS:
            return f"inside the higher-order op {call.op}, which fa_inductor does not enter"
    first = calls[0]
    for call in calls[1:]:
        if call.flags != first.flags:
            return f"a sub-graph shared by {len(calls)} calls under different sdpa_kernel settings"
        if not _same_operands(call.operands, first.operands):
            return f"a sub-graph shared by {len(calls)} calls with different operands"
    if any(_is_functorch(node) for node in module.graph.nodes):
        return "inside a torch.func transform (vmap, grad, jvp, ...), which the op has no rule for"
    return None


def _same_operands(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two calls hand a body operands with the same metadata."""
    if len(left) != len(right):
        return False
    for one, other in zip(map(example_of, left), map(example_of, right), strict=True):
        if isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
            return False
        if isinstance(one, torch.Tensor) and not (
            symbolic.same_all(one.shape, other.shape)
            and symbolic.same_all(one.stride(), other.stride())
            and (one.dtype, one.device, one.requires_grad)
            == (other.dtype, other.device, other.requires_grad)
        ):
            return False
    return True


def _is_functorch(node: fx.Node) -> bool:
    return node.op == "call_function" and "functorch" in (
        getattr(node.target, "__module__", None) or ""
    )
