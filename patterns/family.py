"""What a pattern family is, and the pieces that all of them share."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Union

import torch
from torch import fx

from ..spec import AttentionSpec

Value = Any


@dataclass(frozen=True)
class Scope:
    """What is true around a node: one graph's surroundings, worked out before matching.

    sdp_backends: per node, the `SDPBackend` names left enabled there, None when unrestricted.
    blocked: why nothing in this graph may be rewritten, or None.
    deterministic: whether `torch.use_deterministic_algorithms` is on.
    operands: for each placeholder of a sub-graph, what its calls hand in for it.
    assumed_mask: what the user promises masks to be (`Config.assume_mask`).
    understood: masks that were looked into before, by node and shape of scores.
    """

    sdp_backends: Mapping[fx.Node, tuple[str, ...] | None] = field(default_factory=dict)
    blocked: str | None = None
    deterministic: bool = False
    operands: Mapping[fx.Node, Sequence[Any]] = field(default_factory=dict)
    assumed_mask: str | None = None
    understood: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """An attention that was understood: `spec` says what it computes.

    details: what `rewrite` of the family needs, found while matching.
    fixed_kernel: the kernel, when the user's code has already named it.
    is_core: whether leaving the site alone means PyTorch's own fused attention.
    """

    node: fx.Node
    spec: AttentionSpec
    details: Any = None
    fixed_kernel: str | None = None
    is_core: bool = True


@dataclass(frozen=True)
class NotUnderstood:
    """An attention that must be left as it is written, and why."""

    node: fx.Node
    reason: str


@dataclass(frozen=True)
class Example:
    """A small callable with inputs, used by tests and to draw the docs' table.

    sites: how many attention sites the pass must rewrite in it on the reference kernel.
    make_inputs: fresh float32 inputs for `fn`.
    """

    name: str
    fn: Callable[..., Any]
    make_inputs: Callable[[], tuple[Any, ...]]
    sites: int = 1


class Family(Protocol):
    """One way in which attention is written (a module has this shape)."""

    NAME: str
    ANCHORS: Sequence[Any]

    def match(self, node: fx.Node, scope: Scope) -> Union[Site, NotUnderstood, None]: ...

    def rewrite(self, site: Site, kernel: str) -> None: ...

    def examples(self) -> list[Example]: ...

    def counterexamples(self) -> list[Example]: ...


class Unbindable(Exception):
    """The arguments of a call do not fit the known signature."""


def bind(node: fx.Node, names: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, whichever way they were spelt.

    Raises `Unbindable` for an argument that the signature does not have, so that a newer
    PyTorch's extra argument is never ignored.
    """
    if len(node.args) > len(names):
        raise Unbindable(f"{len(node.args)} positional arguments, at most {len(names)} known")
    bound = dict(defaults)
    bound.update(zip(names, node.args, strict=False))
    for name, value in node.kwargs.items():
        if name not in names:
            raise Unbindable(f"unknown argument {name!r}")
        bound[name] = value
    missing = [name for name in names if name not in bound]
    if missing:
        raise Unbindable(f"argument {missing[0]!r} is missing")
    return bound


def example_of(value: Value) -> Any:
    """The fake value that Dynamo recorded for an argument; constants are their own."""
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def tensor_objection(name: str, value: Value) -> str | None:
    """Why an argument is not a plain tensor of rank 4, or None."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    tensor = example_of(value)
    if not isinstance(tensor, torch.Tensor):
        return f"{name} is {type(tensor).__name__}, not a tensor with known metadata"
    if tensor.is_nested:
        return f"{name} is a nested tensor"
    if is_traceable_wrapper_subclass(tensor):
        return f"{name} is a tensor subclass ({type(tensor).__name__})"
    if tensor.layout != torch.strided:
        return f"{name} has layout {tensor.layout}"
    return None


def source_of(node: fx.Node) -> str:
    """`file:line` of the innermost user frame in which Dynamo met the call."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return "{}:{}".format(*frames[-1]) if frames else "unknown"


def describe(name: str, value: Value) -> str:
    """A mask in words: `attn_mask bool (2, 1, 8, 8)`."""
    tensor = example_of(value)
    if not isinstance(tensor, torch.Tensor):
        return f"{name} {type(tensor).__name__}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} {dtype} ({', '.join(map(str, tensor.shape))})"


# Of the attention op's arguments after `kernel`; trailing ones are left out of a call.
_DEFAULTS = (None, None, None, None, None, 0.0, None, None, 0.0)


def _as_function(method: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A call of a tensor's method, written as one of a function: AOTAutograd does not cache graphs
    that call methods of tensors which Dynamo has not seen."""
    aten = torch.ops.aten
    if method in ("expand", "permute"):
        return getattr(aten, method).default, (args[0], args[1:])
    overloads = {"to": aten.to.dtype, "size": aten.sym_size.int}
    return overloads.get(method) or getattr(torch, method), args


class Emitter:
    """Inserts nodes in front of `node` that carry its source location, or that of `like`."""

    _INHERITED = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")

    def __init__(self, node: fx.Node, like: fx.Node | None = None) -> None:
        self.node, self.like = node, like or node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function, or of a tensor's method when `target` is its name."""
        if isinstance(target, str):
            target, args = _as_function(target, args)
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.create_node("call_function", target, args, kwargs)
        for key in self._INHERITED:
            if key in self.like.meta:
                new.meta[key] = self.like.meta[key]
        return new

    def attention(
        self,
        tensors: Sequence[Value],
        spec: AttentionSpec,
        scale: Value,
        out_order: str,
        kernel: str,
        bias: Value = None,
        sink: Value = None,
    ) -> fx.Node:
        """The output of the attention op for the nodes q, k, v.

        A dropout's seed and offset are drawn in the graph, where a recompute draws the same.
        """
        rng = None
        if spec.dropout_p:
            device = spec.q.device
            rng = self.call(torch.randint, 0, 1 << 31, (2,), dtype=torch.int64, device=device)
        extras = [bias, sink, None, None, rng, spec.dropout_p, *spec.window, spec.softcap]
        while extras and extras[-1] == _DEFAULTS[len(extras) - 1]:
            extras.pop()
        if spec.needs_grad:
            arguments = (scale, spec.causal, out_order, spec.deterministic, kernel, *extras)
            both = self.call(torch.ops.fa_inductor.attention.default, *tensors, *arguments)
            return self.call(operator.getitem, both, 0)
        tensors = [self.call("transpose", tensor, 1, 2) for tensor in tensors]
        arguments = (scale, spec.causal, out_order, kernel, *extras)
        out = self.call(torch.ops.fa_inductor.attention_inference.default, *tensors, *arguments)
        return self.call("transpose", out, 1, 2)

    def packed_attention(
        self, packed: Any, spec: AttentionSpec, scale: Value, out_order: str, kernel: str
    ) -> fx.Node:
        """The output for the views of a `patterns.packed.Packed`."""
        views = (list(view) for view in packed.views)
        arguments = (scale, spec.causal, out_order, spec.deterministic, kernel)
        op = torch.ops.fa_inductor.attention_packed.default
        return self.call(operator.getitem, self.call(op, packed.node, *views, *arguments), 0)

    def finish(self, replacement: Value) -> None:
        """Use `replacement` wherever the node was used, and remove the node."""
        replacement.meta.update(self.node.meta)
        self.node.replace_all_uses_with(replacement)
        self.node.graph.erase_node(self.node)
