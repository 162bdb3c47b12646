"""`flash_attn_varlen_func` in compiled code: FA4 bit by bit, and right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn.cute import flash_attn_varlen_func
from sequence_oracle import packed
from torch import Tensor
from varlen_checks import (
    LENGTHS_K,
    LENGTHS_Q,
    TOLERANCE,
    compare,
    leaf,
    on_gpu,
    qkv,
    starts_of,
)

from helpers import relative_error
from poison import poison_cuda_free_memory


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
