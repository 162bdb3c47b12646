"""What the tests share: compile on the reference kernel, and compare with float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fa_inductor import compile_pass
from fa_inductor.config import Config
from fa_inductor.report import Report, collecting

REFERENCE: dict[str, Any] = {"fa.kernels": ("reference",), "fa.on_fallback": "ignore"}


def compile_reference(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`fn` compiled by the real backend, Inductor included, on the reference kernel."""
    dynamic = options.pop("dynamic", None)
    fullgraph = options.pop("fullgraph", True)
    return torch.compile(
        fn,
        backend="fa_inductor",
        fullgraph=fullgraph,
        dynamic=dynamic,
        options={**REFERENCE, **options},
    )


def compile_quick(
    fn: Callable[..., Any], *, dynamic: bool | None = None, fullgraph: bool = True, **config: Any
) -> Callable[..., Any]:
    """`fn` through the pass and AOTAutograd, without Inductor's code generation: much faster."""
    from torch._dynamo.backends.debugging import aot_eager

    settings = Config(**{"kernels": ("reference",), "on_fallback": "ignore", **config})

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compile_pass.run(gm, settings)
        return aot_eager(gm, example_inputs)

    return torch.compile(fn, backend=backend, fullgraph=fullgraph, dynamic=dynamic)


def run_reported(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Report]:
    """The result of a call, and the report of what it compiled."""
    with collecting() as report:
        result = compiled(*args, **kwargs)
    return result, report


def kernels_of(report: Report) -> list[str | None]:
    """The kernel of each site, None for a fallback."""
    return [site.kernel for site in report.sites]


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: str = "none",
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v in float64 on (B, H, S, D), differentiable, grouped heads repeated.

    causal: "none", "top_left" or "bottom_right". Rows without a key give 0.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    sq, sk = scores.shape[-2:]
    if causal != "none":
        offset = sk - sq if causal == "bottom_right" else 0
        masked = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(1 + offset)
        scores = scores.masked_fill(masked, float("-inf"))
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.where(empty, 0.0, scores.masked_fill(empty, 0.0).softmax(-1))
    return weights @ v


def clone_inputs(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Leaf copies with the same strides, for a second backward."""
    copies = []
    for tensor in tensors:
        leaf = copy.deepcopy(tensor.detach())
        leaf = leaf.to(dtype) if dtype is not None else leaf
        copies.append(leaf.requires_grad_(tensor.requires_grad))
    return copies


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-300))
