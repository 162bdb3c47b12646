"""User code that calls FlashAttention-4 itself: it traces, launches, and is FA4 bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flash_attn.cute import flash_attn_func

import fa_inductor  # noqa: F401
from helpers import relative_error
from poison import poison_cuda_free_memory

BACKENDS = ("inductor", "fa_inductor")


def _inputs(length: int, *, grad: bool = False, heads: int = 16) -> list[torch.Tensor]:
    return [
        torch.randn(1, length, heads, 128, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)
        for _ in range(3)
    ]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_attn_func(q, k, v, causal=False)[0]


def _poisoned(run: Callable[[], Any]) -> Any:
    poison_cuda_free_memory()
    return run()


@pytest.mark.parametrize("length", [4096, 16384, 65536])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_is_bitwise_eager(backend: str, length: int) -> None:
    q, k, v = _inputs(length)
    with torch.no_grad():
        expected = _attend(q, k, v)
        compiled = torch.compile(_attend, fullgraph=True, backend=backend)
        for _ in range(2):
            actual = _poisoned(lambda: compiled(q, k, v))
            assert torch.isfinite(actual).all()
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("length", [4096, 16384, 65536])
def test_deterministic_gradients_are_bitwise_eager(length: int) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=False, deterministic=True)[0]

    inputs = _inputs(length, grad=True)
    grad_out = torch.randn(1, length, 16, 128, device="cuda", dtype=torch.bfloat16)
    expected = torch.autograd.grad(attend(*inputs), inputs, grad_out)
    compiled = torch.compile(attend, fullgraph=True, backend="fa_inductor")
    actual = _poisoned(lambda: torch.autograd.grad(compiled(*inputs), inputs, grad_out))
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("length", [4096, 16384])
def test_gradients_match_eager(length: int) -> None:
    """Without `deterministic` FA4 adds dQ up in any order: equal to bf16 rounding only."""
    inputs = _inputs(length, grad=True)
    grad_out = torch.randn(1, length, 16, 128, device="cuda", dtype=torch.bfloat16)
    expected = torch.autograd.grad(_attend(*inputs), inputs, grad_out)
    compiled = torch.compile(_attend, fullgraph=True, backend="fa_inductor")
    actual = _poisoned(lambda: torch.autograd.grad(compiled(*inputs), inputs, grad_out))
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative_error(ours, theirs) < 4e-3  # one bf16 rounding is 2^-8 = 3.9e-3


def test_difference_from_core_is_the_bf16_noise_floor() -> None:
    q, k, v = _inputs(4096)
    compiled = torch.compile(_attend, fullgraph=True, backend="fa_inductor")
    with torch.no_grad():
        actual = _poisoned(lambda: compiled(q, k, v))
        core = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    difference = (actual - core.transpose(1, 2)).abs().max().item()
    print(f"max-abs difference from core at S=4096: {difference:.2e}")
    assert difference <= 1e-3


@pytest.mark.parametrize(
    "given",
    [
        {"window_size": (100, None)},
        {"window_size": (64, 30)},
        {"window_size": (64, -1), "causal": True},
        {"softcap": 5.0},
        {"learnable_sink": torch.linspace(-1, 2, 4)},
    ],
    ids=str,
)
def test_carried_arguments_are_eager_s(given: dict[str, Any]) -> None:
    """Windows as FA4 resolves them, softcap and sink: bit by bit, the sink's gradient close."""
    inputs = _inputs(300, grad=True, heads=4)
    sink = [given["learnable_sink"].cuda().requires_grad_()] if "learnable_sink" in given else []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *sink: torch.Tensor) -> Any:
        rest = {"learnable_sink": sink[0]} if sink else {}
        return flash_attn_func(q, k, v, deterministic=True, **{**given, **rest})[0]

    leaves = [*inputs, *sink]
    grad_out = torch.randn_like(inputs[0])
    expected = attend(*leaves)
    wanted = torch.autograd.grad(expected, leaves, grad_out)
    compiled = torch.compile(attend, fullgraph=True, backend="fa_inductor")
    actual = _poisoned(lambda: compiled(*leaves))
    assert torch.equal(actual, expected)
    grads = _poisoned(lambda: torch.autograd.grad(actual, leaves, grad_out))
    assert all(map(torch.equal, grads[:3], wanted[:3]))
    assert all(relative_error(*pair) < 1e-4 for pair in zip(grads[3:], wanted[3:], strict=True))
    with torch.no_grad():  # without a gradient to come, the op of inference
        out = _poisoned(lambda: compiled(*(t.detach() for t in leaves)))
        assert torch.equal(out, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_lse_gradient_matches_eager(causal: bool) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flash_attn_func(q, k, v, causal=causal, deterministic=True, return_lse=True)

    inputs = _inputs(512, grad=True, heads=4)
    weights = (torch.randn(1, 512, 4, 128, device="cuda"), torch.randn(1, 4, 512, device="cuda"))

    def loss(outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return sum((o.float() * w).sum() for o, w in zip(outputs, weights, strict=True))

    expected = torch.autograd.grad(loss(attend(*inputs)), inputs)
    compiled = torch.compile(attend, fullgraph=True, backend="fa_inductor")
    actual = _poisoned(lambda: torch.autograd.grad(loss(compiled(*inputs)), inputs))
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_an_argument_that_is_not_carried_runs_eagerly_and_right() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q * 1, k, v, pack_gqa=False)[0]

    q, k, v = _inputs(512, heads=4)
    with torch.no_grad():
        expected = attend(q, k, v)
        compiled = torch.compile(attend, backend="fa_inductor")
        out = _poisoned(lambda: compiled(q, k, v))
        assert torch.equal(out, expected)


def test_cuda_graphs_replay_with_changed_inputs() -> None:
    q, k, v = _inputs(4096)
    compiled = torch.compile(
        _attend, fullgraph=True, backend="fa_inductor", options={"fa.mode": "reduce-overhead"}
    )
    with torch.no_grad():
        for _ in range(5):
            for tensor in (q, k, v):
                tensor.normal_()
            expected = _attend(q, k, v)
            out = compiled(q, k, v)
            assert torch.equal(out, expected)
