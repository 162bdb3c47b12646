"""cuDNN's graphs without cuDNN: every tensor, the band and the options as they are declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_inputs import lengths, qkv, rng
from cudnn_stub import (
    BF16,
    PROBLEM,
    Machine,
    backward,
    declared,
    described,
    forward,
    inputs_of,
    install,
    plans,
)
from torch import Tensor

from fa_inductor.errors import ShapeError
from fa_inductor.kernels import cudnn
from fa_inductor.kernels.cudnn_graph import Layout, build
from fa_inductor.op_memory import outputs
from fa_inductor.problem import Gradients, Inputs, Problem


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


# --- Layouts --------------------------------------------------------------------------------------


def test_dimensions_of_size_1_have_canonical_strides() -> None:
    """As if packed, whatever PyTorch says: they never move in memory."""
    packed = torch.empty(2, 1, 4, 1)
    for strides in ((4, 4, 1, 1), (4, 99, 1, 7), (4, 0, 1, 0)):
        strided = torch.empty(8).as_strided((2, 1, 4, 1), strides)
        assert (
            Layout.of(strided)
            == Layout.of(packed)
            == Layout((2, 1, 4, 1), (4, 4, 1, 1), torch.float32)
        )
    assert Layout.of(torch.empty(1).as_strided((1, 1), (5, 9))).stride == (1, 1)


def test_a_layout_can_be_that_of_an_expanded_view() -> None:
    assert Layout.of(torch.empty(1, 2, 1, 6), (3, 2, 4, 6)).stride == (0, 6, 0, 1)
    assert Layout.of(torch.empty(5), (1, 5, 1, 1)).size == (1, 5, 1, 1)


def bf16(*size: int) -> Tensor:
    return torch.empty(size, dtype=BF16)


STRIDED: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "BSHD": lambda: qkv(dtype=BF16),
    "BHSD, GQA, Dv": lambda: qkv(dtype=BF16, hkv=2, dv=16, orders=((0, 1, 2),) * 3),
    "packed": lambda: bf16(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0),
    "packed, SBHD": lambda: bf16(5, 2, 6, 8).permute(1, 2, 0, 3).split([4, 1, 1], dim=1),
    "expanded heads": lambda: (bf16(2, 4, 5, 8), *[bf16(2, 1, 5, 8).expand(2, 4, 5, 8)] * 2),
    "every second token": lambda: (bf16(2, 4, 5, 8), *[bf16(2, 4, 12, 8)[:, :, ::2]] * 2),
    "one head of one sequence": lambda: qkv(b=1, hq=1, hkv=1, dtype=BF16),
    "one query": lambda: qkv(sq=1, dtype=BF16),
}


@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED.keys())
def test_strides_are_declared_as_they_are(
    make: Callable[[], tuple[Tensor, ...]],
) -> None:
    """Of every tensor, forward and backward, in sizes above 1: no copy, no guess."""
    inputs = Inputs(*make())
    out, lse, _ = forward(inputs)
    grads = backward(inputs)
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out, "lse": lse[..., None]}
    others = {"grad_out": out, "grad_q": grads.q, "grad_k": grads.k, "grad_v": grads.v}
    for plan, named in zip(plans(), (given, given | others), strict=True):
        told = declared(plan)
        assert set(told) == set(named)
        for name, tensor in named.items():
            assert told[name]["dim"] == list(tensor.shape)
            strides = zip(tensor.shape, told[name]["stride"], tensor.stride(), strict=True)
            assert all(size == 1 or stride == real for size, stride, real in strides), name
            assert told[name]["data_type"] == ("float" if name == "lse" else "bfloat16")
    calls = [plan.graph.calls for plan in plans()]
    assert [[operation for operation, _ in each] for each in calls] == [["sdpa"], ["sdpa_backward"]]


def test_a_bias_is_declared_whole_and_broadcast_by_its_strides() -> None:
    """A dimension of size 1 for the queries would be read wrongly in the backward."""
    bias = bf16(2, 1, 1, 6)
    forward(inputs_of(bias=bias))
    grads = backward(inputs_of(bias=bias), bias=torch.empty_like(bias))
    for plan in plans():
        told = declared(plan)["bias"]
        assert (told["dim"], told["stride"][2:]) == ([2, 1, 5, 6], [0, 1])
        ((_, arguments),) = plan.graph.calls
        assert arguments["bias"].declared is told
    assert declared(plans()[1])["grad_bias"]["dim"] == [2, 1, 5, 6]
    assert grads.bias is not None
    assert grads.bias.shape == bias.shape  # summed over the queries


def test_the_gradient_of_a_broadcast_bias_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN writes it whole, in memory of its own, and repeating the launch alone is not enough."""
    bias = bf16(1, 4, 1, 6)
    inputs, made = inputs_of(bias=bias), torch.empty_like(bias)
    out, lse = outputs(inputs.q, inputs.v, "BSHD", True)
    grads = Gradients(*(torch.empty_like(tensor) for tensor in inputs[:3]), bias=made)
    monkeypatch.setattr(Tensor, "new_empty", lambda self, size: torch.ones(size, dtype=self.dtype))
    assert cudnn.backward(PROBLEM, inputs, out, lse, out, None, grads) is None
    assert made.eq(5).all()


# --- The band -------------------------------------------------------------------------------------

BANDS: dict[str, tuple[Problem, dict[str, Any]]] = {
    "none": (Problem(1.0), {}),
    "top left": (Problem(1.0, "top_left"), {"alignment": "top left", "right_bound": 0}),
    "bottom right": (Problem(1.0, "bottom_right"), {"alignment": "bottom right", "right_bound": 0}),
    "left": (Problem(1.0, "none", 3), {"alignment": "bottom right", "left_bound": 4}),
    "both": (
        Problem(1.0, "none", 3, 2),
        {"alignment": "bottom right", "left_bound": 4, "right_bound": 2},
    ),
    "causal and right": (
        Problem(1.0, "top_left", 0, 2),
        {"alignment": "top left", "left_bound": 1, "right_bound": 0},
    ),
}


@pytest.mark.parametrize(("problem", "options"), BANDS.values(), ids=BANDS.keys())
def test_a_band_is_told_in_cudnn_s_way(problem: Problem, options: dict[str, Any]) -> None:
    """Its left bound counts the diagonal, FlashAttention's does not. With equal lengths the two
    alignments are one band, and cuDNN takes more beside top-left; not so with lengths."""
    names = {"alignment": "diagonal_alignment"}
    for length, extras in (
        (5, {}),
        (6, {}),
        (6, {n: lengths(4, 6) for n in ("seqlens_q", "seqlens_k")}),
    ):
        inputs = inputs_of(sq=length, **extras)
        ((_, arguments),) = build(described(inputs, problem), 1).graph.calls
        found = {name: value for name, value in arguments.items() if "diagonal" in name}
        wanted = {names.get(n, f"diagonal_band_{n}"): value for n, value in options.items()}
        if wanted and length == 6 and not extras:
            wanted["diagonal_alignment"] = "top left"
        assert found == wanted
        assert arguments["attn_scale"] == 1.0


def test_what_else_is_told() -> None:
    """Sink, lengths and dropout, by their own names; determinism to the backward alone."""
    both = {"seqlens_q": lengths(4, 5), "seqlens_k": lengths(6, 1)}
    inputs = inputs_of(sink=torch.zeros(4), **both, rng=rng(1))
    problem = Problem(0.5, dropout_p=0.25, deterministic=True)
    plan = build(described(inputs, problem), 1)
    ((_, arguments),) = plan.graph.calls
    assert arguments["use_padding_mask"] is True
    assert arguments["sink_token"].declared["dim"] == [1, 4, 1, 1]
    assert arguments["seq_len_q"].declared["dim"] == [2, 1, 1, 1]
    assert arguments["seq_len_kv"].declared["name"] == "seqlens_k"
    probability, seed, offset = arguments["dropout"]
    assert (probability, seed.declared["name"], offset.declared["name"]) == (0.25, "seed", "offset")
    assert seed.declared["data_type"] == "int64"
    assert "use_deterministic_algorithm" not in arguments
    assert plan.graph.options["io_data_type"] == "bfloat16"
    assert plan.graph.options["compute_data_type"] == "float"


def test_what_an_empty_sequence_would_reach_is_refused(machine: Machine) -> None:
    """A sequence without keys gives NaN inside; sinks and a mask's gradient are sums over all."""
    short = lengths(6, 0)
    for call in (forward, backward):
        with pytest.raises(ShapeError, match="no sink beside sequence lengths"):
            call(inputs_of(sink=torch.zeros(4), seqlens_k=short))
    bias = torch.zeros(1, 4, 5, 6, dtype=BF16)
    masked = inputs_of(bias=bias, seqlens_k=short)
    with pytest.raises(ShapeError, match="no gradient of a bias beside sequence lengths"):
        backward(masked, bias=torch.zeros_like(bias))
    assert machine.library.graphs == []
