"""Layouts through compiled models: what conv nets, packed projections and caches hand over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_inductor.kernels import cudnn
from helpers import kernels_of, oracle, relative_error, run_reported
from poison import poison_cuda_free_memory

KERNELS = ("fa4", "cudnn")
TOLERANCE = 8e-3  # bf16: scores, weights and output are each rounded to 8 bits
both_kernels = pytest.mark.parametrize("kernel", KERNELS)


def _compile(fn: Any, kernel: str, **options: Any) -> Any:
    options = {"fa.kernels": (kernel,), "fa.on_fallback": "error", **options}
    return torch.compile(fn, backend="fa_inductor", fullgraph=True, options=options)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _close(ours: Sequence[Tensor], precise: Sequence[Tensor], *eager: Sequence[Tensor]) -> None:
    """Not further from float32 than twice what bfloat16 eager is."""
    for actual, wanted, *plain in zip(ours, precise, *eager, strict=True):
        assert torch.isfinite(actual).all()
        bound = max(TOLERANCE, *(2 * relative_error(each, wanted) for each in plain))
        assert relative_error(actual, wanted) < bound


def _step(fn: Callable[..., Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    out = fn(*leaves)
    weight = torch.linspace(-1, 2, out.numel(), device="cuda").view(out.shape)
    return [out, *torch.autograd.grad((out.float() * weight).sum(), leaves)]


def _check(
    fn: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    kernel: str,
    same: Callable[..., Tensor] | None = None,
) -> None:
    """Forward and gradients of `fn`, compiled on `kernel`.

    same: `fn` in other layouts, for what those cost in accuracy outside the attention.
    """
    leaves = [leaf.requires_grad_() for leaf in leaves]
    precise = _step(fn, [leaf.detach().float().requires_grad_() for leaf in leaves])
    eager = [_step(each, leaves) for each in (fn, same or fn)]
    compiled = _compile(fn, kernel)
    poison_cuda_free_memory(0.2)
    ours, report = run_reported(lambda: _step(compiled, leaves))
    assert kernels_of(report) == [kernel]
    _close(ours, precise, *eager)


@both_kernels
def test_a_view_after_the_attention(kernel: str) -> None:
    """ST-05: the output lies as eager's does, so transposing and viewing needs no copy."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (part.view(2, 128, 8, 64).transpose(1, 2) for part in (x @ w).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).view(2, 128, 512)

    _check(block, (_randn(2, 128, 512), _randn(512, 1536) / 22), kernel)


@both_kernels
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_heads_from_a_convolution(kernel: str, memory_format: torch.memory_format) -> None:
    """ST-06: the head dim is the width of an image, which channels-last does not keep innermost."""
    images = _randn(1, 4, 32, 32).to(memory_format=memory_format)
    weights = [(_randn(4, 4, 1, 1) / 2).to(memory_format=memory_format) for _ in range(3)]

    def block(x: Tensor, *kernels: Tensor) -> Tensor:
        q, k, v = (F.conv2d(x, w).permute(0, 2, 1, 3) for w in kernels)
        return F.scaled_dot_product_attention(q, k, v)

    def copying(x: Tensor, *kernels: Tensor) -> Tensor:
        """Gives convolutions the layout of gradients that ours does."""
        q, k, v = (F.conv2d(x, w).contiguous().permute(0, 2, 1, 3) for w in kernels)
        return F.scaled_dot_product_attention(q, k, v)

    _check(block, (images, *weights), kernel, copying)


@both_kernels
def test_windows_of_a_channels_last_model(kernel: str) -> None:
    """ST-07: convolution, attention in windows of 49 tokens, convolution, trained."""

    def block(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        x = F.conv2d(x, first)  # (2, 64, 14, 14)
        windows = x.view(2, 2, 32, 2, 7, 2, 7).permute(0, 3, 5, 1, 4, 6, 2)
        tokens = windows.reshape(8, 2, 49, 32)
        out = F.scaled_dot_product_attention(tokens, tokens * 0.5, tokens + 1)
        image = out.view(2, 2, 2, 2, 7, 7, 32).permute(0, 3, 6, 1, 4, 2, 5).reshape(2, 64, 14, 14)
        return F.conv2d(image, last)

    images = _randn(2, 8, 14, 14).to(memory_format=torch.channels_last)
    _check(block, (images, _randn(64, 8, 1, 1) / 3, _randn(8, 64, 1, 1) / 8), kernel)


@both_kernels
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_in_any_order_of_calls(kernel: str, dim: int) -> None:
    """ST-01: contiguous then strided, strided then contiguous, strided twice."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    strided = (_randn(1, 24, 256, dim), _randn(1, 4, 256, dim))
    whole = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in strided]
    v = _randn(1, 256, 4, dim).transpose(1, 2)
    wanted = oracle(*strided, v)
    for order in ((whole, strided), (strided, whole), (strided, strided)):
        torch._dynamo.reset()
        compiled = _compile(attend, kernel)
        with torch.no_grad():
            for q, k in order:
                poison_cuda_free_memory(0.1)
                out = compiled(q, k, v)
                assert relative_error(out, wanted) < TOLERANCE


def test_a_growing_cache_on_cudnn() -> None:
    """DY-03: a plan for each length, of which so many are kept; right after one is built again."""
    compiled = _compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), "cudnn")
    q, cache = _randn(1, 4, 1, 64), _randn(1, 4, 512, 64)
    lengths = [*range(100, 100 + cudnn.CAPACITY + 8), 100, 101]
    built = cudnn.statistics.built
    with torch.no_grad():
        for count, length in enumerate(lengths):
            keys = cache[:, :, :length]
            out, report = run_reported(compiled, q, keys, keys)
            assert count < 2 or not report.graphs
            assert relative_error(out, oracle(q, keys, keys)) < TOLERANCE
    assert cudnn.statistics.built - built <= len(lengths)
    device = cudnn._devices.by_index[q.get_device()]
    assert len(device.plans) <= cudnn.CAPACITY


def test_no_window_is_none() -> None:
    """PM-09: -1 for "no window" beside causal would be an empty band to FA4."""
    q, k, v = (_randn(2, 8, 1024, 128).requires_grad_() for _ in range(3))
    compiled = _compile(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True), "fa4")
    out, _ = run_reported(compiled, q, k, v)
    assert out.abs().max() > 0
    assert relative_error(out, oracle(q, k, v, causal="top_left")) < TOLERANCE
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(grad.abs().max() > 0 for grad in grads)


def test_multihead_attention_with_masks_and_dropout_trains() -> None:
    """nn.MultiheadAttention on cuDNN: both masks, then dropout."""
    module = nn.MultiheadAttention(256, 4, batch_first=True).to("cuda", torch.bfloat16)
    x = _randn(2, 96, 256)
    padding = torch.zeros(2, 96, dtype=torch.bool, device="cuda")
    padding[1, 80:] = True
    hidden = torch.ones(96, 96, dtype=torch.bool, device="cuda").triu(1)

    def attend(x: Tensor) -> Tensor:
        masks = {"key_padding_mask": padding, "attn_mask": hidden}
        return module(x, x, x, need_weights=False, **masks)[0]

    expected = attend(x)
    out, report = run_reported(_compile(attend, "cudnn"), x)
    assert kernels_of(report) == ["cudnn"]
    assert relative_error(out, expected) < 2 * TOLERANCE
    module.dropout = 0.5
    module.train()
    torch._dynamo.reset()
    compiled = _compile(attend, "cudnn")
    torch.manual_seed(1)
    once = compiled(x)
    torch.manual_seed(1)
    again = compiled(x)
    assert torch.equal(once, again)
    again = compiled(x)
    assert not torch.equal(once, again)
