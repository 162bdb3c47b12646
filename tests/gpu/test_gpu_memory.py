"""Peak memory: packed projections, grouped keys and broadcast masks are never copied or expanded.

The bounds are sums of what must exist at the moment when most does, so that one more tensor of the
size of the queries, keys or values breaks them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_inductor import ops
from helpers import kernels_of, oracle, relative_error, run_reported
from poison import poison_cuda_free_memory

KERNELS = ("fa4", "cudnn")
B, S, H, D = 2, 4096, 16, 64
WIDTH = H * D
ONE = B * S * WIDTH * 2  # bytes of q, k, v or the output
SLACK = 0.6 * ONE  # below the size of any tensor that is looked for


class Packed(torch.nn.Module):
    """Linear, packed views, causal attention, Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        packed = self.qkv(x).view(B, S, 3, H, D)
        q, k, v = (tensor.transpose(1, 2) for tensor in packed.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(out.transpose(1, 2).reshape(B, S, WIDTH))


def _compile(model: Any, kernel: str) -> Any:
    options = {"fa.kernels": (kernel,), "fa.on_fallback": "error"}
    return torch.compile(model, backend="fa_inductor", fullgraph=True, options=options)


def _peak(step: Callable[[], Any]) -> int:
    """Bytes beyond what is allocated before, at the worst moment of a step that is warm."""
    for _ in range(2):
        step()
    gc.collect()  # else earlier tests' tensors may be freed in between
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _weights(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * 2 for parameter in model.parameters())


def _training_bound(model: torch.nn.Module) -> float:
    """In the backward of the attention, when everything is there:"""
    lse = B * H * S * 4
    tensors = {
        "packed q, k, v": 3 * ONE,
        "attention's output": ONE,
        "model's output": ONE,
        "gradient of the attention's output": ONE,
        "gradients of q, k, v": 3 * ONE,
        "dq in float32": 2 * ONE,
        "lse, and two such in the kernel": 3 * lse,
        "gradients of the weights": _weights(model),
    }
    return sum(tensors.values()) + SLACK


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("masked", [False, True])
def test_training_step_of_a_packed_projection(kernel: str, masked: bool) -> None:
    """No copy of q, k, v; with a mask of (B, 1, 1, S) no copy of the size of its scores."""
    torch.manual_seed(0)
    model = Packed().to("cuda", torch.bfloat16)
    x = torch.randn(B, S, WIDTH, device="cuda", dtype=torch.bfloat16)
    mask = None
    if masked:
        mask = torch.arange(S, device="cuda") < torch.tensor([[S], [S // 3]], device="cuda")
        mask = mask.view(B, 1, 1, S)
    grad = torch.randn_like(x)
    parameters = list(model.parameters())
    compiled = _compile(model, kernel)

    def step() -> Sequence[Tensor]:
        return torch.autograd.grad(compiled(x, mask), parameters, grad)

    _, report = run_reported(step)
    assert kernels_of(report) == [kernel]
    peak, bound = _peak(step), _training_bound(model)
    print(
        f"{kernel} {'masked' if masked else 'causal'}: peak {peak / ONE:.2f} q, bound "
        f"{bound / ONE:.2f} q"
    )
    assert peak <= bound
    assert peak >= 6 * ONE  # what the bound was made from is really there
    assert bound < B * H * S * S  # a mask of the scores' size would show


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_op_needs_no_more_for_views_than_for_contiguous_tensors(kernel: str) -> None:
    """Forward and backward, to the byte."""
    packed = torch.randn(B, S, 3, H, D, device="cuda", dtype=torch.bfloat16)
    views = [tensor.transpose(1, 2) for tensor in packed.unbind(2)]
    whole = [view.transpose(1, 2).contiguous().transpose(1, 2) for view in views]
    grad = torch.randn(B, S, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    peaks = []
    for q, k, v in (views, whole):

        def step(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            with torch.no_grad():
                arguments = (None, "top_left", "BSHD", False, kernel)
                out, lse = ops.attention(q, k, v, *arguments)
                saved = (grad, None, q, k, v, out, lse, None, "top_left", False, kernel)
                ops.attention_backward(*saved)

        peaks.append(_peak(step))
    assert peaks[0] == peaks[1]
    print(f"{kernel}: peak {peaks[0] / ONE:.2f} q")


@pytest.mark.parametrize("kernel", KERNELS)
def test_grouped_keys_are_not_expanded(kernel: str) -> None:
    """enable_gqa with 16 query heads on 2: inference, then a training step."""
    groups = 8
    q = torch.randn(B, S, H, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    kv = torch.randn(B, S, 2, H // groups, D, device="cuda", dtype=torch.bfloat16)
    k, v = (tensor.transpose(1, 2) for tensor in kv.unbind(2))
    small, lse = ONE // groups, B * H * S * 4

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)  # contiguous: PyTorch copies a gradient of other layouts itself

    compiled = _compile(attend, kernel)
    with torch.no_grad():
        poison_cuda_free_memory(0.2)
        out, report = run_reported(compiled, q, k, v)
        assert kernels_of(report) == [kernel]
        assert (
            relative_error(
                out[:1, :, -1:].transpose(1, 2),
                oracle(q[:1, -1:], k[:1, -1:], v[:1, -1:], causal="top_left"),
            )
            < 8e-3
        )
        del out
        peak = _peak(lambda: compiled(q, k, v))
    print(f"{kernel} inference: peak {peak / ONE:.2f} q")
    assert peak <= ONE + lse + small  # the output; an expanded key alone would be ONE more

    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    grad = torch.randn(B, S, H, D, device="cuda", dtype=torch.bfloat16)
    peak = _peak(lambda: torch.autograd.grad(compiled(*leaves), leaves, grad))
    # cuDNN itself keeps dk and dv of each query head in its workspace.
    inside = 2 * ONE if kernel == "cudnn" else 2 * 2 * small
    bound = ONE + ONE + 2 * small + 2 * ONE + inside + 3 * lse + SLACK
    print(f"{kernel} training: peak {peak / ONE:.2f} q, bound {bound / ONE:.2f} q")
    assert peak <= bound


def test_a_broadcast_bias_of_lengths_that_vary() -> None:
    """ST-12: no length is refused for the mask's alignment, and the mask stays O(S)."""
    heads, width = 24, 128
    compiled = torch.compile(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
        backend="fa_inductor",
        fullgraph=True,
        options={"fa.on_fallback": "error"},
    )
    for length in (6144, 6102, 6101):
        q, k, v, grad = (
            torch.randn(1, length, heads, width, device="cuda", dtype=torch.bfloat16)
            for _ in range(4)
        )
        q, k, v, grad = (tensor.transpose(1, 2) for tensor in (q, k, v, grad))
        mask = torch.randn(1, 1, 1, length, device="cuda", dtype=torch.bfloat16)
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        for tensor, dim in ((leaves[0], 2), (leaves[1], 2), (leaves[2], 2), (mask, 3)):
            torch._dynamo.mark_dynamic(tensor, dim)
        poison_cuda_free_memory(0.2)
        out, report = run_reported(compiled, *leaves, mask)
        assert kernels_of(report) in (["cudnn"], [])
        rows = [0, 1, length // 2, length - 1]
        scores = q[:, :, rows].float() @ k.float().mT * width**-0.5 + mask.float()
        assert relative_error(out[:, :, rows], scores.softmax(-1) @ v.float()) < 8e-3
        del scores, out

        def step(
            leaves: Sequence[Tensor] = leaves, mask: Tensor = mask, grad: Tensor = grad
        ) -> Any:
            return torch.autograd.grad(compiled(*leaves, mask), leaves, grad)

        gradients = step()
        assert all(torch.isfinite(each).all() for each in gradients)
        del gradients
        tensors = 4 * q.numel() * 2  # the output and three gradients, which no mask changes
        inside = 3 * q.numel() * 4  # cuDNN's own gradients, in float32
        assert _peak(step) - tensors - inside < heads * length * length * 2 / 10
