"""Run a function compiled and not, on poisoned memory, and compare everything that comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fa_inductor.kernels import reference
from fa_inductor.report import Report
from helpers import kernels_of, run_reported
from poison import poisoned

# float32 sums of a few dozen terms of size 1, taken in another order than eager takes them.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True)
class Outcome:
    """What a compile reported, and how often the kernel really ran in the forward."""

    report: Report
    kernel_calls: int

    @property
    def rewritten_sites(self) -> int:
        return kernels_of(self.report).count("reference")

    @property
    def reasons(self) -> list[str]:
        """Of every fallback."""
        return [text for site in self.report.sites for text in site.reason_texts]


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies with the same strides; those of a float dtype require gradients."""
    return [
        tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors
    ]


def gradients(out: Tensor, wanted: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Of a loss that weighs every element of `out` differently."""
    weight = torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = [tensor for tensor in wanted if tensor.requires_grad]
    return torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True)


def run_poisoned(compiled: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, Outcome]:
    with poisoned(), mock.patch.object(reference, "forward", wraps=reference.forward) as forward:
        result, report = run_reported(compiled, *inputs)
    return result, Outcome(report, forward.call_count)


def compare_forward(
    fn: Callable[..., Any],
    compiled: Callable[..., Any],
    inputs: Sequence[Tensor],
    tolerance: dict[str, float] = TOLERANCE,
) -> Outcome:
    """Without gradients."""
    with torch.no_grad():
        expected = fn(*(tensor.clone() for tensor in inputs))
        actual, outcome = run_poisoned(compiled, inputs)
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, **tolerance)
    return outcome


def compare_with_eager(
    fn: Callable[..., Any],
    compiled: Callable[..., Any],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor] = (),
    tolerance: dict[str, float] = TOLERANCE,
) -> Outcome:
    """Forward, and gradients of the inputs and `parameters`."""
    eager_inputs, our_inputs = leaves(inputs), leaves(inputs)
    expected = fn(*eager_inputs)
    expected_gradients = gradients(expected, [*eager_inputs, *parameters])
    actual, outcome = run_poisoned(compiled, our_inputs)
    with poisoned():
        actual_gradients = gradients(actual, [*our_inputs, *parameters])
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, **tolerance)
    torch.testing.assert_close(actual_gradients, expected_gradients, **tolerance)
    return outcome
