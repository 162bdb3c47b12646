"""One process of `test_guards.py`: import modules in a given order, then compile calls of FA4.

Usage: python guards_child.py MODULE,MODULE,... REFERENCE,REFERENCE,...
References to `flash_attn_func` are taken the moment that flash_attn.cute has been imported.
Prints a JSON list: for each reference asked for, how many attention ops its graph has.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

global_reference: Any = None


def references(flash_attn_func: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Functions of (q, k, v) that reach `flash_attn_func` in different ways."""
    global global_reference
    global_reference = flash_attn_func
    partial = functools.partial(flash_attn_func, causal=True)
    holder = SimpleNamespace(attend=flash_attn_func)
    table = {"attend": flash_attn_func}
    return {
        "itself": flash_attn_func,
        "global": lambda q, k, v: global_reference(q, k, v),
        "closure": lambda q, k, v: flash_attn_func(q, k, v),
        "partial": lambda q, k, v: partial(q, k, v),
        "attribute": lambda q, k, v: holder.attend(q, k, v),
        "dict": lambda q, k, v: table["attend"](q, k, v),
    }


def ops_in_graph(call: Callable[..., Any]) -> int:
    found: list[fx.Node] = []

    def recording(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.fa_inductor.attention):
            found.append(node)
            node.args = (*node.args[:-1], "reference")
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    q = torch.randn(1, 4, 2, 8)
    out, _ = torch.compile(call, backend=recording, fullgraph=True)(q, q, q)
    assert out.shape == q.shape
    return len(found)


def main() -> None:
    calls: dict[str, Callable[..., Any]] = {}
    for name in sys.argv[1].split(","):
        module = importlib.import_module(name)
        if name == "flash_attn.cute":
            calls = references(module.flash_attn_func)
    print(json.dumps([ops_in_graph(calls[name]) for name in sys.argv[2].split(",")]))


if __name__ == "__main__":
    main()
