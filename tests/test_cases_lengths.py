"""Cases about lengths that change: symbols stay in the graph, numbers reach the kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comparison import TOLERANCE
from fa_inductor.kernels import reference
from fa_inductor.problem import Inputs, Problem
from helpers import compile_quick, compile_reference, oracle, run_reported
from poison import poisoned

BOTH_ROUTES = pytest.mark.parametrize("compiler", [compile_quick, compile_reference])
attend = F.scaled_dot_product_attention


@pytest.fixture
def concrete_calls() -> Iterator[list[dict[str, Any]]]:
    """Every call of the kernel, which must see real tensors and plain numbers only."""
    calls: list[dict[str, Any]] = []
    forward, backward = reference.forward, reference.backward

    def check(tensors: Sequence[Tensor | None], problem: Problem) -> None:
        for tensor in tensors:
            assert tensor is None or type(tensor) is Tensor
            sizes = () if tensor is None else (*tensor.shape, *tensor.stride())
            assert all(type(size) is int for size in sizes)
        for number in dataclasses.astuple(problem):
            assert type(number) in (float, int, str, bool, type(None))
        assert type(problem.scale) is float

    def checked_forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor | None) -> None:
        check((*inputs, out, lse), problem)
        calls.append({"q": tuple(inputs.q.shape), "scale": problem.scale})
        forward(problem, inputs, out, lse)

    def checked_backward(problem: Problem, inputs: Inputs, *others: Any) -> None:
        *saved, grads = others
        check((*inputs, *saved, *grads), problem)
        backward(problem, inputs, *others)

    with (
        mock.patch.object(reference, "forward", checked_forward),
        mock.patch.object(reference, "backward", checked_backward),
    ):
        yield calls


Split = Callable[..., Sequence[Tensor]]


def one_projection(x: Tensor) -> Sequence[Tensor]:
    """q, k and v of one (B, 3 H, S, D) tensor, so of one length by construction."""
    return x.chunk(3, dim=1)


def three_inputs(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    return q, k, v


SPLITS = pytest.mark.parametrize("split", [one_projection, three_inputs])


def attention_of(split: Split, *, causal: bool = False) -> Callable[..., Tensor]:
    def attention(*inputs: Tensor) -> Tensor:
        q, k, v = split(*inputs)
        return attend(q, k, v, is_causal=causal)

    return attention


def attention_with_causal_from_the_length(split: Split) -> Callable[..., Tensor]:
    def attention(*inputs: Tensor) -> Tensor:
        q, k, v = split(*inputs)
        if q.shape[2] > 1:
            return attend(q, k, v, is_causal=True)
        return attend(q, k, v, is_causal=False)

    return attention


def graphs_for(
    compiled: Callable[..., Any],
    split: Split,
    size: tuple[int, int, int, int],
    *,
    causal: str = "none",
    dynamic: Sequence[int] = (),
) -> int:
    """Check one call, gradients included; returns how many graphs it compiled."""
    b, h, s, d = size
    shapes = [(b, 3 * h, s, d)] if split is one_projection else [size] * 3
    ours = [torch.randn(shape, requires_grad=True) for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    for tensor in ours:
        torch._dynamo.mark_dynamic(tensor, list(dynamic))
    with poisoned():
        out, report = run_reported(compiled, *ours)
        grads = torch.autograd.grad(out.square().sum(), ours)
    expected = oracle(*split(*exact), causal=causal)
    expected_grads = torch.autograd.grad(expected.square().sum(), exact)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected_grad, **TOLERANCE)
    return len(report.graphs)


@BOTH_ROUTES
def test_no_symbol_reaches_the_kernel(
    compiler: Callable[..., Any], concrete_calls: list[dict[str, Any]]
) -> None:
    """dynamic=True and two lengths: one graph, and ints by the time that it runs (GB-04)."""
    compiled = compiler(attention_of(three_inputs), dynamic=True)
    sizes = [(1, 4, 96, 16), (1, 4, 50, 16)]
    assert [graphs_for(compiled, three_inputs, size) for size in sizes] == [1, 0]
    assert [call["q"] for call in concrete_calls] == sizes


@pytest.mark.parametrize("dynamic", [(), (3,)], ids=["plain", "head dim marked"])
@BOTH_ROUTES
def test_the_default_scale_follows_the_head_dim(
    compiler: Callable[..., Any], dynamic: Sequence[int], concrete_calls: list[dict[str, Any]]
) -> None:
    """1/sqrt(D) of each call, whichever D the graph was traced with (DY-01)."""
    compiled = compiler(attention_of(one_projection), dynamic=True)
    for size in ((2, 3, 98, 32), (4, 5, 90, 16)):
        graphs_for(compiled, one_projection, size, dynamic=dynamic)
    assert [call["scale"] for call in concrete_calls] == pytest.approx([32**-0.5, 16**-0.5])


LENGTHS = (64, 65, 127, 128, 129, 400, 2)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@SPLITS
def test_one_graph_for_all_lengths(split: Split, causal: bool) -> None:
    """Nothing is specialised on a multiple of 128, nor on anything but length 1 (DY-02)."""
    compiled = compile_quick(attention_of(split, causal=causal))
    kind = "top_left" if causal else "none"
    graphs = [graphs_for(compiled, split, (2, 2, s, 16), causal=kind, dynamic=[2]) for s in LENGTHS]
    assert graphs == [1, *[0] * (len(LENGTHS) - 1)]
    assert graphs_for(compiled, split, (2, 2, 1, 16)) == 1


@SPLITS
def test_causal_from_a_length(split: Split) -> None:
    """A static graph, a dynamic one, one for length 1, and then no more (GB-05)."""
    compiled = compile_quick(attention_with_causal_from_the_length(split))
    graphs = [
        graphs_for(compiled, split, (1, 2, s, 16), causal="top_left") for s in (200, 100, 1, 77)
    ]
    assert sum(graphs) <= 3
    assert graphs[-1] == 0


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_broadcast_bias_stays_small(
    training: bool, concrete_calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ST-12: a float mask (1, 1, 1, S) is never made (B, H, S, S), and no length is refused for
    its alignment: at 64 divisible by 8, at 51 and 50 not, in one dynamic graph."""
    sizes: list[torch.Size] = []
    forward = reference.forward

    def noted(problem: Problem, inputs: Inputs, *others: Any) -> None:
        assert inputs.bias is not None
        sizes.append(inputs.bias.shape)
        forward(problem, inputs, *others)

    monkeypatch.setattr(reference, "forward", noted)
    compiled = compile_quick(lambda q, k, v, mask: attend(q, k, v, mask), dynamic=True)
    for length in (64, 51, 50):
        operands = [torch.randn(1, 3, length, 16).requires_grad_(training) for _ in range(3)]
        mask = torch.randn(1, 1, 1, length)
        with poisoned():
            out, report = run_reported(compiled, *operands, mask)
        expected = attend(*operands, mask)
        torch.testing.assert_close(out, expected, **TOLERANCE)
        assert len(report.graphs) == (1 if length == 64 else 0)
        if training:
            ours, theirs = (torch.autograd.grad(each.sum(), operands) for each in (out, expected))
            torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert sizes == [torch.Size((1, 1, 1, length)) for length in (64, 51, 50)]


@pytest.mark.parametrize("dynamic", [(), (2,)], ids=["seen to change", "marked"])
@SPLITS
def test_lengths_that_change_stay_on_the_kernel(
    split: Split, dynamic: Sequence[int], concrete_calls: list[dict[str, Any]]
) -> None:
    """A length that has become symbolic is no reason to leave the kernel (GB-05, DY-02)."""
    compiled = compile_quick(attention_of(split))
    for length in (64, 65, 129):
        graphs_for(compiled, split, (2, 2, length, 16), dynamic=dynamic)
    assert [call["q"][2] for call in concrete_calls] == [64, 65, 129]
