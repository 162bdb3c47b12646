"""What `fa.guard="oracle"` compares with: right results pass in every variant, others do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from masked_cases import CASES as MASKED
from masked_cases import Case
from torch import Tensor
from varlen_inputs import NUMBERS, STARTS, lengths, qkv

from fa_inductor.kernels import reference, reference_masked, reference_varlen, spot_check
from fa_inductor.masked_problem import MaskedCall
from fa_inductor.problem import Gradients, Inputs, Problem
from fa_inductor.varlen_problem import VarlenInputs

# The reference kernel computes in float32, and the comparison in float64.
RIGHT = 1e-5
S, KEYS = 40, 56


def dense(**extras: Any) -> Callable[[], Inputs]:
    def make() -> Inputs:
        sizes = ((2, 4, S, 16), (2, 2, KEYS, 16), (2, 2, KEYS, 8))
        tensors = [torch.randn(size) for size in sizes]
        return Inputs(*tensors, **{name: given() for name, given in extras.items()})

    return make


def some_masked() -> Tensor:
    bias = torch.randn(2, 1, S, KEYS)
    bias[:, :, 3] = -torch.inf
    return bias


def counts(*numbers: int) -> Callable[[], Tensor]:
    return lambda: torch.tensor(numbers, dtype=torch.int32)


PROBLEMS = {
    "plain": (Problem(0.25), dense()),
    "causal": (Problem(0.25, "top_left"), dense()),
    "bottom right": (Problem(0.25, "bottom_right"), dense()),
    "window": (Problem(0.3, "none", 5, 9), dense()),
    "causal window": (Problem(0.3, "bottom_right", 7), dense()),
    "softcap": (Problem(0.5, "top_left", softcap=1.5), dense()),
    "sink": (Problem(0.25), dense(sink=lambda: torch.randn(4))),
    "bias": (Problem(0.25), dense(bias=some_masked)),
    "bias of keys": (Problem(0.25), dense(bias=lambda: torch.randn(1, 4, 1, KEYS))),
    "lengths": (
        Problem(0.25, "bottom_right"),
        dense(seqlens_q=counts(40, 11), seqlens_k=counts(56, 23)),
    ),
}


def results(kernel: Any, problem: Problem, inputs: Any, grad_lse: bool = True) -> tuple[Any, ...]:
    """(out, saved, grads) of a kernel, and what it was given."""
    q, _, v = inputs[:3]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32)
    kernel.forward(problem, inputs, out, lse)
    saved = (out, lse, torch.randn_like(out), torch.randn_like(lse) if grad_lse else None)
    grads = Gradients(*(torch.empty_like(tensor) for tensor in inputs[:3]))
    kernel.backward(problem, inputs, *saved, grads)
    return out, saved, grads


def errors(problem: Problem, inputs: Any, made: tuple[Any, ...]) -> list[float]:
    out, saved, grads = made
    found = (
        spot_check.forward(problem, inputs, out),
        *spot_check.backward(problem, inputs, saved, grads[:3]),
    )
    return [float(each) for each in found]


def assert_told_apart(kernel: Any, problem: Problem, inputs: Any) -> None:
    """Right results are within rounding; each tensor, once wrong, is named."""
    made = results(kernel, problem, inputs)
    assert max(errors(problem, inputs, made)) < RIGHT
    out, saved, grads = made
    for place, tensor in enumerate((out, *grads[:3])):
        before = tensor.clone()
        tensor += torch.randn_like(before) * before.square().mean().sqrt()
        found = errors(problem, inputs, (out, saved, grads))
        tensor.copy_(before)
        assert found[place] > 0.1


@pytest.mark.parametrize("name", PROBLEMS)
def test_dense(name: str) -> None:
    problem, inputs = PROBLEMS[name]
    assert_told_apart(reference, problem, inputs())


@pytest.mark.parametrize(
    ("starts", "numbers"), itertools.product(STARTS, ("plain", "causal window", "softcap"))
)
def test_variable_lengths(starts: str, numbers: str) -> None:
    starts_q, starts_k = STARTS[starts]
    given = {**NUMBERS[numbers]}
    causal = "bottom_right" if given.pop("causal", False) else "none"
    problem = Problem(given.pop("scale", 0.3), causal, **given)
    tensors = qkv(starts_q[-1], starts_k[-1])
    inputs = VarlenInputs(*tensors, lengths(starts_q), lengths(starts_k))
    made = results(reference_varlen, problem, inputs)
    assert max(errors(problem, inputs, made)) < RIGHT


def test_variable_lengths_told_apart() -> None:
    starts_q, starts_k = STARTS["unequal lengths"]
    inputs = VarlenInputs(*qkv(starts_q[-1], starts_k[-1]), lengths(starts_q), lengths(starts_k))
    assert_told_apart(reference_varlen, Problem(0.3), inputs)


@pytest.mark.parametrize("case", MASKED[::3], ids=str)
def test_masks_as_text(case: Case) -> None:
    q, k, v, _ = (tensor.float() for tensor in case.inputs())
    read = case.read()
    blocks = case.blocks(read)
    bytes_read = [t.view(torch.uint8) if t.dtype == torch.bool else t for t in read]
    call = MaskedCall(
        *(q, k, v, case.text, bytes_read, blocks, None, "BHSD", False, "reference"),
        sink=torch.randn(q.shape[1]) if case.sink else None,
        softcap=case.softcap,
    )
    assert_told_apart(reference_masked, call.problem, call.inputs)


def test_gradients_that_cancel() -> None:
    """With one key for all, the weights' slopes cancel: dq is rounding, and no error."""
    inputs = dense()()
    inputs = inputs._replace(k=torch.full_like(inputs.k, 0.25))
    made = results(reference, Problem(0.25), inputs, grad_lse=False)
    assert made[2].q.norm() < 1e-3
    assert max(errors(Problem(0.25), inputs, made)) < RIGHT


def test_inputs_that_are_not_finite() -> None:
    """Nothing can be compared then; that they are not is for "finite" to say."""
    inputs = dense()()
    inputs.v[:] = torch.nan
    made = results(reference, Problem(0.25), inputs)
    assert errors(Problem(0.25), inputs, made)[0] == 0.0
    right = dense()()
    out, saved, grads = results(reference, Problem(0.25), right)
    out[:] = torch.nan
    assert str(errors(Problem(0.25), right, (out, saved, grads))[0]) == "nan"


def test_draws_nothing_from_pytorch() -> None:
    inputs = dense()()
    made = results(reference, Problem(0.25), inputs)
    state = torch.get_rng_state()
    errors(Problem(0.25), inputs, made)
    assert torch.equal(state, torch.get_rng_state())
