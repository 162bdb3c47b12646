"""Encoders of text and of pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .entry import BATCH, VOCABULARY, Case, Entry, padding, spread, tokens

LENGTH, LAYERS = 256, 2
CLIP_LENGTH = 77  # what CLIP's text model always gets

_WIDTH: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
# Two more positions than tokens: RoBERTa counts its own from `pad_token_id` on.
_TEXT = {**_WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH + 2}
_DISTILLED = {
    "dim": 256,
    "hidden_dim": 256,
    "n_layers": LAYERS,
    "n_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
}
# 197 tokens, no multiple of any tile.
_PICTURE = {**_WIDTH, "image_size": 224, "patch_size": 16}
# One layer in windows of 7 x 7, with the picture's 16 x 16 padded to them, and one over all.
_SAM = {
    **_WIDTH,
    "mlp_dim": 256,
    "image_size": 256,
    "window_size": 7,
    "global_attn_indexes": [1],
    "output_channels": 32,
}

# The config class of transformers, and what it is given.
_TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertConfig", {**_TEXT, "pad_token_id": 0}),
    "RoBERTa": ("RobertaConfig", {**_TEXT, "pad_token_id": 1}),
    "DistilBERT": ("DistilBertConfig", _DISTILLED),
}
_PICTURE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTConfig", _PICTURE),
    "CLIP vision": ("CLIPVisionConfig", _PICTURE),
    "SAM vision": ("SamVisionConfig", _SAM),
}


def _model(config: str, sizes: dict[str, Any], attention: str) -> nn.Module:
    import transformers as hf

    made = getattr(hf, config)(**sizes, attn_implementation=attention)
    # Auto classes do not know the halves of CLIP and SAM by their configs.
    cls = getattr(hf, config.replace("Config", "Model"))
    return spread(cls(made))


def _text(name: str, attention: str) -> Case:
    return Case(_model(*_TEXT_MODELS[name], attention), {"input_ids": tokens(LENGTH)})


def _padded_text(name: str, attention: str) -> Case:
    case = _text(name, attention)
    kept = padding(LENGTH, "right")
    return Case(case.model, {**case.inputs, "attention_mask": kept}, kept.bool())


def _clip_text(attention: str) -> Case:
    special = {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {**_TEXT, **special, "max_position_embeddings": CLIP_LENGTH}
    return Case(_model("CLIPTextConfig", sizes, attention), {"input_ids": tokens(CLIP_LENGTH)})


def _picture(name: str, attention: str) -> Case:
    config, sizes = _PICTURE_MODELS[name]
    side = sizes["image_size"]
    return Case(
        _model(config, sizes, attention), {"pixel_values": torch.randn(BATCH, 3, side, side)}
    )


def entries() -> list[Entry]:
    makers: list[tuple[str, str, Callable[[str], Case]]] = []
    for name in _TEXT_MODELS:
        makers.append((name, "plain", partial(_text, name)))
        makers.append((name, "padded", partial(_padded_text, name)))
    makers.append(("CLIP text", "plain", _clip_text))
    makers += [(name, "plain", partial(_picture, name)) for name in _PICTURE_MODELS]
    return [
        Entry(name, attention, given, LAYERS, partial(make, attention))
        for name, given, make in makers
        for attention in ("sdpa", "eager")
    ]
