"""Whole models on a GPU: one graph, right numbers, dense masks proven to be bands."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from fa_inductor import demo
from helpers import kernels_of, relative_error, run_reported
from poison import poison_cuda_free_memory

# Through several bf16 layers the error is a few roundings (2^-9 each) of every layer's output.
MODEL_TOLERANCE = 4e-2


def _llama(cls: str = "Llama") -> tuple[torch.nn.Module, Callable[[], dict[str, torch.Tensor]]]:
    config = getattr(transformers, f"{cls}Config")(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1000,
        attn_implementation="sdpa",
    )
    model = getattr(transformers, f"{cls}ForCausalLM")(config)
    return model, lambda: {
        "input_ids": torch.randint(1000, (2, 512), device="cuda"),
        "use_cache": False,
    }


def _vit() -> tuple[torch.nn.Module, Callable[[], dict[str, torch.Tensor]]]:
    config = transformers.ViTConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        attn_implementation="sdpa",
    )
    model = transformers.ViTForImageClassification(config)
    return model, lambda: {"pixel_values": torch.randn(2, 3, 224, 224, device="cuda")}


MODELS: dict[str, Any] = {"Llama": _llama, "Qwen3": lambda: _llama("Qwen3"), "ViT": _vit}


@pytest.mark.parametrize("name", list(MODELS))
def test_transformers_model(name: str) -> None:
    torch.manual_seed(0)
    model, make_inputs = MODELS[name]()
    model = model.to("cuda").eval()
    inputs = make_inputs()
    with torch.no_grad():
        expected = model(**inputs).logits
        half = copy.deepcopy(model).bfloat16()
        half_inputs = {
            k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v
            for k, v in inputs.items()
        }
        eager = half(**half_inputs).logits
        options = {"fa.on_fallback": "ignore"}
        compiled = torch.compile(half, backend="fa_inductor", fullgraph=True, options=options)
        poison_cuda_free_memory()
        out, report = run_reported(compiled, **half_inputs)
    print(name, report.summary(), [s.reason_texts[0] for s in report.sites[:1] if s.kernel is None])
    assert len(report.graphs) == 1
    assert not report.graph_breaks
    assert len(report.sites) == 2
    assert torch.isfinite(out.logits).all()
    assert relative_error(out.logits, expected) < max(
        MODEL_TOLERANCE, 2 * relative_error(eager, expected)
    )
    # The dense masks are proven to be causal, or to hide nothing.
    for site in report.sites:
        assert site.kernel is not None
        assert site.spec.mask is None
        assert site.spec.causal == ("none" if name == "ViT" else "top_left")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("length", [512, 2048])
def test_training_step_of_the_demo_model(length: int, checkpointed: bool) -> None:
    """Loss and every gradient against float32 eager, with blocks checkpointed or not."""
    torch.manual_seed(0)
    model = demo.DemoModel(512, 8, 2, layers=2, vocabulary=512).to("cuda", torch.bfloat16)
    tokens = torch.randint(512, (2, length), device="cuda")
    precise = copy.deepcopy(model).float()
    parameters = list(model.parameters())

    def loss_of(current: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        if not checkpointed:
            return current(tokens)
        x = current.embedding(tokens)
        for layer in current.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = torch.nn.functional.linear(current.norm(x[:, :-1]), current.embedding.weight)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )

    expected = demo._step(precise, list(precise.parameters()), (tokens,))
    eager = demo._step(model, parameters, (tokens,))
    compiled = torch.compile(lambda t: loss_of(model, t), backend="fa_inductor", fullgraph=True)
    poison_cuda_free_memory()
    ours, report = run_reported(lambda: demo._step(compiled, parameters, (tokens,)))
    assert len(report.sites) == 2
    assert set(kernels_of(report)) <= {"fa4", "cudnn"}
    for actual, reference, plain in zip(ours, expected, eager, strict=True):
        assert torch.isfinite(actual).all()
        assert relative_error(actual, reference) < max(1e-2, 2 * relative_error(plain, reference))
