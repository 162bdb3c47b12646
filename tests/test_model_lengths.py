"""One compile of Llama for all lengths, its mask understood with symbols for sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fa_inductor import collecting
from fa_inductor.masks import terms
from helpers import compile_quick
from poison import poisoned

LENGTHS = (65, 128, 129, 500, 1024, 4096)
LAYERS = 1


def llama(layers: int = LAYERS) -> Any:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(
        **sizes, **heads, num_hidden_layers=layers, max_position_embeddings=4096, use_cache=False
    )
    torch.manual_seed(0)
    return LlamaModel(config).eval()


def given(length: int, padded: bool) -> dict[str, Any]:
    ids = torch.randint(0, 64, (2, length))
    kept = torch.ones_like(ids)
    kept[0, length - length // 3 :] = 0
    return {"input_ids": ids, "attention_mask": kept} if padded else {"input_ids": ids}


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_one_compile_serves_all_lengths(padded: bool) -> None:
    model = llama()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = compile_quick(model, dynamic=True)
    with torch.no_grad(), collecting() as report:
        # A padded one is looked into whole, on a CPU for most of the test's time.
        for length in LENGTHS[:-1] if padded else LENGTHS:
            inputs = given(length, padded)
            wanted = model(**inputs).last_hidden_state
            with poisoned():
                out = compiled(**inputs).last_hidden_state
            if padded:  # outputs at padding mean nothing
                kept = inputs["attention_mask"].bool()
                out, wanted = out[kept], wanted[kept]
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    # A padded one of a single block (65 and 128) has its own graph: sizes of 1 are static.
    graphs = 2 if padded else 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    # Dynamo gives up its first attempt when a float turns out to be a symbol, and starts anew.
    assert (len(report.graphs), len(report.sites)) == (graphs, graphs * LAYERS)
    specs = [site.spec for site in report.sites[-LAYERS:]]
    for spec in specs:
        assert spec is not None
        if padded:
            assert spec.formula is not None
            assert spec.formula.kind == "causal"
        else:
            assert (spec.causal, spec.mask) == ("top_left", None)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_a_mask_is_looked_into_once_and_not_for_each_layer(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, looks = terms.meant, []

    def counted(*arguments: Any) -> Any:
        looks.append(arguments)
        return right(*arguments)

    monkeypatch.setattr(terms, "meant", counted)
    numbers = []
    for layers in (1, 3):
        looks.clear()
        torch._dynamo.reset()
        with torch.no_grad():
            compile_quick(llama(layers))(**given(16, padded))
        numbers.append(len(looks))
    assert numbers[0] == numbers[1] > 0
