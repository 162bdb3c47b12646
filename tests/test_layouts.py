"""Layouts of whole models: packed projections and channels-last convolutions around attention.

The rewritten output must be laid out as the traced one was, because user code depends on it:
`view` works or raises by it. Eager decides; nothing here says which layout is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers import compile_quick, compile_reference, kernels_of, run_reported
from poison import poisoned

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 6, 8
WIDTH = HEADS * HEAD_DIM


def _attention_of(heads: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], Tensor]:
    """(B, S, 3E) -> (B, S, E), joined by `view`, which is particular about strides."""

    def run(packed: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*heads(packed), is_causal=True)
        return out.transpose(1, 2).view(BATCH, LENGTH, WIDTH)

    return run


def _three_first(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.view(BATCH, LENGTH, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4).unbind(0)


def _three_last(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.view(BATCH, LENGTH, HEADS, HEAD_DIM, 3).permute(4, 0, 2, 1, 3).unbind(0)


def _interleaved(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.view(BATCH, LENGTH, HEADS, 3 * HEAD_DIM).transpose(1, 2).chunk(3, dim=-1)


def _chunked(packed: Tensor) -> tuple[Tensor, ...]:
    parts = packed.chunk(3, dim=-1)
    return tuple(part.view(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2) for part in parts)


def _made_contiguous(packed: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.contiguous() for part in _chunked(packed))


_PACKINGS = {
    "(S, 3, H, D)": _three_first,
    "(S, H, D, 3)": _three_last,
    "(S, H, 3·D)": _interleaved,
    "three chunks": _chunked,
    "contiguous heads": _made_contiguous,
}


def _result_or_error(run: Callable[[], Tensor]) -> Tensor | None:
    """What `run` gives; None where `view` refuses the strides."""
    try:
        return run()
    except RuntimeError as error:  # Dynamo's errors are RuntimeErrors as well
        if "view" not in str(error):
            raise
        return None


@pytest.mark.parametrize("packing", _PACKINGS)
def test_view_of_packed_attention_works_exactly_when_eager_does(packing: str) -> None:
    """ST-05: out of one Linear, through views, and back by `view`, gradients included."""
    linear = nn.Linear(WIDTH, 3 * WIDTH)
    attention = _attention_of(_PACKINGS[packing])
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    wanted = [x, *linear.parameters()]
    with poisoned():
        expected = _result_or_error(lambda: attention(linear(x)))
        compiled = compile_reference(lambda x: attention(linear(x)))
        result, report = run_reported(lambda: _result_or_error(lambda: compiled(x)))
        assert (result is None) == (expected is None)
        if expected is None or result is None:
            return
        weight = torch.randn_like(expected)
        expected_grads = torch.autograd.grad(expected, wanted, weight)
        grads = torch.autograd.grad(result, wanted, weight)
    assert kernels_of(report) == ["reference"]
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
def test_output_is_laid_out_as_in_eager(order: tuple[int, ...]) -> None:
    """ST-04: for every order of (B, H, S) in memory, seen from inside the graph and outside."""
    q, k, v = (
        torch.empty_permuted((BATCH, HEADS, LENGTH, HEAD_DIM), (*order, 3)).normal_()
        for _ in range(3)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = F.scaled_dot_product_attention(q, k, v)
        # as_strided reads memory as it lies, so that a wrong stride gives wrong numbers.
        return out, out.as_strided((out.numel(),), (1,)) * 1

    expected, expected_memory = attend(q, k, v)
    with poisoned():
        (result, memory), report = run_reported(compile_quick(attend), q, k, v)
    assert kernels_of(report) == ["reference"]
    assert result.stride() == expected.stride()
    torch.testing.assert_close((result, memory), (expected, expected_memory))


class _ConvolutionHeads(nn.Module):
    """Three 1x1 convolutions whose width axis is the head dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(4, 4, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = (conv(x).permute(0, 2, 1, 3) for conv in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(*heads)


class _Windows(nn.Module):
    """Convolution, attention inside 4x4 windows, convolution: a small MaxViT block."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(8, 24, 3, padding=1)
        self.out = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, height, width = x.shape
        windows = (b, 3, 2, 4, height // 4, 4, width // 4, 4)  # 3, heads, D, rows and columns
        heads = self.qkv(x).reshape(windows).permute(1, 0, 4, 6, 2, 5, 7, 3)
        q, k, v = heads.reshape(3, -1, 2, 16, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        out = out.reshape(b, height // 4, width // 4, 2, 4, 4, 4).permute(0, 3, 6, 1, 4, 2, 5)
        return self.out(out.reshape(b, 8, height, width))


@pytest.mark.parametrize(
    ("make", "shape", "memory_format"),
    [
        (_ConvolutionHeads, (1, 4, 8, 8), torch.contiguous_format),
        (_ConvolutionHeads, (1, 4, 8, 8), torch.channels_last),
        (_Windows, (2, 8, 8, 8), torch.channels_last),
    ],
    ids=["1x1 convolutions", "1x1 convolutions, channels last", "windows, channels last"],
)
def test_convolutions_around_attention(
    make: Callable[[], nn.Module], shape: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    """ST-06 and ST-07: whatever layout Inductor picks for the convolutions, forward and backward
    read the right elements, also for a gradient that has other strides than the output."""
    module = make().to(memory_format=memory_format)
    x = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
    wanted = [x, *module.parameters()]
    with poisoned():
        expected = module(x)
        result, report = run_reported(compile_reference(module), x)
        assert kernels_of(report) == ["reference"]
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        weight = torch.randn_like(expected)
        strided = weight.transpose(0, 1).contiguous().transpose(0, 1)
        for grad_out in (weight, strided, torch.ones(()).expand(expected.shape)):
            expected_grads = torch.autograd.grad(expected, wanted, grad_out, retain_graph=True)
            grads = torch.autograd.grad(result, wanted, grad_out, retain_graph=True)
            torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)
    assert result.stride() == expected.stride()
