"""What `test_gpu_warm.py` warms and then runs: functions that return (fn, args, kwargs)."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

import fa_inductor
from fa_inductor import demo

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


def attend(q: Tensor, k: Tensor, causal: str) -> Tensor:
    arguments = (None, causal, "BSHD", False, "fa4")
    out: Tensor = torch.ops.fa_inductor.attention(q, k, k, *arguments)[0]
    return out


def swept() -> Any:
    """Attention with grouped heads, causal and not, of one length: all others must be warm too."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k = (
        torch.empty(2, 300, heads, 128, dtype=torch.bfloat16, device=device).transpose(1, 2)
        for heads in (8, 2)
    )

    def both(q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k, "none") + attend(q, k, "bottom_right")

    return both, (q.requires_grad_(), k.requires_grad_()), {}


__all__ = ["SWEPT", "attend", "demo", "fa_inductor", "llama", "swept"]
