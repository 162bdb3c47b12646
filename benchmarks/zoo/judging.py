"""Running an entry: compiled by the backend in bfloat16, judged against float32 eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fa_inductor import Report
from fa_inductor.report import collecting

from .entry import Case, Entry

# Rounding in another order may double an error; below this it is nothing but rounding.
FACTOR = 2.0
FLOORS = {torch.bfloat16: 2e-3, torch.float32: 1e-5}
CALLS = 2  # a second call of the same sizes takes another way through the op


@dataclass(frozen=True)
class Judgement:
    """How far the output is from float32 eager: ours, and PyTorch's eager in the same dtype."""

    report: Report
    error: float
    eager_error: float
    bound: float

    @property
    def right(self) -> bool:
        """False for a NaN, too."""
        return self.error <= self.bound


def judge(
    entry: Entry,
    compile: Callable[[nn.Module], Callable[..., Any]],
    poisoned: Callable[[], AbstractContextManager[None]],
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> Judgement:
    """Run one inference of the entry.

    poisoned: gives a context in which fresh memory holds NaN: what nobody writes then shows.
    dtype: what is compiled; weights and inputs are rounded to it for the float32 copy, too.
    """
    case = entry.build().moved(device, dtype)
    precise = case.moved(device, torch.float32)
    torch._dynamo.reset()
    compiled = compile(case.model)
    with torch.no_grad():
        # cuDNN's convolutions would take TF32, which is hardly better than bfloat16.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            expected = output_of(precise, precise.model)
        eager_error = error_of(output_of(case, case.model), expected)
        with poisoned(), collecting() as report:
            errors = [error_of(output_of(case, compiled), expected) for _ in range(CALLS)]
    # `max` could lose a NaN.
    error = float(torch.tensor(errors).max())
    return Judgement(report, error, eager_error, FACTOR * eager_error + FLOORS[dtype])


def compile_default(model: nn.Module) -> Callable[..., Any]:
    """As a user compiles it; what is left to PyTorch is in the report."""
    return torch.compile(model, backend="fa_inductor", options={"fa.on_fallback": "ignore"})


def output_of(case: Case, model: Callable[..., Any]) -> Tensor:
    """The first output, only those rows of it that count."""
    out = model(**case.inputs)
    first: Tensor = out if isinstance(out, Tensor) else out[0]
    return first if case.rows is None else first[case.rows]


def error_of(actual: Tensor, expected: Tensor) -> float:
    """The distance of the worst row, relative to a row's usual norm: one wrong row shows."""
    actual, expected = actual.detach().double(), expected.detach().double()
    distances = (actual - expected).norm(dim=-1)
    usual = expected.norm(dim=-1).square().mean().sqrt()
    return float(distances.max() / usual)
