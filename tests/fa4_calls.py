"""A backend for code that calls FlashAttention-4, where there is no GPU.

Graphs are looked at as Dynamo hands them over, and run with the kernel's name replaced by
"reference".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fa_inductor.patterns import op_call

DENSE = torch.ops.fa_inductor.attention
INFERENCE = torch.ops.fa_inductor.attention_inference
VARLEN = torch.ops.fa_inductor.attention_varlen


class Recorder:
    """Notes each attention op's arguments by name, then has the graph run on the reference kernel.

    ops: the op of each call. outputs: what Dynamo thinks of the graph's outputs.
    """

    def __init__(self) -> None:
        self.ops: list[Any] = []
        self.calls: list[dict[str, Any]] = []
        self.outputs: list[Any] = []
        self.graphs = 0

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        for op in (DENSE, INFERENCE, VARLEN):
            names = [argument.name for argument in op.default._schema.arguments]
            for node in gm.graph.find_nodes(op="call_function", target=op):
                self.ops.append(op)
                self.calls.append({**dict(zip(names, node.args, strict=False)), **node.kwargs})
        op_call.move_to_reference(gm)
        (output,) = gm.graph.find_nodes(op="output")
        self.outputs = [value.meta["example_value"] for value in output.args[0]]
        return gm.forward


def run(fn: Callable[..., Any], *tensors: Tensor, **options: Any) -> tuple[Any, Recorder]:
    """What the compiled function gives, and what was seen of its graphs."""
    recorder = Recorder()
    options.setdefault("fullgraph", True)
    return torch.compile(fn, backend=recorder, **options)(*tensors), recorder


def dense_inputs(grad: bool = False, **options: Any) -> list[Tensor]:
    """FA4's layout (B, S, H, D): four query heads on two, longer keys than queries."""
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16))
    return [torch.randn(shape, requires_grad=grad, **options) for shape in shapes]
