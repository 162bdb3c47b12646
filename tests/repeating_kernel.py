"""A kernel on the CPU whose calls are repeated, and calls for it.

It is the reference with functions that repeat a call; memory on the "current GPU" is the CPU's,
full of NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attention_inputs import attend, lengths, qkv, rng
from torch import Tensor

from fa_inductor import call_cache, kernels, op_calls, ops, torch_compat
from fa_inductor.kernels import reference
from fa_inductor.problem import Gradients, Inputs, Problem
from poison import poisoned

NAME = "repeating"
HERE = -1  # get_device() of a tensor on the CPU


class Repeating:
    """The reference kernel, counting the ways to it."""

    def __init__(self) -> None:
        self.entered, self.repeated = 0, 0

    def forward(
        self, problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor | None
    ) -> Callable[..., None]:
        self.entered += 1
        reference.forward(problem, inputs, out, lse)
        repeat = functools.partial(self.repeat, problem)
        repeat.on_bshd = functools.partial(self.repeat_bshd, problem)
        return repeat

    def repeat(self, problem: Problem, tensors: Sequence[Any]) -> None:
        self.repeated += 1
        out, lse = tensors[8:]
        reference.forward(problem, Inputs(*tensors[:8]), out, lse)

    def repeat_bshd(self, problem: Problem, tensors: Sequence[Any]) -> None:
        q, k, v, out = (tensors[i].transpose(1, 2) for i in (0, 1, 2, 8))
        self.repeat(problem, (q, k, v, *tensors[3:8], out, tensors[9]))

    def backward(self, problem: Problem, inputs: Inputs, *rest: Any) -> Callable[..., None]:
        self.entered += 1
        reference.backward(problem, inputs, *rest)
        return functools.partial(self.repeat_backward, problem)

    def repeat_backward(self, problem: Problem, tensors: Sequence[Any]) -> None:
        self.repeated += 1
        out, lse, grad_out, grad_lse, *grads = tensors[8:]
        inputs = Inputs(*tensors[:8])
        reference.backward(problem, inputs, out, lse, grad_out, grad_lse, Gradients(*grads))

    def ways(self) -> tuple[int, int]:
        return self.entered, self.repeated


def nan(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype).fill_(float("nan"))


def install(monkeypatch: pytest.MonkeyPatch) -> Repeating:
    """Make a kernel known by two names, and begin with nothing remembered."""
    made, load = Repeating(), kernels.load
    mine = {NAME: made, "another": made}
    for name in mine:
        monkeypatch.setitem(kernels.BUILT_IN, name, "not imported")
    monkeypatch.setattr(kernels, "load", lambda name: mine[name] if name in mine else load(name))
    monkeypatch.setattr(torch_compat, "empty_on_current_gpu", nan)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: HERE, raising=False)
    monkeypatch.setattr(op_calls, "calls", call_cache.Calls())
    return made


Call = dict[str, Any]


def plain() -> Call:
    q, k, v = qkv(hkv=2)
    return {"q": q, "k": k, "v": v, "kernel": NAME}


def full() -> Call:
    """A call with all that there is."""
    return {
        **plain(),
        "bias": torch.randn(2, 1, 5, 6),
        "sink": torch.randn(4),
        "seqlens_q": lengths(5, 3),
        "seqlens_k": lengths(2, 6),
        "rng": rng(3, 1),
        "dropout_p": 0.25,
        "window_left": 3,
        "softcap": 2.0,
        "causal": "bottom_right",
        "scale": 0.5,
    }


def differentiated(forward: Call, with_lse: bool = True) -> Call:
    """The call of the gradient op for a call of the attention."""
    out, lse = attend({**forward, "kernel": "reference"})
    grads = {"grad_out": torch.randn_like(out), "grad_lse": torch.randn_like(lse)}
    head = {"scale": None, "causal": "none", "deterministic": False}
    asked = {"bias_grad": "bias" in forward, "sink_grad": "sink" in forward}
    call = {**head, **asked, **forward, **grads, "out": out, "lse": lse}
    return call if with_lse else {**call, "grad_lse": None}


def run(call: Call) -> tuple[Tensor, ...]:
    """The call on its kernel, on poisoned memory, and the same as on the reference."""
    made = []
    for each in (call, {**call, "kernel": "reference"}):
        with poisoned():
            made.append(ops.attention_backward_all(**each) if "grad_out" in call else attend(each))
    results, expected = made
    for result, wanted in zip(results, expected, strict=True):
        assert (result.stride(), result.dtype) == (wanted.stride(), wanted.dtype)
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    return results


def with_changed(**changes: Any) -> Callable[[Call], Call]:
    """Values in place of a call's, or functions of them."""
    return lambda call: {
        **call,
        **{
            name: change(call[name]) if callable(change) else change
            for name, change in changes.items()
        },
    }
