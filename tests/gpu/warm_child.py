"""A fresh process of `test_gpu_warm.py`: `warm_child.py step` and so on. Prints JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import warm_models

import fa_inductor
from fa_inductor import demo
from fa_inductor.kernels import cudnn  # noqa: F401  (its import is no part of what is timed)


def step() -> dict[str, Any]:
    """A training step of the demo and of Llama; no kernel may be compiled. Errors are those of
    eager in float32, ours and of eager as it is."""
    errors = {}
    for name, make in (("demo", demo.make), ("llama", warm_models.llama)):
        torch.manual_seed(0)
        model, args, kwargs = make()
        options = {"fa.on_jit": "error", "fa.kernels": ("fa4",)}
        compiled = torch.compile(model, backend="fa_inductor", options=options)
        ours, eager = (_loss_and_gradients(run, model, args, kwargs) for run in (compiled, model))
        right = _loss_and_gradients(model.float(), model, args, kwargs)
        errors[name] = [_error(ours, right), _error(eager, right)]
    return {"errors": errors}


def _loss_and_gradients(run: Any, model: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    loss = run(*args, **kwargs)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def variants() -> dict[str, Any]:
    """A mask that FA4 evaluates, and variable lengths: other ones than were warmed."""
    options = {"fa.on_jit": "error", "fa.kernels": ("fa4",)}
    errors = {}
    for length in (100, 1000):
        fn, args, _ = warm_models.masked(length)
        compiled = torch.compile(fn, backend="fa_inductor", options=options)
        errors[f"masked {length}"] = _error(
            _differentiated(compiled, args), _differentiated(fn, args)
        )
        of_kernels = [warm_models.variable(kernel, length) for kernel in ("fa4", "reference")]
        args = of_kernels[0][1]
        results = [_differentiated(run, args) for run, _, _ in of_kernels]
        errors[f"variable {length}"] = _error(*results)
    return {"errors": errors}


def _differentiated(fn: Any, args: Any) -> list[torch.Tensor]:
    """The result, and the gradients of q and k."""
    out = fn(*args)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), args[:2])]


def _error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest relative error of any tensor, by its norm."""
    return max(
        float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-6))
        for a, b in zip(ours, theirs, strict=True)
    )


def sweep() -> dict[str, Any]:
    """Every length, forward and backward, causal and not: no kernel may be compiled."""
    fa_inductor.on_jit("error")
    return {"calls": _swept(warm_models.SWEPT, "fa4")}


def plans() -> dict[str, Any]:
    """The same with cuDNN, which builds a plan for each, and none when they come again; and what
    the plans compute."""
    lengths = (64, 100, 1000)
    started = time.perf_counter()
    calls = _swept(lengths, "cudnn")
    seconds = time.perf_counter() - started
    fa_inductor.on_jit("error")
    _swept(lengths, "cudnn")
    errors = {}
    for length in lengths:
        for causal in ("none", "bottom_right"):
            args = tuple(each.transpose(1, 2) for each in warm_models.inputs(2, length, 128))
            ways = [
                functools.partial(warm_models.attend, causal=causal, kernel=kernel)
                for kernel in ("cudnn", "reference")
            ]
            ours, right = (_differentiated(attend, args) for attend in ways)
            errors[f"{causal} {length}"] = _error(ours, right)
    return {"calls": calls, "seconds": seconds, "errors": errors}


def _swept(lengths: Sequence[int], kernel: str) -> int:
    """How many calls of the kernel that is: two for each length and mask."""
    for length in lengths:
        for causal in ("none", "bottom_right"):
            q, k = (each.transpose(1, 2) for each in warm_models.inputs(2, length, 128))
            out = warm_models.attend(q, k, causal, kernel)
            out.backward(torch.randn_like(out))
    torch.cuda.synchronize()
    return 4 * len(lengths)


def first() -> dict[str, Any]:
    """Seconds of the first attention, forward and backward; imports and CUDA's start aside."""
    from fa_inductor.kernels import fa4

    fa4._interface()
    torch.ones(1, device="cuda").sum().item()
    q, k = (each.transpose(1, 2) for each in warm_models.inputs(1, 1024, 128))
    grad_out = torch.randn_like(q)
    torch.cuda.synchronize()
    started = time.perf_counter()
    warm_models.attend(q, k, "bottom_right").backward(grad_out)
    torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    tried = {each.__name__: each for each in (step, variants, sweep, plans, first)}
    said = tried[sys.argv[1]]()
    print(json.dumps({**said, **dataclasses.asdict(fa_inductor.stats())}))
