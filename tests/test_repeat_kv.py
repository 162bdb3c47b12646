"""Key heads that are repeated for the queries which share them: the op takes them unrepeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_attention import attend, only_spec, qkv, randn, repeat_kv
from torch import Tensor

from comparison import compare_forward, compare_with_eager
from helpers import compile_quick

SPELT = {"sdpa": F.scaled_dot_product_attention, "eager": attend}


@pytest.fixture(params=SPELT)
def attention(request: Any) -> Callable[..., Tensor]:
    """Fused and hand-written."""
    return SPELT[request.param]


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
def test_only_heads_repeated_in_a_row_are_shared(
    way: str, attention: Callable[..., Tensor]
) -> None:
    repeat, heads = REPEATS[way]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, repeat(k), repeat(v))

    spec = only_spec(compare_with_eager(fn, compile_quick(fn), qkv(kv_heads=2)))
    assert spec.heads == (4, heads)


SINGLE: dict[str, Callable[[Tensor], Tensor]] = {
    "tiled": lambda x: x.repeat(1, 4, 1, 1),
    "expanded": lambda x: x.expand(-1, 4, -1, -1),
    "in a row": lambda x: x.repeat_interleave(4, dim=1),
}


@pytest.mark.parametrize("way", SINGLE)
def test_a_single_head_is_shared_however_it_is_repeated(
    way: str, attention: Callable[..., Tensor]
) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, SINGLE[way](k), SINGLE[way](v))

    spec = only_spec(compare_with_eager(fn, compile_quick(fn), qkv(kv_heads=1)))
    assert spec.heads == (4, 1)


def test_keys_and_values_repeated_unlike_each_other(attention: Callable[..., Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, repeat_kv(k), repeat_kv(v, 4))

    inputs = [randn(2, 4, 6, 8), randn(2, 2, 6, 8), randn(2, 1, 6, 8)]
    spec = only_spec(compare_with_eager(fn, compile_quick(fn), inputs))
    assert spec.heads == (4, 4)


def test_repeated_keys_that_are_written_to(attention: Callable[..., Tensor]) -> None:
    """The repetition is a copy of what the keys were."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k + 0
        repeated_k, repeated_v = repeat_kv(k), repeat_kv(v)
        k.zero_()
        return attention(q, repeated_k, repeated_v) + k.sum()

    outcome = compare_forward(fn, compile_quick(fn), qkv(kv_heads=2))
    assert only_spec(outcome).heads == (4, 4)


@pytest.mark.parametrize("through_a_view", [False, True])
def test_repetitions_that_are_changed(
    through_a_view: bool, attention: Callable[..., Tensor]
) -> None:
    """They are no longer what was repeated."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeated_k, repeated_v = repeat_kv(k), repeat_kv(v)
        if through_a_view:
            repeated_k[:, 1].mul_(3.0)
        else:
            repeated_k[:, 1] = 0.5
        return attention(q, repeated_k, repeated_v)

    outcome = compare_forward(fn, compile_quick(fn), qkv(kv_heads=2))
    assert only_spec(outcome).heads == (4, 4)


def test_keys_repeated_without_gradient(attention: Callable[..., Tensor]) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            repeated = repeat_kv(k)
        return attention(q, repeated, repeat_kv(v)) + k.sum()

    outcome = compare_with_eager(fn, compile_quick(fn), qkv(kv_heads=2))
    assert only_spec(outcome).heads == (4, 4)
