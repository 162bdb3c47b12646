"""`fa-inductor probe --model`: the first bad attention of a model is named, and only a bad one."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from layered_model import LENGTH, WIDTH, Model, break_values_of_one_head
from torch import Tensor, nn

from fa_inductor import cli
from fa_inductor.kernels import reference
from fa_inductor.probing.bisect import Bisection, Statistics, bisect

OPTIONS = {"fa.kernels": ("reference",)}


def make(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    torch.manual_seed(1)
    return Model().to(dtype), (torch.randn(2, LENGTH, WIDTH, dtype=dtype),), {}


def wrong_at(call: int, place: int, value: float) -> Any:
    """The kernel's forward, its `call`-th time with another value in one row of one head."""
    right, count = reference.forward, [0]

    def forward(problem: Any, inputs: Any, out: Tensor, lse: Tensor | None) -> None:
        right(problem, inputs, out, lse)
        count[0] += 1
        if count[0] == call:
            out[1, 2, place] = value

    return forward


def bisected(made: Any) -> Bisection:
    return bisect(*made, OPTIONS)


def test_a_model_that_is_right() -> None:
    found = bisected(make(torch.bfloat16))
    assert found.is_right
    assert [call.direction for call in found.calls] == ["forward"] * 3 + ["backward"] * 3
    assert "All 6 calls of attention are right, and so is the output." in found.verdict()


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
def test_one_bad_row_is_enough(value: float) -> None:
    """Of the second layer: it is named, and not those that come after it."""
    with mock.patch.object(reference, "forward", wrong_at(2, 7, value)):
        found = bisected(make())
    bad = found.first_bad
    assert bad is not None
    assert bad.site.startswith("layers.1 (")
    verdict = found.verdict()
    assert f"The first bad attention is {bad.site} on reference, forward, call 2 of 6" in verdict
    told = "out is wrong by" if math.isfinite(value) else "8 elements of out are not finite"
    assert told in verdict
    assert "q float32 (2, 4, 24, 8) in [" in verdict
    assert not found.is_right


def test_a_bad_gradient() -> None:
    right, count = reference.backward, [0]

    def backward(*args: Any) -> None:
        right(*args)
        count[0] += 1
        if count[0] == 2:
            args[-1].v[0, 0, 3] += 1.0

    with mock.patch.object(reference, "backward", backward):
        found = bisected(make())
    bad = found.first_bad
    assert bad is not None
    assert (bad.site[:8], bad.direction) == ("layers.1", "backward")
    assert "dv is wrong by" in found.verdict()
    assert "grad_out float32" in found.verdict()


def test_a_fault_outside_attention() -> None:
    """The values are NaN before the second layer's attention sees them."""
    model, args, kwargs = make()
    break_values_of_one_head(model.layers[1])
    found = bisected((model, args, kwargs))
    assert found.first_bad is None
    assert not found.is_right
    assert "No attention is at fault: layers.1 (" in found.verdict()
    assert "v (384 elements)" in found.verdict()


def test_a_wrong_output_of_right_attention() -> None:
    found = Bisection(bisected(make()).calls, output_error=0.3, eager_error=1e-6)
    assert not found.is_right
    assert "Every attention is right, and the output is off by 3.0e-01" in found.verdict()


def test_a_model_that_draws() -> None:
    class Noisy(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand_like(x))

    found = bisect(Noisy(), (torch.randn(2, LENGTH, WIDTH),), options=OPTIONS)
    assert found.note == "Two eager runs differ: the output is not compared."
    assert found.is_right


def test_without_attention() -> None:
    found = bisect(torch.nn.Linear(4, 4), (torch.randn(2, 4),), options=OPTIONS)
    assert "there is none to look at" in found.verdict()


def test_the_command() -> None:
    runner = CliRunner()
    given = ["probe", "--model", "test_bisect:make", "--kernels", "reference"]
    result = runner.invoke(cli.main, given)
    assert result.exit_code == 0, result.output
    assert "so is the output" in result.output
    with mock.patch.object(reference, "forward", wrong_at(1, 0, math.nan)):
        result = runner.invoke(cli.main, given)
    assert result.exit_code == 1
    assert "The first bad attention is layers.0" in result.output


def test_statistics() -> None:
    tensor = torch.tensor([[1.0, -3.0, math.nan, math.inf]])
    assert str(Statistics.of(tensor)) == "float32 (1, 4) in [-3, 1], std 2, 2 not finite"
    assert Statistics.of(torch.full((2,), math.nan)).not_finite == 2
