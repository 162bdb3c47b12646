"""Encoder-decoder models, whose decoder attends to itself and to the encoder."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .entry import BATCH, VOCABULARY, Case, Entry, spread, tokens

LAYERS, ENCODED, DECODED = 2, 256, 96  # layers of each half, lengths of their inputs
MEL_BINS = 80

_T5: dict[str, Any] = {
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 256,
    "num_layers": LAYERS,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
}
_BART_LIKE: dict[str, Any] = {
    "d_model": 256,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_LAYERS_LIKE_BART: dict[str, Any] = {
    f"{half}_{what}": size
    for half in ("encoder", "decoder")
    for what, size in (("layers", LAYERS), ("attention_heads", 4), ("ffn_dim", 256))
}


def _sequences() -> dict[str, Any]:
    return {
        "input_ids": tokens(ENCODED),
        "decoder_input_ids": tokens(DECODED),
        "use_cache": False,
    }


def _t5(attention: str) -> Case:
    import transformers as hf

    config = hf.T5Config(**_T5, attn_implementation=attention)
    model = spread(hf.T5ForConditionalGeneration(config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("Attention.q.weight"):  # T5 does not scale its scores by itself
                weight.mul_(_T5["d_kv"] ** -0.5)
    return Case(model, _sequences())


def _bart(attention: str) -> Case:
    import transformers as hf

    config = hf.BartConfig(
        **_BART_LIKE,
        **_LAYERS_LIKE_BART,
        max_position_embeddings=ENCODED,
        forced_eos_token_id=None,
        attn_implementation=attention,
    )
    return Case(spread(hf.BartForConditionalGeneration(config)), _sequences())


def _whisper_encoder(attention: str) -> Case:
    import transformers as hf

    config = hf.WhisperConfig(
        **_BART_LIKE,
        **_LAYERS_LIKE_BART,
        num_mel_bins=MEL_BINS,
        max_source_positions=ENCODED,
        attn_implementation=attention,
    )
    # Its second convolution halves the length.
    sound = torch.randn(BATCH, MEL_BINS, 2 * ENCODED)
    return Case(spread(hf.WhisperModel(config).encoder), {"input_features": sound})


def entries() -> list[Entry]:
    both = 3 * LAYERS  # a layer of the decoder attends twice
    makers = (
        ("T5", both, _t5),
        ("BART", both, _bart),
        ("Whisper encoder", LAYERS, _whisper_encoder),
    )
    return [
        Entry(name, attention, "plain", sites, partial(make, attention))
        for name, sites, make in makers
        for attention in ("sdpa", "eager")
    ]
