"""Uses of `nn.MultiheadAttention` that are rewritten, and that are left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .family import Example


def _module(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(16, 2, **options)


def _inputs(count: int, *lengths: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: tuple(torch.randn(2, lengths[i % len(lengths)], 16) for i in range(count))


def _call(
    module: nn.MultiheadAttention, order: Sequence[int], **options: Any
) -> Callable[..., Any]:
    options.setdefault("need_weights", False)
    return lambda *x: module(*(x[i] for i in order), **options)[0]


def examples() -> list[Example]:
    first = {"batch_first": True}
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return [
        Example("self-attention", _call(_module(**first), (0, 0, 0)), _inputs(1, 6)),
        Example("weights not used", lambda x: _WEIGHTS(x, x, x)[0], _inputs(1, 6)),
        Example("sequence first", _call(_module(), (0, 0, 0)), _inputs(1, 6)),
        Example("no bias", _call(_module(bias=False, **first), (0, 0, 0)), _inputs(1, 6)),
        Example("cross-attention", _call(_module(**first), (0, 1, 1)), _inputs(2, 6, 9)),
        Example("three inputs", _call(_module(**first), (0, 1, 2)), _inputs(3, 6)),
        Example(
            "own weights", _call(_module(kdim=16, vdim=16, **first), (0, 1, 1)), _inputs(2, 6, 9)
        ),
        Example("other widths", _other_widths, _inputs(1, 6)),
        Example(
            "causal",
            _call(_module(**first), (0, 0, 0), attn_mask=mask, is_causal=True),
            _inputs(1, 6),
        ),
        Example("attn_mask", _call(_module(**first), (0, 0, 0), attn_mask=mask), _inputs(1, 6)),
        Example(
            "float mask for each head",
            _call(_module(**first), (0, 0, 0), attn_mask=torch.linspace(-2, 2, 144).view(4, 6, 6)),
            _inputs(1, 6),
        ),
        Example(
            "padding mask",
            _call(_module(**first), (0, 0, 0), key_padding_mask=padding),
            _inputs(1, 6),
        ),
        Example(
            "both masks",
            _call(_module(**first), (0, 0, 0), attn_mask=mask, key_padding_mask=padding),
            _inputs(1, 6),
        ),
    ]


_WIDE = nn.MultiheadAttention(16, 2, kdim=4, vdim=12, batch_first=True)


def _other_widths(x: torch.Tensor) -> torch.Tensor:
    return _WIDE(x, x[..., :4], x[..., :12], need_weights=False)[0]


def _fused_layer(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fused = _ENCODER_LAYER(x)
    return fused + x


_ENCODER_LAYER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()


def counterexamples() -> list[Example]:
    first = {"batch_first": True}
    return [
        Example("weights returned", lambda x: _module_with_weights(x), _inputs(1, 6), 0),
        Example("weights and a causal hint", _hinted, _inputs(1, 6), 0),
        Example("mask beside weights", _masked_with_weights, _inputs(1, 6), 0),
        Example("encoder layer in inference", _fused_layer, _inputs(1, 6), 0),
        Example("bias_k", _call(_module(add_bias_kv=True, **first), (0, 0, 0)), _inputs(1, 6), 0),
        Example(
            "zero attn", _call(_module(add_zero_attn=True, **first), (0, 0, 0)), _inputs(1, 6), 0
        ),
        Example(
            "unbatched",
            lambda x: _WEIGHTS(x[0], x[0], x[0], need_weights=False)[0],
            _inputs(1, 6),
            0,
        ),
    ]


_WEIGHTS = nn.MultiheadAttention(16, 2, batch_first=True)


def _masked_with_weights(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return _WEIGHTS(x, x, x, attn_mask=mask)[0]


def _hinted(x: torch.Tensor) -> torch.Tensor:
    """With weights asked for, PyTorch applies the mask as it is, whatever the hint says."""
    mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    return _WEIGHTS(x, x, x, attn_mask=mask, is_causal=True)[0]


def _module_with_weights(x: torch.Tensor) -> torch.Tensor:
    out, weights = _WEIGHTS(x, x, x)
    return out + weights.sum()
