"""One process of `test_guards.py`: import modules in a given order, then compile calls of FA4.

Usage: python guards_child.py MODULE,MODULE,... REFERENCE,REFERENCE,...
References to its functions are taken the moment that flash_attn.cute has been imported.
Prints a JSON list: for each reference asked for, how many attention ops its graph has.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

global_reference: Any = None


def references(cute: Any) -> dict[str, Callable[..., Any]]:
    """Functions of (q, k, v) that reach FA4's in different ways."""
    global global_reference
    global_reference = flash_attn_func = cute.flash_attn_func
    flash_attn_varlen_func = cute.flash_attn_varlen_func
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
        "varlen": lambda q, k, v: packed(flash_attn_varlen_func, q, k, v),
    }


def packed(varlen: Callable[..., Any], q: Any, k: Any, v: Any) -> tuple[torch.Tensor, Any]:
    """Each sequence of the batch by `flash_attn_varlen_func`."""
    batch, length = q.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32) * length
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    out, lse = varlen(q, k, v, None, starts, starts, length, length)
    return out.unflatten(0, (batch, length)), lse


def ops_in_graph(call: Callable[..., Any]) -> int:
    # Only now: what is imported first is what is tested.
    from fa4_calls import run

    torch._dynamo.reset()
    q = torch.randn(2, 4, 2, 8)
    (out, _), recorder = run(call, q, q, q)
    assert out.shape == q.shape
    return len(recorder.calls)


def main() -> None:
    calls: dict[str, Callable[..., Any]] = {}
    for name in sys.argv[1].split(","):
        module = importlib.import_module(name)
        if name == "flash_attn.cute":
            calls = references(module)
    print(json.dumps([ops_in_graph(calls[name]) for name in sys.argv[2].split(",")]))


if __name__ == "__main__":
    main()
