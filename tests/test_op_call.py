"""Calls of the ops by the user's own code: what is reported of them, however they are spelt.

The op for variable lengths is in `test_guards_varlen.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

import fa_inductor
from fa_inductor import ops, rewrite
from fa_inductor.config import Config
from fa_inductor.spec import AttentionSpec
from helpers import compile_quick, run_reported


def qkv(grad: bool = False) -> list[Tensor]:
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16))
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def spec_of(fn: Callable[..., Any], *inputs: Tensor) -> AttentionSpec:
    """Of the one site of `fn`, which names a kernel of the GPU and runs on the CPU."""
    report = fa_inductor.explain(fn, target="sm_90a")(*inputs)
    report.assert_no_graph_breaks()
    (site,) = report.sites
    assert site.kernel == "fa4"
    assert site.spec is not None
    return site.spec


def test_every_argument_is_in_the_spec() -> None:
    q, k, v = qkv(grad=True)
    bias = torch.randn(1, 4, 5, 7, requires_grad=True)
    used = torch.tensor([3, 5], dtype=torch.int32)
    rng = torch.zeros(2, dtype=torch.int64)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
        extras = (bias, sink, used, used, rng, 0.25, 3, 1, 2.0)
        return ops.attention(q, k, v, 0.5, "none", "BSHD", True, "fa4", *extras)[0]

    spec = spec_of(attend, q, k, v, bias, torch.randn(4))
    assert (spec.q.shape, spec.k.shape, spec.v.shape) == (q.shape, k.shape, v.shape)
    assert spec.mask == "bias float32 (1, 4, 5, 7)"
    assert spec.bias is not None
    assert (spec.bias.shape, spec.bias_needs_grad) == (bias.shape, True)
    assert (spec.has_sink, spec.has_seqlens, spec.dropout_p) == (True, True, 0.25)
    assert (spec.scale, spec.window, spec.softcap) == (0.5, (3, 1), 2.0)
    assert (spec.needs_grad, spec.deterministic) == (True, True)


def test_a_plain_call_by_name() -> None:
    """... of which nothing else is taken to be there."""
    rest = {"scale": None, "causal": "bottom_right", "out_order": "BSHD", "deterministic": False}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.fa_inductor.attention(q=q, k=k, v=v, kernel="fa4", **rest)[0]

    q, k, v = qkv()
    spec = spec_of(attend, q, k, v)
    expected = AttentionSpec(spec.q, spec.k, spec.v, torch.float32, causal="bottom_right")
    assert spec == expected
    assert spec.q.shape == q.shape


def test_inference_is_described_like_the_rest() -> None:
    """(B, S, H, D) tensors have a spec of (B, H, S, D)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bshd = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return ops.attention_inference(
            *bshd, 0.5, "bottom_right", "BSHD", "fa4", None, q[0, :, 0, 0]
        )

    q, k, v = qkv()
    spec = spec_of(attend, q, k, v)
    assert (spec.q.shape, spec.k.shape, spec.v.shape) == (q.shape, k.shape, v.shape)
    assert spec.q.stride == q.stride()
    assert (spec.causal, spec.scale, spec.has_sink) == ("bottom_right", 0.5, True)
    assert (spec.needs_grad, spec.has_seqlens) == (False, False)


def test_what_the_pass_has_made_is_no_site_of_its_own() -> None:
    """A graph that comes by again yields nothing new, with and without gradients."""
    found: list[list[str]] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        config = Config(kernels=("reference",), on_fallback="ignore")
        found.append([site.family for site in rewrite.rewrite(gm, config)])
        found.append([site.family for site in rewrite.rewrite(gm, config)])
        return gm.forward

    attend = torch.nn.functional.scaled_dot_product_attention
    for grad in (False, True):
        q = torch.randn(2, 4, 5, 8, requires_grad=grad)
        torch._dynamo.reset()
        torch.compile(lambda q: attend(q, q, q), backend=backend)(q)
    assert found == [["sdpa"], []] * 2


def test_a_call_without_a_needed_argument_is_not_understood() -> None:
    """It fails as PyTorch has it fail, not in the pass."""
    graph = fx.Graph()
    q = graph.placeholder("q")
    call = graph.call_function(ops.attention, (q, q, q))
    for node in (q, call):
        node.meta["example_value"] = torch.randn(1, 1, 2, 8)
    graph.output(call)
    config = Config(kernels=("reference",), on_fallback="ignore")
    (site,) = rewrite.rewrite(fx.GraphModule(torch.nn.Module(), graph), config)
    assert (site.kernel, site.spec) == (None, None)
    assert any("argument 'scale' is missing" in text for text in site.reason_texts)


def test_the_kernel_that_was_named_is_the_one_that_runs() -> None:
    q, k, v = qkv()
    rest = (None, "none", "BSHD", False, "reference")
    _, report = run_reported(compile_quick(lambda *x: ops.attention(*x, *rest)[0]), q, k, v)
    assert [site.kernel for site in report.sites] == ["reference"]
