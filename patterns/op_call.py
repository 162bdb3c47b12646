"""Calls of the attention ops themselves: the kernel is named already, so the site is only reported.

They come from user code that calls an op, and from `guards.py`, which turns calls of
FlashAttention-4 into them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import torch
from torch import fx

from .. import ops, varlen_ops
from ..spec import AttentionSpec, TensorSpec
from ..varlen_problem import as_bhsd
from .family import Example, NotUnderstood, Scope, Site, Unbindable, bind, describe, example_of

NAME = "op call"
_DENSE = (torch.ops.fa_inductor.attention, ops.attention)
_INFERENCE = (torch.ops.fa_inductor.attention_inference, ops.attention_inference)
_VARLEN = (torch.ops.fa_inductor.attention_varlen, varlen_ops.attention_varlen)
ANCHORS = (*_DENSE, *_INFERENCE, *_VARLEN)


def match(node: fx.Node, scope: Scope) -> Union[Site, NotUnderstood, None]:
    """The attention that the op computes; None for a node that the pass itself has made."""
    result = example_of(node)
    if result is None:
        return None
    schema = _schema(node)
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    try:
        arguments = bind(node, [each.name for each in schema], defaults)
    except Unbindable as problem:
        return NotUnderstood(node, f"{node.target}: {problem}")
    tensors = {name: example_of(arguments[name]) for name in ("q", "k", "v")}
    if node.target in _VARLEN:
        described = _varlen(tensors)
    else:
        if node.target in _INFERENCE:
            tensors = {name: tensor.transpose(1, 2) for name, tensor in tensors.items()}
        described = _dense(tensors, arguments)
    spec = AttentionSpec(
        **described,
        dtype=tensors["q"].dtype,
        causal=arguments["causal"],
        scale=example_of(arguments["scale"]),
        window=(example_of(arguments["window_left"]), example_of(arguments["window_right"])),
        softcap=example_of(arguments["softcap"]),
        has_sink=arguments["sink"] is not None,
        needs_grad=not isinstance(result, torch.Tensor) and result[0].requires_grad,
        deterministic=arguments.get("deterministic", False),
    )
    return Site(node, spec, fixed_kernel=arguments["kernel"])


def _schema(node: fx.Node) -> Any:
    """The arguments of the op that a node calls, by its overload or its packet."""
    overload = node.target if hasattr(node.target, "_schema") else node.target.default  # type: ignore[union-attr]
    return overload._schema.arguments  # type: ignore[union-attr]


def _dense(tensors: dict[str, torch.Tensor], arguments: dict[str, Any]) -> dict[str, Any]:
    bias = example_of(arguments["bias"])
    return {
        **{name: TensorSpec.of(tensor) for name, tensor in tensors.items()},
        "mask": None if bias is None else describe("bias", arguments["bias"]),
        "bias": None if bias is None else TensorSpec.of(bias),
        "bias_needs_grad": bias is not None and bias.requires_grad,
        "dropout_p": arguments["dropout_p"],
        "has_seqlens": arguments["seqlens_q"] is not None or arguments["seqlens_k"] is not None,
    }


def _varlen(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """All sequences seen as one of (1, H, T, D) with lengths of its own."""
    specs = {name: TensorSpec.of(as_bhsd(tensor)) for name, tensor in tensors.items()}
    return {**specs, "has_seqlens": True}


def move_to_reference(gm: fx.GraphModule) -> None:
    """Let ops that name a GPU kernel run on `reference` where their tensors are on the CPU."""
    for target in ANCHORS:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            names = [each.name for each in _schema(node)]
            if example_of(bind(node, names, dict.fromkeys(names))["q"]).device.type != "cpu":
                continue
            _name_kernel(node, "reference")
    gm.recompile()


def _name_kernel(node: fx.Node, kernel: str) -> None:
    names = [each.name for each in _schema(node)]
    place = names.index("kernel")
    if place < len(node.args):
        node.update_arg(place, kernel)
    else:
        node.update_kwarg("kernel", kernel)


def rewrite(site: Site, kernel: str) -> None:
    """The node is what it should be, but for how its kernel is watched."""
    _name_kernel(site.node, kernel)


def examples() -> list[Example]:
    arguments = (None, "none", "BSHD", False, "reference")
    lengths, starts = (torch.tensor(each, dtype=torch.int32) for each in ([4, 6], [0, 6, 6]))

    def with_everything(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        tensors = (torch.ones(1, 1, 6, 6), torch.ones(4), lengths, lengths)
        rng = torch.zeros(2, dtype=torch.int64)
        return ops.attention(q, k, v, *arguments, *tensors, rng, 0.5, 3, None, 2.0)[0]

    def by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        names = ("scale", "causal", "out_order", "deterministic", "kernel")
        named = dict(zip(names, arguments, strict=True))
        return torch.ops.fa_inductor.attention(q, k, v=v, **named, softcap=2.0)[0]

    def inference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        bshd = (tensor.detach().transpose(1, 2) for tensor in (q, k, v))
        out = ops.attention_inference(*bshd, *arguments[:3], "reference")
        return q + out.transpose(1, 2)

    def packed(op: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
            rest = (starts, starts, 6, 6, None, "bottom_right", False, "reference")
            return op(q, k, v, *rest)[0]

        return attend

    return [
        Example("the op", lambda q, k, v: ops.attention(q, k, v, *arguments)[0], _inputs),
        Example(
            "the packet",
            lambda q, k, v: torch.ops.fa_inductor.attention(q, k, v, *arguments)[0],
            _inputs,
        ),
        Example("the op with every argument", with_everything, _inputs),
        Example("the packet by name", by_name, _inputs),
        Example("the op of inference", inference, _inputs),
        Example("variable lengths", packed(varlen_ops.attention_varlen), _inputs),
        Example("their packet", packed(torch.ops.fa_inductor.attention_varlen), _inputs),
    ]


def counterexamples() -> list[Example]:
    return [Example("no attention", lambda q, k, v: q @ k.mT @ v, _inputs, sites=0)]


def _inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 4, 6, 8) for _ in range(3))
