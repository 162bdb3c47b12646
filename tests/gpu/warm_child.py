"""A fresh process of `test_gpu_warm.py`: `warm_child.py step|sweep|first`. Prints JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import torch
import warm_models

import fa_inductor
from fa_inductor import demo
from fa_inductor.kernels import cudnn  # noqa: F401  (its import is no part of what is timed)


def step() -> dict[str, Any]:
    """A training step of the demo and of Llama against eager; no kernel may be compiled."""
    errors = {}
    for name, make in (("demo", demo.make), ("llama", warm_models.llama)):
        torch.manual_seed(0)
        model, args, kwargs = make()
        options = {"fa.on_jit": "error", "fa.kernels": ("fa4",)}
        compiled = torch.compile(model, backend="fa_inductor", options=options)
        results = []
        for run in (compiled, model):
            loss = run(*args, **kwargs)
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            model.zero_grad(set_to_none=True)
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        ours, eager = results
        errors[name] = max(
            float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-6))
            for a, b in zip(ours, eager, strict=True)
        )
    return {"errors": errors}


def sweep() -> dict[str, Any]:
    fa_inductor.on_jit("error")
    for length in warm_models.SWEPT:
        for causal in ("none", "bottom_right"):
            q, k = (
                torch.randn(2, length, heads, 128, device="cuda", dtype=torch.bfloat16)
                .transpose(1, 2)
                .requires_grad_()
                for heads in (8, 2)
            )
            warm_models.attend(q, k, causal).sum().backward()
    torch.cuda.synchronize()
    return {"lengths": len(warm_models.SWEPT)}


def first() -> dict[str, Any]:
    """Seconds of the first attention, forward and backward; imports and CUDA's start aside."""
    from fa_inductor.kernels import fa4

    fa4._interface()
    torch.ones(1, device="cuda").sum().item()
    q = torch.randn(1, 1024, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k = torch.randn(1, 1024, 2, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    q.requires_grad_()
    torch.cuda.synchronize()
    started = time.perf_counter()
    warm_models.attend(q, k, "bottom_right").sum().backward()
    torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    said = {"step": step, "sweep": sweep, "first": first}[sys.argv[1]]()
    print(json.dumps({**said, **dataclasses.asdict(fa_inductor.stats())}))
