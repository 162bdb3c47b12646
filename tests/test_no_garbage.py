"""The first call of a class of metadata, which goes the long way, leaves no tensor for the garbage
collector.

CUDA graph trees look at what is alive after they have warmed a graph up. A tensor in a cycle counts
as an output that must stay, until the collector, which they call then, takes it away: they refuse
the graph. A training step under "reduce-overhead" was refused so, in a process where it was the
first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_inputs import lengths
from masked_cases import CASES
from torch import Tensor

from fa_inductor import call_cache, masked_ops, op_calls

ops = torch.ops.fa_inductor


def _dense(kernel: str, transposed: bool = False, **extras: Any) -> list[Tensor]:
    size = (2, 3, 5, 8)
    leaves = [torch.randn(size).requires_grad_() for _ in range(3)]
    given = [leaf.mT.contiguous().mT if transposed else leaf for leaf in leaves]
    out, lse = ops.attention(*given, None, "none", "BSHD", False, kernel, **extras)
    return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)]


def _inference(kernel: str) -> list[Tensor]:
    q, k, v = (torch.randn(2, 5, 3, 8) for _ in range(3))
    return [ops.attention_inference(q, k, v, None, "none", "BSHD", kernel)]


def _packed(kernel: str) -> list[Tensor]:
    leaf = torch.randn(7, 3, 8, requires_grad=True)
    starts = torch.tensor([0, 3, 7]).int()
    numbers = (4, 4, None, "none", False, kernel)
    out, _ = ops.attention_varlen(leaf, leaf, leaf, starts, starts, *numbers)
    return [out, *torch.autograd.grad(out.sum(), leaf)]


def _masked(kernel: str) -> list[Tensor]:
    case = CASES[0]
    q, k, v, grad = (each.float().requires_grad_() for each in case.inputs("cpu"))
    read = case.read("cpu")
    blocks = case.blocks(read, "cpu")
    numbers = (case.dims[0] ** -0.5, "BSHD", False, kernel)
    out, _ = masked_ops.attention_masked(q, k, v, case.text, read, blocks, *numbers)
    return [out, *torch.autograd.grad(out, (q, k, v), grad.detach())]


RUNS: dict[str, Callable[[str], list[Tensor]]] = {
    "dense": _dense,
    "repaired": lambda kernel: _dense(kernel, transposed=True),
    "bias": lambda kernel: _dense(kernel, bias=torch.randn(2, 1, 5, 5, requires_grad=True)),
    "sequence lengths": lambda kernel: _dense(kernel, seqlens_k=lengths(3, 5)),
    "inference": _inference,
    "variable lengths": _packed,
    "mask as text": _masked,
}


@pytest.mark.parametrize("guard", ["", "@oracle,warn,1@here"])
@pytest.mark.parametrize("name", RUNS)
def test_no_tensor_is_left(name: str, guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_calls, "calls", call_cache.Calls())
    RUNS[name]("reference")  # what is imported and made once
    monkeypatch.setattr(op_calls, "calls", call_cache.Calls())
    gc.collect()
    gc.freeze()  # what other tests have left is none of this one's
    gc.disable()
    try:
        made = RUNS[name]("reference" + guard)
        assert all(tensor.isfinite().all() for tensor in made)
        del made
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [tuple(each.shape) for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
