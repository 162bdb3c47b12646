"""The op for variable lengths on FA4, forward and backward, in memory that is full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequence_oracle import packed
from torch import Tensor
from varlen_checks import (
    LENGTHS_K,
    LENGTHS_Q,
    NUMBERS,
    TOLERANCE,
    check,
    compare,
    on_gpu,
    qkv,
    randn,
    rest,
    starts_of,
)

from fa_inductor import call_cache, op_calls, repairs, varlen_ops
from helpers import relative_error
from poison import poison_cuda_free_memory, poisoned


@pytest.fixture(autouse=True)
def no_known_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_calls, "calls", call_cache.Calls())


# --- Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
def test_grouped_queries(numbers: dict[str, Any]) -> None:
    check(heads=(4, 2), **numbers)


@pytest.mark.parametrize("causal", [False, True])
def test_as_many_key_heads(causal: bool) -> None:
    check(causal=causal)


@pytest.mark.parametrize("sink", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "numbers", [{}, {"causal": True, "window_left": 64}], ids=["plain", "causal window"]
)
def test_sink(numbers: dict[str, Any], sink: torch.dtype) -> None:
    """The sink takes the whole row of a sequence without keys; its gradient is there too."""
    check(heads=(4, 2), sink=sink, **numbers)


@pytest.mark.parametrize("sink", [None, torch.float32], ids=["no sink", "sink"])
def test_gradient_of_lse(sink: torch.dtype | None) -> None:
    check(heads=(4, 2), causal=True, sink=sink, of_lse=True)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    check(dims=dims, causal=True)


def test_bounds_that_are_not_known() -> None:
    check(heads=(4, 2), causal=True, known_bounds=False)


def test_bounds_below_one_tile() -> None:
    """FA4 takes another scheduler then."""
    check(([17, 0, 1, 40], [20, 3, 1, 31]), causal=True)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_deterministic_gradients_repeat_bit_by_bit(heads: tuple[int, int]) -> None:
    starts = (starts_of(LENGTHS_Q), starts_of(LENGTHS_K))
    leaves = qkv(starts[0][-1], starts[1][-1], heads)
    arguments = rest(*map(on_gpu, starts), (300, 300), deterministic=True, causal=True)
    results = varlen_ops.attention_varlen(*leaves, *arguments)
    grad_out = torch.randn_like(results[0])
    once, again = (
        torch.autograd.grad(results[0], leaves, grad_out, retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, once, again))
    compare(results, leaves, starts, causal=True)


def test_more_sequences_than_fa4_looks_up_one_by_one() -> None:
    """Above 256 sequences FA4 sums up their tiles in a kernel of its own."""
    lengths_q = [(3 * i) % 9 for i in range(300)]
    lengths_k = [(5 * i) % 11 for i in range(300)]
    for _ in range(2):
        check((lengths_q, lengths_k), causal=True)
        lengths_q, lengths_k = lengths_q[::-1], lengths_k[::-1]
    assert op_calls.calls.repeated == 0


def test_every_element_is_written_with_poisoned_allocations() -> None:
    """The op's own allocations are NaN before the kernel runs."""
    with poisoned():
        check(heads=(4, 2), causal=True, sink=torch.float32)


@pytest.mark.parametrize("totals", [(0, 0), (0, 64), (64, 0)], ids=str)
def test_nothing_to_attend_to(totals: tuple[int, int]) -> None:
    leaves = qkv(*totals)
    starts = ([0, totals[0]], [0, totals[1]])
    out, lse = varlen_ops.attention_varlen(*leaves, *rest(*map(on_gpu, starts), totals))
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves))


# --- Layouts --------------------------------------------------------------------------------------


def test_packed_views_are_read_as_they_are() -> None:
    """Three slices of one (T, 3, H, D) projection: right, and nothing is copied."""
    lengths = (LENGTHS_K, LENGTHS_K)
    copies = dict(repairs.counts)
    projection = randn(sum(LENGTHS_K), 3, 4, 64)
    leaves = [tensor.detach().requires_grad_() for tensor in projection.unbind(1)]
    assert not any(tensor.is_contiguous() for tensor in leaves)
    check(lengths, leaves, causal=True)
    ours = {name: repairs.counts.get(name, 0) - copies.get(name, 0) for name in ("q", "k", "v")}
    assert ours == {"q": 0, "k": 0, "v": 0}


def heads_first(total: int) -> Tensor:
    return randn(4, total, 64).transpose(0, 1)


def shifted_pointer(total: int) -> Tensor:
    return randn(total * 4 * 64 + 1)[1:].view(total, 4, 64)


def innermost_stride(total: int) -> Tensor:
    return randn(total, 64, 4).transpose(1, 2)


def odd_strides(total: int) -> Tensor:
    return randn(total, 4, 65)[..., :64]


def expanded_heads(total: int) -> Tensor:
    return randn(total, 1, 64).expand(total, 4, 64)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize(
    "view", [heads_first, shifted_pointer, innermost_stride, odd_strides, expanded_heads]
)
def test_oddly_strided_inputs(view: Callable[[int], Tensor], place: int) -> None:
    total = sum(LENGTHS_K)
    leaves = qkv(total, total)
    leaves[place] = view(total).detach().requires_grad_()
    check((LENGTHS_K, LENGTHS_K), leaves, causal=True)


@pytest.mark.parametrize("layout", ["heads first", "sliced", "zero strides"])
def test_grad_out_of_any_layout(layout: str) -> None:
    starts = (starts_of(LENGTHS_Q), starts_of(LENGTHS_K))
    leaves = qkv(starts[0][-1], starts[1][-1])
    arguments = rest(*map(on_gpu, starts), (300, 300), deterministic=True, causal=True)
    out, _ = varlen_ops.attention_varlen(*leaves, *arguments)
    base = torch.randn_like(out)
    grad_out = {
        "heads first": base.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced": torch.stack([base, base], -1).flatten(-2)[..., ::2],
        "zero strides": torch.ones((), device="cuda", dtype=out.dtype).expand(out.shape),
    }[layout]
    actual = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    expected = torch.autograd.grad(out, leaves, grad_out.contiguous())
    assert all(map(torch.equal, actual, expected))


# --- Repeated launches ----------------------------------------------------------------------------

# Equal sums and equal longest sequences, so that all is one class of calls.
CHANGING = ([130, 0, 70, 1], [1, 130, 0, 70], [0, 130, 70, 1], [70, 1, 130, 0])


@pytest.mark.parametrize("shared", [True, False], ids=["one tensor", "two tensors"])
@pytest.mark.parametrize("sink", [None, torch.bfloat16], ids=["no sink", "sink"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_other_lengths_at_equal_shapes(
    heads: tuple[int, int], sink: torch.dtype | None, shared: bool
) -> None:
    """Launches noted for some lengths are right for others, and really repeated."""
    for count, lengths in enumerate(CHANGING):
        starts = starts_of(lengths)
        starts_q = on_gpu(starts)
        starts_k = starts_q if shared else on_gpu(starts_of(lengths[::-1]))
        leaves = qkv(201, 201, heads)
        if sink is not None:
            leaves.append(torch.randn(heads[0], device="cuda", dtype=sink).requires_grad_())
        arguments = rest(starts_q, starts_k, (130, 130), *leaves[3:], causal=True)
        poison_cuda_free_memory(0.1)
        results = varlen_ops.attention_varlen(*leaves[:3], *arguments)
        compare(results, leaves, (starts, starts_k.tolist()), causal=True)
        # The backward is repeated too, by autograd's thread, which remembers calls of its own.
        assert op_calls.calls.repeated == count


def test_one_tensor_of_lengths_is_not_taken_for_two() -> None:
    first, second = starts_of(CHANGING[0]), starts_of(CHANGING[1])
    one = on_gpu(first)
    for starts_q, starts_k in ((one, one), (one, on_gpu(second)), (one, one)):
        leaves = qkv(201, 201)
        arguments = rest(starts_q, starts_k, (130, 130), causal=True)
        results = varlen_ops.attention_varlen(*leaves, *arguments)
        compare(results, leaves, (first, starts_k.tolist()), causal=True)


def test_capture_into_a_cuda_graph_with_lengths_changed_between_replays() -> None:
    starts = on_gpu(starts_of(CHANGING[0]))
    q, k, v = (tensor.detach() for tensor in qkv(201, 201))
    arguments = rest(starts, starts, (130, 130), causal=True)
    with torch.no_grad():
        for _ in range(2):
            varlen_ops.attention_varlen(q, k, v, *arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = varlen_ops.attention_varlen(q, k, v, *arguments)
        for lengths in CHANGING[1:]:
            starts.copy_(on_gpu(starts_of(lengths)))
            for tensor in (q, k, v):
                tensor.normal_()
            graph.replay()
            expected, expected_lse = packed(
                q, k, v, starts_of(lengths), starts_of(lengths), causal=True
            )
            assert relative_error(out, expected) < TOLERANCE["out"]
            assert relative_error(lse, expected_lse) < TOLERANCE["lse"]
