"""`nn.MultiheadAttention` and the layers around it: masks that are a band are no mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from comparison import compare_with_eager
from helpers import compile_quick

LENGTH = 6


def module() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(16, 2, batch_first=True)


MASKS: dict[str, tuple[Callable[[int], Tensor], str, tuple[int | None, int | None]]] = {
    "bool": (lambda s: torch.ones(s, s, dtype=torch.bool).triu(1), "top_left", (None, None)),
    "float": (nn.Transformer.generate_square_subsequent_mask, "top_left", (None, None)),
    "window": (
        lambda s: (torch.arange(s)[:, None] - torch.arange(s)).abs() > 2,
        "none",
        (2, 2),
    ),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_that_is_a_band(kind: str) -> None:
    make, causal, window = MASKS[kind]
    attention = module()

    def fn(x: Tensor) -> Tensor:
        return attention(x, x, x, attn_mask=make(x.shape[1]), need_weights=False)[0]

    x = [torch.randn(2, LENGTH, 16)]
    outcome = compare_with_eager(fn, compile_quick(fn), x, list(attention.parameters()))
    (site,) = outcome.report.sites
    assert site.spec is not None
    assert (site.kernel, site.spec.causal, site.spec.window) == ("reference", causal, window)
    assert (site.spec.mask, site.spec.bias) == (None, None)
    assert "proven from the mask at" in (site.spec.proven or "")


def test_a_decoder_layer_with_its_usual_mask() -> None:
    layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def fn(x: Tensor, memory: Tensor) -> Tensor:
        return layer(x, memory, nn.Transformer.generate_square_subsequent_mask(x.shape[1]))

    inputs = [torch.randn(2, LENGTH, 16), torch.randn(2, 9, 16)]
    outcome = compare_with_eager(fn, compile_quick(fn), inputs, list(layer.parameters()))
    assert [site.spec and site.spec.causal for site in outcome.report.sites] == ["top_left", "none"]


@pytest.mark.parametrize("beside", ["padding", "weights"])
def test_a_mask_that_is_not_all(beside: str) -> None:
    """Beside padding, and where weights are asked for, the masks are read as they are."""
    attention = module()
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, 4:] = True

    def fn(x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return attention(
            x,
            x,
            x,
            attn_mask=hidden,
            key_padding_mask=padding if beside == "padding" else None,
            need_weights=beside == "weights",
        )[0]

    outcome = compare_with_eager(fn, compile_quick(fn), [torch.randn(2, LENGTH, 16)])
    (site,) = outcome.report.sites
    assert site.spec is not None
    assert (site.spec.causal, site.spec.proven) == ("none", None)


def test_a_promised_mask() -> None:
    attention = module()

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        return attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    compiled = compile_quick(fn, assume_mask="causal")
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    x = torch.randn(2, LENGTH, 16)
    outcome = compare_with_eager(lambda x: fn(x, hidden), lambda x: compiled(x, hidden), [x])
    assert outcome.report.sites[0].spec is not None
    assert outcome.report.sites[0].spec.causal == "top_left"
    with pytest.raises(RuntimeError, match=r"fa\.assume_mask"):
        compiled(x, ~hidden)
