"""A diffusion transformer at the lengths at which captured attention was said to turn NaN, and CUDA
graphs with dropout and with a cache that is written to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poison import poison_cuda_free_memory, poisoned

HEADS, DIM = 16, 128


class DiTBlock(nn.Module):
    """Self-attention without a mask and an MLP, both modulated by a condition; (B, S, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.modulation = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = (each(condition) for each in self.modulation)
        normed = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(normed).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + gate1 * self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(normed)))


class DiT(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock(HEADS * DIM) for _ in range(layers))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, condition)
        return x


def gradients(model: nn.Module, run: Any, x: Tensor, condition: Tensor) -> list[Tensor]:
    """[output, gradient of x, gradients of the weights]."""
    x = x.detach().requires_grad_()
    out = run(x, condition)
    weight = torch.linspace(-1, 1, out.shape[-1], device=out.device)
    loss = (out.float() * weight).sum()
    return [out.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
@pytest.mark.parametrize("length", [4096, 16384, 32768, 65536])
def test_diffusion_transformer(length: int, kernel: str) -> None:
    """Finite, and the cosine with eager in float32 above 0.9999, forward and all gradients."""
    torch.manual_seed(0)
    model = DiT().to("cuda", torch.bfloat16)
    x = torch.randn(1, length, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
    condition = torch.randn(1, 1, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
    precise = DiT().to("cuda")
    precise.load_state_dict(model.state_dict())
    right = gradients(precise, precise, x.float(), condition.float())
    del precise
    options = {"fa.kernels": (kernel,), "fa.on_fallback": "error"}
    compiled = torch.compile(model, backend="fa_inductor", fullgraph=True, options=options)
    with poisoned(deterministic_fill=False):
        poison_cuda_free_memory()
        made = gradients(model, compiled, x, condition)
    for ours in made:
        assert torch.isfinite(ours).all()
    found = [cosine(ours, theirs) for ours, theirs in zip(made, right, strict=True)]
    print(f"{kernel} S={length}: out {found[0]:.6f} dx {found[1]:.6f} weights {min(found[2:]):.6f}")
    assert min(found) > 0.9999


def test_graphs_with_dropout_draw_anew() -> None:
    """CG-01 (a): replays draw different masks, of the right rate."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)

    options = {"fa.kernels": ("cudnn",), "fa.on_fallback": "error", "fa.mode": "reduce-overhead"}
    compiled = torch.compile(attend, backend="fa_inductor", fullgraph=True, options=options)
    q, k = (torch.zeros(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.ones_like(q)
    made = []
    with torch.no_grad():
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            made.append(compiled(q, k, v).clone())
    for before, after in itertools.pairwise(made):
        assert not torch.equal(before, after)
    # Each output is 1.25 times the share of 512 keys that are kept.
    for out in made:
        assert abs(float(out.float().mean()) - 1.0) < 5e-3


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
def test_graphs_with_a_cache_that_is_written_to(kernel: str) -> None:
    """CG-01 (b): every decode step sees what it has just written."""
    b, heads, size, d = 2, 8, 256, 64

    def decode(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor
    ) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        seen = torch.arange(size, device=q.device) <= pos
        mask = seen[None, None, None, :].expand(b, 1, 1, size)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    options = {"fa.kernels": (kernel,), "fa.mode": "reduce-overhead"}
    compiled = torch.compile(decode, backend="fa_inductor", fullgraph=True, options=options)
    ours = [randn(b, heads, size, d) for _ in range(2)]
    theirs = [tensor.clone() for tensor in ours]
    for tensor in ours:
        torch._dynamo.mark_static_address(tensor)
    with torch.no_grad():
        for step in range(8):
            q, k, v = (randn(b, heads, 1, d) for _ in range(3))
            pos = torch.tensor([100 + step], device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(q, k, v, *ours, pos).clone()
            right = decode(q.float(), k.float(), v.float(), *(t.float() for t in theirs), pos)
            decode(q, k, v, *theirs, pos)
            assert float((out.float() - right).norm() / right.norm()) < 1e-2, step
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
