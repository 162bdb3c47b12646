"""The op for variable lengths on fa4 against float64, one sequence after another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from sequence_oracle import packed
from torch import Tensor

from fa_inductor import varlen_ops
from helpers import relative_error
from poison import poison_cuda_free_memory

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


def starts_of(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def on_gpu(starts: Sequence[int]) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32, device="cuda")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def leaf(*shape: int) -> Tensor:
    return randn(*shape).requires_grad_()


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
