"""Causal language models: plain, left-padded, and packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .entry import BATCH, VOCABULARY, Case, Entry, padding, spread, tokens

LENGTH, LAYERS, WINDOW = 256, 2, 100

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    **_SPECIAL,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 64}
# One layer of each kind.
_ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
# All experts are used: else rounding alone would send a token to others, and no error would say
# anything about attention.
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
_GEMMA = {**_GROUPED, **_ALTERNATING, "head_dim": 128, "query_pre_attn_scalar": 128}
# What its scaling of rotary positions is made for.
_GPT_OSS = {**_GROUPED, **_ALTERNATING, **_EXPERTS, "max_position_embeddings": 131072}

# The config class of transformers, and what it is given.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", _GROUPED),
    "Qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 128}),
    "Mistral": ("MistralConfig", {**_GROUPED, "head_dim": 128, "sliding_window": WINDOW}),
    # Real ones cap at 50, which scores of this size would not show.
    "Gemma2": ("Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 2.0}),
    "Gemma3": ("Gemma3TextConfig", _GEMMA),
    "GPT-OSS": ("GptOssConfig", _GPT_OSS),
    "GPT-2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 256,
            "n_layer": LAYERS,
            "n_head": 4,
            "n_positions": 512,
            **_SPECIAL,
        },
    ),
    "GPT-NeoX": ("GPTNeoXConfig", _TEXT),
    "Phi-3": ("Phi3Config", {**_TEXT, "num_key_value_heads": 4}),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        {
            **_TEXT,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": LAYERS,
        },
    ),
    "Mixtral": ("MixtralConfig", {**_GROUPED, **_EXPERTS, "head_dim": 128}),
}
# Its `sinks` are known to no other implementation.
_EAGER_ONLY = ("GPT-OSS",)


def _model(name: str, attention: str) -> nn.Module:
    import transformers as hf

    config, sizes = _CONFIGS[name]
    made = getattr(hf, config)(**sizes, attn_implementation=attention)
    # Compiled by torch 2.11 alone, the default for experts reads memory that nobody has written.
    made._experts_implementation = "batched_mm"
    return spread(hf.AutoModelForCausalLM.from_config(made))


def _plain(name: str, attention: str) -> Case:
    return Case(_model(name, attention), {"input_ids": tokens(LENGTH), "use_cache": False})


def _padded(name: str, attention: str) -> Case:
    case = _plain(name, attention)
    kept = padding(LENGTH, "left")
    return Case(case.model, {**case.inputs, "attention_mask": kept}, kept.bool())


def _packed(name: str, attention: str) -> Case:
    """Three documents in each row, told apart by positions that start anew."""
    case = _plain(name, attention)
    positions = torch.cat([torch.arange(length) for length in (100, 96, LENGTH - 196)])
    return Case(case.model, {**case.inputs, "position_ids": positions.expand(BATCH, -1)})


_MAKERS: dict[str, Callable[[str, str], Case]] = {
    "plain": _plain,
    "padded": _padded,
    "packed": _packed,
}


def entries() -> list[Entry]:
    return [
        Entry(name, attention, given, LAYERS, partial(make, name, attention))
        for name in _CONFIGS
        for attention in ("sdpa", "eager")
        if attention == "eager" or name not in _EAGER_ONLY
        for given, make in _MAKERS.items()
        if given != "packed" or name == "Llama"
    ]
