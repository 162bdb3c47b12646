"""What `test_gpu_warm.py` warms and then runs: functions that return (fn, args, kwargs)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import fa_inductor  # noqa: F401  (its ops)

SWEPT = tuple(sorted({1, 2, 3, 7, *range(16, 640, 37), 64, 80, 81, 128, 129, 256, 257, 1000, 8192}))


def llama() -> Any:
    """Four layers of Llama-3-8B, with a small vocabulary."""
    config = transformers.LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        num_hidden_layers=4,
        vocab_size=1024,
        attn_implementation="sdpa",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        made = transformers.LlamaForCausalLM(config)
        tokens = torch.arange(512, device=device)[None]
    kwargs = {"use_cache": False, "labels": tokens}
    return made.to(torch.bfloat16), (tokens,), kwargs


def attend(q: Tensor, k: Tensor, causal: str, kernel: str = "fa4") -> Tensor:
    arguments = (None, causal, "BSHD", False, kernel)
    out: Tensor = torch.ops.fa_inductor.attention(q, k, k, *arguments)[0]
    return out


def inputs(*shape: int) -> list[Tensor]:
    """(q, k) with 8 and 2 heads, which `shape`, without them, has as its last dimension but one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    *outer, dim = shape
    return [
        torch.randn(*outer, heads, dim, dtype=torch.bfloat16, device=device, requires_grad=True)
        for heads in (8, 2)
    ]


def swept() -> Any:
    """Attention with grouped heads, causal and not, of one length: all others must be warm too."""
    q, k = (each.transpose(1, 2) for each in inputs(2, 300, 128))

    def both(q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k, "none") + attend(q, k, "bottom_right")

    return both, (q, k), {}


def masked(length: int = 300) -> Any:
    """Causal, with one sequence that ends early."""
    q, k = inputs(2, length, 128)
    places = torch.arange(length, device=q.device)
    kept = places < torch.tensor([[length], [length // 2]], device=q.device)

    def attend_to_kept(q: Tensor, k: Tensor, kept: Tensor) -> Tensor:
        places = torch.arange(q.shape[1], device=q.device)
        mask = (places <= places[:, None]) & kept[:, None, None]
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)

    return attend_to_kept, (q, k, kept), {}


def variable(kernel: str = "fa4", longest: int = 300) -> Any:
    """Three sequences that lie one after another."""
    q, k = inputs(2 * longest + 7, 128)
    starts = torch.tensor([0, longest, longest + 7, 2 * longest + 7], device=q.device).int()

    def attend_to_each(q: Tensor, k: Tensor, starts: Tensor) -> Tensor:
        numbers = (longest, longest, None, "bottom_right", False, kernel)
        out: Tensor = torch.ops.fa_inductor.attention_varlen(q, k, k, starts, starts, *numbers)[0]
        return out

    return attend_to_each, (q, k, starts), {}
