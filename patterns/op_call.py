"""Calls of the attention op itself: the kernel is named already, so the site is only reported.

They come from user code that calls the op, and from `guards.py`, which turns calls of
FlashAttention-4 into it.
"""

from __future__ import annotations

from typing import Union

import torch
from torch import fx

from .. import ops
from ..spec import AttentionSpec, TensorSpec
from .family import Example, NotUnderstood, Scope, Site, Unbindable, bind, example_of

NAME = "op call"
ANCHORS = (torch.ops.fa_inductor.attention, ops.attention)
_NAMES = ("q", "k", "v", "scale", "causal", "out_order", "deterministic", "kernel")


def match(node: fx.Node, scope: Scope) -> Union[Site, NotUnderstood, None]:
    """The attention that the op computes."""
    try:
        arguments = bind(node, _NAMES, {})
    except Unbindable as problem:
        return NotUnderstood(node, f"fa_inductor.attention: {problem}")
    tensors = [example_of(arguments[name]) for name in ("q", "k", "v")]
    spec = AttentionSpec(
        *(TensorSpec.of(tensor) for tensor in tensors),
        dtype=tensors[0].dtype,
        causal=arguments["causal"],
        scale=example_of(arguments["scale"]),
        needs_grad=example_of(node)[0].requires_grad,
        deterministic=arguments["deterministic"],
    )
    return Site(node, spec, fixed_kernel=arguments["kernel"])


def move_to_reference(gm: fx.GraphModule) -> None:
    """Let ops that name a GPU kernel run on `reference` where their tensors are on the CPU."""
    for target in ANCHORS:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            if example_of(node.args[0]).device.type == "cpu":
                node.args = (*node.args[:-1], "reference")
    gm.recompile()


def rewrite(site: Site, kernel: str) -> None:
    """Nothing to do: the node is what it should be."""


def examples() -> list[Example]:
    def make() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(2, 4, 6, 8) for _ in range(3))

    arguments = (None, "none", [0, 2, 1, 3], False, "reference")
    return [
        Example("the op", lambda q, k, v: ops.attention(q, k, v, *arguments)[0], make),
        Example(
            "the packet",
            lambda q, k, v: torch.ops.fa_inductor.attention(q, k, v, *arguments)[0],
            make,
        ),
    ]


def counterexamples() -> list[Example]:
    def make() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(2, 4, 6, 8) for _ in range(3))

    return [Example("no attention", lambda q, k, v: q @ k.mT @ v, make, sites=0)]
