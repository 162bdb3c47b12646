"""Hand-written attention that is left to PyTorch: each kind has its reason, in words.

What is taken and what is left is in `patterns/eager_examples.py`, which `test_patterns.py` runs.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from eager_attention import randn
from torch import Tensor

from comparison import compare_forward, compare_with_eager
from fa_inductor.patterns import eager
from helpers import compile_quick, run_reported

REASONS = {
    "weights used": "the attention weights are also used by mean",
    "scores used": "the attention weights are also used by mean",
    "weights applied twice": "the attention weights are also used by matmul",
    "weights multiplied": "the attention weights go through mul",
    "weights masked": "the attention weights go through masked_fill",
    "weights transposed": "the attention weights go through transpose",
    "dropout of the scores": "the scores go through dropout",
    "softmax over queries": "softmax over dimension -2 of 4",
    "softmax over heads": "softmax over dimension 1 of 4",
    "learned scale": "the scale is a tensor",
    "number added": "a number is added to the scores",
    "masked by -1e9": "masked scores are replaced by -1e+09 in float32",
    "masked, then scaled up to little": "then times 1e-20",
    "masked inside tanh": "a mask inside tanh",
    "scores clamped": "the scores go through clamp",
    "scores added to themselves": "used twice",
    "key written to": "is written to by zero_",
    "mask written to": "is written to by setitem",
    "scores written through a view": "the attention weights are also used by getitem",
    "scores written into the bias": "writes the scores over another tensor",
    "no gradient to the weights": "gradients stop at",
    "sink for each query": "a sink that is not one number for each head",
    "sink beside shifted scores": "the maximum is subtracted where softmax is not blind to it",
    "float32 queries beside bfloat16 values": "a float32 query beside bfloat16 values",
    "rank 5": "scores of rank 5",
}


def test_every_counterexample_has_its_reason_here() -> None:
    names = {example.name for example in eager.counterexamples()}
    assert {name for name in names if not name.startswith("no attention")} == set(REASONS)


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_says_what_is_in_the_way(name: str) -> None:
    (example,) = [each for each in eager.counterexamples() if each.name == name]
    inputs = [tensor.requires_grad_() for tensor in example.make_inputs()]
    _, report = run_reported(compile_quick(example.fn), *inputs)
    assert report.sites
    assert all(REASONS[name] in text for site in report.sites for text in site.reason_texts)


def mixture(x: Tensor, gate: Tensor, experts: Tensor) -> Tensor:
    """A router's softmax times a matrix is no attention, though softmax and matmul are there."""
    return torch.softmax(F.linear(x, gate), -1) @ experts


def test_what_is_no_attention_is_not_reported() -> None:
    outcome = compare_forward(
        mixture, compile_quick(mixture), [randn(2, 6, 8), randn(6, 8), randn(2, 6, 8)]
    )
    assert outcome.report.sites == []


def test_queries_with_as_many_features_as_keys_are_not_taken_for_weights() -> None:
    """(6, 6) matrices everywhere: a size is no proof of a role. float64, as scores of some hundred
    multiply rounding."""

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(2):
            q, k = F.linear(x, weight), F.linear(x, weight) + x
            x = x + (q @ k.mT).softmax(-1) @ x
        return x

    inputs = [randn(*size, dtype=torch.float64) for size in ((2, 6, 6), (6, 6))]
    outcome = compare_with_eager(fn, compile_quick(fn), inputs)
    assert outcome.rewritten_sites == len(outcome.report.sites) == 2
