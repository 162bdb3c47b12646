"""Whole models through the real backend: Hugging Face's and PyTorch's own modules.

The models are tiny and have random weights. They run on the reference kernel with poisoned
memory, and must give what they give in eager float32. What a model writes is not ours to
choose: today's Hugging Face models hand SDPA a dense mask when they are compiled whole, and none
when they are compiled layer by layer, so both are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fa_inductor import Report
from helpers import REFERENCE, compile_quick, compile_reference, kernels_of, run_reported
from poison import poisoned

BATCH, LENGTH, VOCABULARY, LAYERS = 2, 12, 64, 2
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}


def _config(name: str) -> Any:
    """The configuration of a tiny model whose attention is `F.scaled_dot_product_attention`."""
    import transformers as hf

    if name == "Llama":
        return hf.LlamaConfig(**_GROUPED)
    if name == "Qwen3":
        return hf.Qwen3Config(**_GROUPED)
    if name == "Mistral":
        return hf.MistralConfig(**_GROUPED, sliding_window=5)
    if name == "Gemma2":
        return hf.Gemma2Config(**_GROUPED, sliding_window=5)
    if name == "GPT-2":
        return hf.GPT2Config(
            n_embd=32,
            n_layer=LAYERS,
            n_head=4,
            n_positions=64,
            vocab_size=VOCABULARY,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    if name == "BERT":
        return hf.BertConfig(**{**_TEXT, "pad_token_id": 0})
    assert name == "ViT"
    sizes = {key: _TEXT[key] for key in _TEXT if "token" not in key and "vocab" not in key}
    del sizes["max_position_embeddings"]
    return hf.ViTConfig(**sizes, image_size=16, patch_size=4)


def _model(name: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    heads = {"BERT": hf.AutoModel, "ViT": hf.AutoModel}
    return heads.get(name, hf.AutoModelForCausalLM).from_config(_config(name)).eval()


def _inputs(name: str) -> dict[str, torch.Tensor]:
    if name == "ViT":
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16)}
    return {"input_ids": torch.randint(1, VOCABULARY, (BATCH, LENGTH))}


def _layers(model: nn.Module) -> nn.ModuleList:
    """The list of repeated blocks, wherever the architecture keeps it."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)


def _check_sites(report: Report, count: int) -> None:
    """All on the kernel."""
    report.assert_no_graph_breaks()
    assert len(report.graphs) == 1
    assert len(report.sites) == count
    for site in report.sites:
        assert site.spec is not None
        assert (site.kernel, site.reasons) == ("reference", {})


# What the dense masks that the models hand over are proven to be: causal and window of their sites.
_CAUSAL: tuple[Any, ...] = ("top_left", (None, None))
_WINDOW: tuple[Any, ...] = ("top_left", (4, None))
_EVERYTHING: tuple[Any, ...] = ("none", (None, None))
_BANDS = {
    "Llama": {_CAUSAL},
    "Qwen3": {_CAUSAL},
    "Mistral": {_WINDOW},
    "Gemma2": {_CAUSAL, _WINDOW},
    "GPT-2": {_CAUSAL},
    "BERT": {_EVERYTHING},
    "ViT": {_EVERYTHING},
}


@pytest.mark.parametrize("name", _BANDS)
def test_hugging_face_model_is_one_graph_that_equals_eager(name: str) -> None:
    """PM-11: the dense mask is proven to be a band, and gone.

    What Inductor would generate around the op is PyTorch's own affair, and not worth its seconds of
    C++ compiler for each model.
    """
    model, inputs = _model(name), _inputs(name)
    compiled = compile_quick(model)
    with torch.no_grad(), poisoned():
        expected = model(**inputs)[0]
        result, report = run_reported(compiled, **inputs)
    torch.testing.assert_close(result[0], expected, rtol=1e-4, atol=1e-5)
    _check_sites(report, LAYERS)
    assert all(site.spec.mask is None for site in report.sites if site.spec)
    assert {(s.spec.causal, s.spec.window) for s in report.sites if s.spec} == _BANDS[name]
    assert report.sites[0].source.rpartition(":")[0].endswith("sdpa_attention.py")
    numbers = [[part for part in site.module.split(".") if part.isdigit()] for site in report.sites]
    assert numbers == [["0"], ["1"]]


@pytest.mark.parametrize("name", ["Llama", "ViT"])
def test_hugging_face_layer_without_a_mask_is_rewritten(name: str) -> None:
    """Compiled layer by layer no mask arrives: causal (or nothing) is then plain to see."""
    model, inputs = _model(name), _inputs(name)
    with torch.no_grad(), poisoned():
        expected = model(**inputs)[0]
        for layer in _layers(model):
            layer.compile(backend="fa_inductor", fullgraph=True, options=REFERENCE)
        result, report = run_reported(model, **inputs)
    torch.testing.assert_close(result[0], expected, rtol=1e-4, atol=1e-5)
    assert set(kernels_of(report)) == {"reference"}
    causal = {site.spec.causal for site in report.sites if site.spec}
    assert causal == {"none" if name == "ViT" else "top_left"}


def test_padding_mask_reaches_the_result() -> None:
    """PM-08: the mask must matter, so the padded tokens are changed and nothing may follow."""
    model, inputs = _model("BERT"), _inputs("BERT")
    padding = torch.ones(BATCH, LENGTH, dtype=torch.long)
    padding[1, LENGTH - 4 :] = 0
    other = inputs["input_ids"].clone()
    other[1, LENGTH - 4 :] = 1
    compiled = compile_quick(model)
    with torch.no_grad(), poisoned():
        expected = model(**inputs, attention_mask=padding)[0]
        result, report = run_reported(compiled, **inputs, attention_mask=padding)
        changed = compiled(input_ids=other, attention_mask=padding)[0]
    torch.testing.assert_close(result[0], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(changed[1, : LENGTH - 4], expected[1, : LENGTH - 4])
    _check_sites(report, LAYERS)
    assert all("attn_mask bool" in site.spec.mask for site in report.sites if site.spec)


# --- PyTorch's own modules ------------------------------------------------------------------------


class _Wrapped(nn.Module):
    """A module of the user's around one of PyTorch's: the call has a line in the user's code."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.call = call or (lambda inner, *x: inner(*x))

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return self.call(self.inner, *x)


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def _causal_encoder(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return inner(x, mask=mask, is_causal=True)


def _without_weights(inner: nn.Module, *x: torch.Tensor) -> torch.Tensor:
    return inner(*x, need_weights=False)[0]


# name -> (module, input shapes, sites)
_TRAINED: dict[str, Callable[[], tuple[nn.Module, tuple[tuple[int, ...], ...], int]]] = {
    "encoder layer": lambda: (_Wrapped(_encoder_layer()), ((2, 7, 16),), 1),
    "causal encoder": lambda: (
        _Wrapped(
            nn.TransformerEncoder(_encoder_layer(), 2, enable_nested_tensor=False), _causal_encoder
        ),
        ((2, 7, 16),),
        2,
    ),
    "decoder layer": lambda: (
        _Wrapped(nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)),
        ((2, 7, 16), (2, 5, 16)),
        2,
    ),
    "cross-attention, sequence first": lambda: (
        _Wrapped(nn.MultiheadAttention(16, 2), _without_weights),
        ((7, 2, 16), (5, 2, 16), (5, 2, 16)),
        1,
    ),
}

_THROUGH_INDUCTOR = ("cross-attention, sequence first",)


@pytest.mark.parametrize("name", _TRAINED)
def test_pytorch_module_trains_on_the_kernel(name: str) -> None:
    """Output and every gradient equal eager's; the site's line is the user's own."""
    module, shapes, sites = _TRAINED[name]()
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    wanted = [*inputs, *module.parameters()]
    with poisoned():
        expected = module(*inputs)
        weight = torch.randn_like(expected)
        expected_grads = torch.autograd.grad(expected, wanted, weight)
        compiled = (compile_reference if name in _THROUGH_INDUCTOR else compile_quick)(module)
        result, report = run_reported(compiled, *inputs)
        grads = torch.autograd.grad(result, wanted, weight)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)
    assert (result.stride(), len(report.graphs)) == (expected.stride(), 1)
    assert kernels_of(report) == ["reference"] * sites
    assert all(site.source.startswith(__file__) for site in report.sites)


def test_attention_weights_are_a_named_fallback() -> None:
    """PM-07: PyTorch's module returns its weights by default, so it must stay whole."""
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 7, 16)
    expected, expected_weights = module(x, x, x)
    with poisoned():
        (result, weights), report = run_reported(compile_quick(module), x, x, x)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert kernels_of(report) == [None]
    assert "need_weights=True" in report.sites[0].reason_texts[0]


def test_padded_encoder_equals_eager() -> None:
    """GB-06: a row that is padding through and through behaves as it does in eager."""
    module = nn.TransformerEncoder(_encoder_layer(), 1, enable_nested_tensor=False).train()
    x = torch.randn(2, 7, 16)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:] = True
    padding[1] = True
    expected = module(x, src_key_padding_mask=padding)
    with poisoned():
        compiled = compile_quick(module)
        result, report = run_reported(compiled, x, src_key_padding_mask=padding)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert expected.isfinite().all()
    assert kernels_of(report) == ["reference"]
    assert report.sites[0].spec
    assert report.sites[0].spec.mask == "key_padding_mask float32 (2, 7)"


def test_fused_encoder_layer_is_not_passed_over_in_silence() -> None:
    """In inference PyTorch folds an encoder layer into one op: its attention is still a site,
    be it only as a fallback with a reason."""
    module = _Wrapped(_encoder_layer()).eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad(), poisoned():
        expected = module(x)
        result, report = run_reported(compile_quick(module), x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert len(report.sites) == 1
