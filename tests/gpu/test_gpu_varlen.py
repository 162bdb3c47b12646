"""The op for variable lengths on FA4, and `flash_attn_varlen_func` in compiled code.

Against float64, one sequence after another; forward and backward, in memory that is full of NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from flash_attn.cute import flash_attn_varlen_func
from sequence_oracle import packed
from torch import Tensor

from fa_inductor import call_cache, op_calls, repairs, varlen_ops
from helpers import relative_error
from poison import poison_cuda_free_memory, poisoned

# bf16 keeps 8 bits; scores, weights and output are rounded. dsink sums products of both signs.
TOLERANCE = {"out": 8e-3, "lse": 1e-3, "q": 1.6e-2, "k": 1.6e-2, "v": 1.6e-2, "sink": 3e-2}

# Tiles are 128 keys and 64 to 192 queries: sequences below, at and above them, of length 0 and 1,
# with more queries than keys and fewer.
LENGTHS_Q = [130, 0, 1, 67, 300, 128, 5]
LENGTHS_K = [130, 33, 1, 0, 150, 256, 300]
NUMBERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "left window": {"window_left": 40},
    "window": {"window_left": 40, "window_right": 7},
    "causal window": {"causal": True, "window_left": 64},
    "softcap": {"softcap": 5.0},
    "causal softcap": {"softcap": 5.0, "causal": True},
}


@pytest.fixture(autouse=True)
def no_known_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_calls, "calls", call_cache.Calls())


def starts_of(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def on_gpu(starts: Sequence[int]) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32, device="cuda")


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def leaf(*shape: int) -> Tensor:
    return _randn(*shape).requires_grad_()


def qkv(
    total_q: int, total_k: int, heads: tuple[int, int] = (4, 4), dims: tuple[int, int] = (64, 64)
) -> list[Tensor]:
    q = leaf(total_q, heads[0], dims[0])
    return [q, leaf(total_k, heads[1], dims[0]), leaf(total_k, heads[1], dims[1])]


def rest(
    starts_q: Tensor,
    starts_k: Tensor,
    bounds: tuple[int, int],
    sink: Tensor | None = None,
    *,
    deterministic: bool = False,
    scale: float | None = None,
    causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> tuple[Any, ...]:
    """The op's arguments after q, k and v."""
    kind = "bottom_right" if causal else "none"
    numbers = (scale, kind, deterministic, "fa4", sink, window_left, window_right, softcap)
    return (starts_q, starts_k, *bounds, *numbers)


def compare(
    results: tuple[Tensor, Tensor | None],
    leaves: Sequence[Tensor],
    starts: tuple[Sequence[int], Sequence[int]],
    *,
    of_lse: bool = False,
    **numbers: Any,
) -> tuple[Tensor, ...]:
    """out, lse and gradients against float64, and none of them NaN; the gradients."""
    out, lse = results
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    wanted, wanted_lse = packed(*exact[:3], *starts, *exact[3:], **numbers)
    with torch.no_grad():
        assert torch.isfinite(out).all()
        assert relative_error(out, wanted) < TOLERANCE["out"]
        seen = ~torch.isneginf(wanted_lse)
        if lse is not None:
            assert torch.equal(~torch.isneginf(lse), seen)
            assert relative_error(lse[seen], wanted_lse[seen]) < TOLERANCE["lse"]
    weight, weight_lse = torch.randn_like(out), torch.randn_like(wanted_lse)[seen]
    loss, wanted_loss = (out * weight).float().sum(), (wanted * weight.double()).sum()
    if of_lse:
        assert lse is not None
        loss = loss + (lse[seen] * weight_lse).sum()
        wanted_loss = wanted_loss + (wanted_lse[seen] * weight_lse).sum()
    poison_cuda_free_memory(0.3)
    grads = torch.autograd.grad(loss, leaves)
    names = ("q", "k", "v", "sink")
    wanted_grads = torch.autograd.grad(wanted_loss, exact)
    for name, ours, theirs in zip(names, grads, wanted_grads, strict=False):
        assert torch.isfinite(ours).all(), name
        assert relative_error(ours, theirs) < TOLERANCE[name], name
    return grads


def check(
    lengths: tuple[Sequence[int], Sequence[int]] = (LENGTHS_Q, LENGTHS_K),
    leaves: Sequence[Tensor] = (),
    *,
    heads: tuple[int, int] = (4, 4),
    dims: tuple[int, int] = (64, 64),
    sink: torch.dtype | None = None,
    known_bounds: bool = True,
    deterministic: bool = False,
    of_lse: bool = False,
    **numbers: Any,
) -> tuple[Tensor, ...]:
    """The op on fresh inputs, or on `leaves`."""
    starts = (starts_of(lengths[0]), starts_of(lengths[1]))
    given = list(leaves) or qkv(starts[0][-1], starts[1][-1], heads, dims)
    if sink is not None:
        given.append(torch.randn(heads[0], device="cuda", dtype=sink).requires_grad_())
    bounds = (max(lengths[0]), max(lengths[1])) if known_bounds else (0, 0)
    arguments = rest(
        *map(on_gpu, starts), bounds, *given[3:], deterministic=deterministic, **numbers
    )
    poison_cuda_free_memory(0.3)
    results = varlen_ops.attention_varlen(*given[:3], *arguments)
    return compare(results, given, starts, of_lse=of_lse, **numbers)


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
    projection = _randn(sum(LENGTHS_K), 3, 4, 64)
    leaves = [tensor.detach().requires_grad_() for tensor in projection.unbind(1)]
    assert not any(tensor.is_contiguous() for tensor in leaves)
    check(lengths, leaves, causal=True)
    ours = {name: repairs.counts.get(name, 0) - copies.get(name, 0) for name in ("q", "k", "v")}
    assert ours == {"q": 0, "k": 0, "v": 0}


def heads_first(total: int) -> Tensor:
    return _randn(4, total, 64).transpose(0, 1)


def shifted_pointer(total: int) -> Tensor:
    return _randn(total * 4 * 64 + 1)[1:].view(total, 4, 64)


def innermost_stride(total: int) -> Tensor:
    return _randn(total, 64, 4).transpose(1, 2)


def odd_strides(total: int) -> Tensor:
    return _randn(total, 4, 65)[..., :64]


def expanded_heads(total: int) -> Tensor:
    return _randn(total, 1, 64).expand(total, 4, 64)


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


# --- flash_attn_varlen_func -----------------------------------------------------------------------


def compiled_and_eager(**given: Any) -> tuple[Any, Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
        starts_q, starts_k, *sink = others
        rest = {"learnable_sink": sink[0]} if sink else {}
        bounds = {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
        lengths = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, **bounds}
        return flash_attn_varlen_func(q, k, v, **{**lengths, **given, **rest})

    return torch.compile(attend, fullgraph=True, backend="fa_inductor"), attend


FA4_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "plain": ({}, {}, False),
    "causal": ({"causal": True}, {"causal": True}, False),
    "no bounds": (
        {"causal": True, "max_seqlen_q": None, "max_seqlen_k": None},
        {"causal": True},
        False,
    ),
    "sink and window": (
        {"causal": True, "window_size": (64, None)},
        {"causal": True, "window_left": 64},
        True,
    ),
    "softcap": ({"softcap": 5.0, "softmax_scale": 0.2}, {"softcap": 5.0, "scale": 0.2}, False),
}


@pytest.mark.parametrize(
    ("given", "numbers", "with_sink"), FA4_CALLS.values(), ids=FA4_CALLS.keys()
)
def test_compiled_call_of_fa4(
    given: dict[str, Any], numbers: dict[str, Any], with_sink: bool
) -> None:
    """Bit by bit what FA4 gives eagerly, and right."""
    starts = (starts_of(LENGTHS_Q), starts_of(LENGTHS_K))
    leaves = qkv(starts[0][-1], starts[1][-1], (4, 2))
    if with_sink:
        leaves.append(torch.randn(4, device="cuda", dtype=torch.bfloat16).requires_grad_())
    compiled, eager = compiled_and_eager(deterministic=True, return_lse=True, **given)
    inputs = (*leaves[:3], *map(on_gpu, starts), *leaves[3:])
    expected = eager(*inputs)
    poison_cuda_free_memory(0.3)
    results = compiled(*inputs)
    assert all(map(torch.equal, results, expected))
    grad_out = torch.randn_like(results[0])
    wanted = torch.autograd.grad(expected[0], leaves, grad_out)
    poison_cuda_free_memory(0.3)
    grads = torch.autograd.grad(results[0], leaves, grad_out)
    assert all(map(torch.equal, grads[:3], wanted[:3]))
    assert all(relative_error(*pair) < 4e-3 for pair in zip(grads[3:], wanted[3:], strict=True))
    compare(compiled(*inputs), leaves, starts, of_lse=True, **numbers)


def test_compiled_inference_without_lse() -> None:
    starts = (starts_of(LENGTHS_Q), starts_of(LENGTHS_K))
    compiled, _ = compiled_and_eager(causal=True)
    with torch.no_grad():
        q, k, v = (tensor.detach() for tensor in qkv(starts[0][-1], starts[1][-1], (4, 2)))
        out, lse = compiled(q, k, v, *map(on_gpu, starts))
    expected, _ = packed(q, k, v, *starts, causal=True)
    assert lse is None
    assert torch.isfinite(out).all()
    assert relative_error(out, expected) < TOLERANCE["out"]


def test_changed_lengths_in_compiled_code() -> None:
    """Tokens, sequences and bounds change from batch to batch, without a recompile."""

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, bound: int) -> Tensor:
        return flash_attn_varlen_func(q, k, v, None, starts, starts, bound, bound, causal=True)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="fa_inductor", dynamic=True)
    for count, lengths in enumerate(([130, 70], [70, 130], [1, 300, 2], [200, 201], [256, 3, 90])):
        starts = starts_of(lengths)
        leaves = qkv(starts[-1], starts[-1], (4, 2))
        with torch._dynamo.config.patch(error_on_recompile=count > 0):
            out = compiled(*leaves, on_gpu(starts), max(lengths))
        compare((out, None), leaves, (starts, starts), causal=True)


@pytest.mark.parametrize("sides", ["q", "k", "qk"])
def test_padded_sequences_with_lengths(sides: str) -> None:
    """(B, S, H, D) with seqused: the dense op, right on the rows that count."""
    used = {"q": [130, 0, 67, 200], "k": [200, 33, 1, 150]}
    rows = used["q"] if "q" in sides else [200] * 4
    keys = used["k"] if "k" in sides else [200] * 4
    lengths = {f"seqused_{side}": on_gpu(used[side]) for side in sides}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, causal=True, **lengths)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="fa_inductor")
    leaves = [leaf(4, 200, heads, 64) for heads in (4, 2, 2)]
    out = compiled(*leaves)
    weight = torch.randn_like(out)
    counts = torch.arange(200, device="cuda")[None, :] < on_gpu(rows)[:, None]
    weight = weight * counts[..., None, None]
    poison_cuda_free_memory(0.3)
    grads = torch.autograd.grad(out, leaves, weight)
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    loss = torch.zeros((), device="cuda", dtype=torch.float64)
    wanted = torch.zeros(out.shape, device="cuda", dtype=torch.float64)
    for b, (row, key) in enumerate(zip(rows, keys, strict=True)):
        q, k, v = exact[0][b, :row], exact[1][b, :key], exact[2][b, :key]
        expected, _ = packed(q, k, v, [0, row], [0, key], causal=True)
        wanted[b, :row] = expected.detach()
        loss = loss + (expected * weight[b, :row].double()).sum()
    with torch.no_grad():
        assert relative_error(out * counts[..., None, None], wanted) < TOLERANCE["out"]
    for name, ours, theirs in zip("qkv", grads, torch.autograd.grad(loss, exact), strict=True):
        assert torch.isfinite(ours).all(), name
        assert relative_error(ours, theirs) < TOLERANCE[name], name


def test_an_argument_that_is_not_carried_runs_eagerly_and_right() -> None:
    starts = (starts_of(LENGTHS_Q), starts_of(LENGTHS_K))
    _, eager = compiled_and_eager(causal=True, pack_gqa=False)
    compiled = torch.compile(lambda q, *x: eager(q * 1, *x)[0] * 1, backend="fa_inductor")
    q, k, v = (tensor.detach() for tensor in qkv(starts[0][-1], starts[1][-1], (4, 2)))
    with torch.no_grad():
        out = compiled(q, k, v, *map(on_gpu, starts))
    expected, _ = packed(q, k, v, *starts, causal=True)
    assert relative_error(out, expected) < TOLERANCE["out"]
