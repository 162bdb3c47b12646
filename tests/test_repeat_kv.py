"""Key heads that are repeated for the queries which share them: the op takes them unrepeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comparison import compare_forward, compare_with_eager
from helpers import compile_quick

attend = F.scaled_dot_product_attention


def randn(*size: int) -> Tensor:
    return torch.randn(size)


def qkv(heads: int = 4, kv_heads: int = 4, length: int = 6) -> list[Tensor]:
    return [randn(2, h, length, 8) for h in (heads, kv_heads, kv_heads)]


def repeat_kv(x: Tensor, groups: int = 2) -> Tensor:
    batch, heads, length, dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, groups, length, dim)
    return x.reshape(batch, heads * groups, length, dim)


def only_spec(outcome: Any) -> Any:
    """Of the one site, which must be on the kernel."""
    (site,) = outcome.report.sites
    assert (site.kernel, site.reasons) == ("reference", {})
    return site.spec


REPEATS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "repeat_kv": (repeat_kv, 2),
    "unsqueeze": (lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2), 2),
    "ellipsis": (lambda x: x[:, :, None, ...].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8), 2),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), 2),
    "by name": (lambda x: torch.repeat_interleave(x, repeats=2, dim=-3), 2),
    "contiguous": (lambda x: repeat_kv(x).contiguous(), 2),
    "tiled": (lambda x: x.repeat(1, 2, 1, 1), 4),
    "tiled by expand": (lambda x: x[:, None].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8), 4),
    "along the keys": (lambda x: x.repeat_interleave(2, 2)[:, [0, 0, 1, 1]], 4),
    "uneven": (lambda x: x.repeat_interleave(torch.tensor([1, 3]), 1, output_size=4), 4),
}


@pytest.mark.parametrize("way", REPEATS)
def test_only_heads_repeated_in_a_row_are_shared(way: str) -> None:
    repeat, heads = REPEATS[way]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, repeat(k), repeat(v))

    spec = only_spec(compare_with_eager(fn, compile_quick(fn), qkv(kv_heads=2)))
    assert spec.heads == (4, heads)


def test_keys_and_values_repeated_unlike_each_other() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, repeat_kv(k), repeat_kv(v, 4))

    inputs = [randn(2, 4, 6, 8), randn(2, 2, 6, 8), randn(2, 1, 6, 8)]
    spec = only_spec(compare_with_eager(fn, compile_quick(fn), inputs))
    assert spec.heads == (4, 4)


def test_repeated_keys_that_are_written_to() -> None:
    """The repetition is a copy of what the keys were."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k + 0
        repeated_k, repeated_v = repeat_kv(k), repeat_kv(v)
        k.zero_()
        return attend(q, repeated_k, repeated_v) + k.sum()

    outcome = compare_forward(fn, compile_quick(fn), qkv(kv_heads=2))
    assert only_spec(outcome).heads == (4, 4)


@pytest.mark.parametrize("through_a_view", [False, True])
def test_repetitions_that_are_changed(through_a_view: bool) -> None:
    """They are no longer what was repeated."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeated_k, repeated_v = repeat_kv(k), repeat_kv(v)
        if through_a_view:
            repeated_k[:, 1].mul_(3.0)
        else:
            repeated_k[:, 1] = 0.5
        return attend(q, repeated_k, repeated_v)

    outcome = compare_forward(fn, compile_quick(fn), qkv(kv_heads=2))
    assert only_spec(outcome).heads == (4, 4)


def test_keys_repeated_without_gradient() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            repeated = repeat_kv(k)
        return attend(q, repeated, repeat_kv(v)) + k.sum()

    outcome = compare_with_eager(fn, compile_quick(fn), qkv(kv_heads=2))
    assert only_spec(outcome).heads == (4, 4)
