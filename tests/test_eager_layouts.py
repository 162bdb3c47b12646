"""Hand-written attention: symbolic sizes, the output's layout, what is left of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_specs import HOPPER
from eager_attention import attend, only_spec, qkv, randn, repeat_kv, sink_attention
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from comparison import TOLERANCE, compare_forward, compare_with_eager, run_poisoned
from fa_inductor import compile_pass, explain, times
from fa_inductor.config import Config
from fa_inductor.patterns import eager
from fa_inductor.times import CORE
from helpers import compile_quick, compile_reference

# --- Sizes and layouts ----------------------------------------------------------------------------


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads, length, dim = q.shape
    q, k, v = (tensor.reshape(batch * heads, length, dim) for tensor in (q, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).view(batch, heads, length, length)
    weights = weights.masked_fill(
        torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf")
    )
    return torch.bmm(weights.softmax(-1).view(batch * heads, length, length), v)


DYNAMIC: dict[str, tuple[Callable[..., Tensor], int]] = {
    "plain": (attend, 4),
    "repeated": (lambda q, k, v: attend(q, repeat_kv(k), repeat_kv(v)), 2),
    "shared head": (attend, 1),
    "merged": (merged, 4),
    "rank 3": (lambda q, k, v: attend(q[:, :1], k[:, :1], v[:, :1])[:, 0], 4),
    "einsum": (
        lambda q, k, v: torch.einsum(
            "bhij,bhjd->bihd", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
        ),
        4,
    ),
    "sink": (lambda q, k, v: sink_attention(q, k, v, q[0, :, 0, 0], torch.zeros(1)), 4),
}


@pytest.mark.parametrize("way", DYNAMIC)
def test_one_graph_for_all_sizes(way: str) -> None:
    fn, kv_heads = DYNAMIC[way]
    compiled, graphs = compile_quick(fn), []
    for batch, length in ((2, 6), (3, 9), (5, 32)):
        inputs = [randn(batch, heads, length, 8) for heads in (4, kv_heads, kv_heads)]
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, [0, 2])
        with torch.no_grad():
            out, outcome = run_poisoned(compiled, inputs)
            torch.testing.assert_close(out, fn(*inputs), **TOLERANCE)
        assert outcome.kernel_calls == 1
        graphs.append(len(outcome.report.graphs))
    assert graphs == [1, 0, 0]


# Every other one: Dynamo takes a second for each.
@pytest.mark.parametrize("example", eager.examples()[::2], ids=lambda example: example.name)
def test_examples_with_dynamic_shapes(example: Any) -> None:
    """Equal to eager whatever is understood; sizes that are all symbolic may cost a site."""
    outcome = compare_forward(
        example.fn, compile_quick(example.fn, dynamic=True), example.make_inputs()
    )
    assert outcome.kernel_calls == outcome.rewritten_sites
    assert outcome.rewritten_sites == example.sites or outcome.reasons


@pytest.mark.parametrize("example", eager.examples(), ids=lambda example: example.name)
def test_the_output_has_eager_s_strides(example: Any) -> None:
    inputs = example.make_inputs()
    out, _ = run_poisoned(compile_quick(example.fn), inputs)
    assert out.stride() == example.fn(*inputs).stride()


@pytest.mark.parametrize("example", eager.examples(), ids=lambda example: example.name)
def test_nothing_of_the_scores_is_left_in_the_graph(example: Any) -> None:
    left: list[str] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compile_pass.run(gm, Config(kernels=("reference",)))
        left.extend(str(getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes)
        return gm.forward

    torch.compile(example.fn, backend=backend, fullgraph=True)(*example.make_inputs())
    assert not {"softmax", "matmul", "bmm", "einsum", "baddbmm", "dropout"} & set(left)


def test_a_user_that_needs_only_the_shape_of_scores() -> None:
    """SAM makes its bias `reshape_as` the scores."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.mT
        return (scores + bias.reshape_as(scores)).softmax(-1) @ v

    inputs = [*qkv(), randn(2 * 4 * 6, 6)]
    assert only_spec(compare_with_eager(fn, compile_quick(fn), inputs)).bias_needs_grad


# --- The choice -----------------------------------------------------------------------------------


def test_sdpa_kernel_pins_hand_written_attention_too() -> None:
    """MATH is the way to keep the code's own arithmetic."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend(q, k, v)

    outcome = compare_forward(fn, compile_quick(fn), qkv())
    assert outcome.kernel_calls == 0
    assert "sdpa_kernel(MATH)" in outcome.reasons[0]


@pytest.mark.parametrize(
    ("attention", "kernel"), [(attend, "cudnn"), (F.scaled_dot_product_attention, CORE)]
)
def test_hand_written_attention_is_not_core(
    attention: Callable[..., Tensor], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What core was measured at is PyTorch's fused attention, which does not stand there."""
    monkeypatch.setattr(times, "of", lambda spec, target: {CORE: 1.0, "fa4": 3.0, "cudnn": 2.0})
    inputs = [tensor.bfloat16() for tensor in qkv()]
    (site,) = explain(attention, target=HOPPER)(*inputs).sites
    assert site.kernel == kernel


class Module(nn.Module):
    """nn.Softmax and nn.Dropout, as they stand in older models."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.dropout(self.softmax((q * 8**-0.5) @ k.transpose(-2, -1)))
        return (weights @ v).transpose(1, 2).reshape(batch, length, width)


@pytest.mark.parametrize("compiler", [compile_quick, compile_reference])
def test_a_module_as_timm_has_it(compiler: Callable[..., Any]) -> None:
    model = Module().eval()
    outcome = compare_with_eager(model, compiler(model), [randn(2, 6, 32)], [*model.parameters()])
    spec = only_spec(outcome)
    assert spec.scale == pytest.approx(8**-0.5)
