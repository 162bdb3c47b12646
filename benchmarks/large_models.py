"""Models whose kernels are worth warming before a GPU is paid for; each gives (fn, args, kwargs).

    PYTHONPATH=benchmarks fa-inductor warm fa_inductor.demo:make large_models:llama3_8b \
        large_models:qwen3_32b large_models:gemma2_9b large_models:wan_14b \
        --target sm_90a,sm_100a --kernels fa4

Sizes are those of the published configs, with two layers, since all others make the same calls.
They are traced on fake tensors and need no weights and no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTH = 8192  # past Gemma 2's window

_LLAMA3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_QWEN3_32B = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
_GEMMA2_9B = {
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 256,
    "vocab_size": 256000,
}


def _language_model(config: str, sizes: dict[str, Any], attention: str) -> Any:
    import transformers

    made = getattr(transformers, config)(
        **sizes, num_hidden_layers=2, max_position_embeddings=LENGTH, attn_implementation=attention
    )
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    model = transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16)
    return model, (tokens,), {"use_cache": False}


def llama3_8b() -> Any:
    return _language_model("LlamaConfig", _LLAMA3_8B, "sdpa")


def qwen3_32b() -> Any:
    return _language_model("Qwen3Config", _QWEN3_32B, "sdpa")


def gemma2_9b() -> Any:
    """Written by hand: transformers leaves the softcap out of what it hands to SDPA."""
    return _language_model("Gemma2Config", _GEMMA2_9B, "eager")


def wan_14b() -> Any:
    """Attention of Wan 2.1 14B for 81 frames of 480p: to the video, and to 512 tokens of text."""

    def attend(video: Tensor, text: Tensor) -> Tensor:
        seen = F.scaled_dot_product_attention(video, video, video)
        return F.scaled_dot_product_attention(seen, text, text)

    video, text = (
        torch.empty(1, length, 40, 128, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for length in (32760, 512)
    )
    return attend, (video, text), {}
