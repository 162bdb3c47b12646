"""Calls of the op for variable lengths: tensors, arguments, and the metadata of results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fa_inductor import varlen_ops

attention_varlen = varlen_ops.attention_varlen

HEADS, DIMS = (4, 2), (8, 16)
STARTS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "unequal lengths": ([0, 3, 9, 10], [0, 5, 9, 16]),
    "more queries than keys": ([0, 6, 11], [0, 2, 5]),
    "an empty query": ([0, 3, 3, 7], [0, 4, 6, 9]),
    "an empty key": ([0, 3, 5, 9], [0, 4, 4, 7]),
    "both empty, first and last": ([0, 0, 5, 5], [0, 0, 6, 6]),
    "length 1": ([0, 1, 2, 4], [0, 1, 4, 5]),
    "one sequence": ([0, 7], [0, 9]),
}
NUMBERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "left window": {"window_left": 2},
    "window": {"window_left": 1, "window_right": 2},
    "causal window": {"causal": True, "window_left": 2},
    "softcap": {"softcap": 1.5, "causal": True},
}
# Relative errors in the norm: float32 inside, one rounding of the output for the short ones.
ERROR = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-3}


def lengths(starts: Sequence[int]) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


def longest(starts: Sequence[int]) -> int:
    return max(b - a for a, b in itertools.pairwise(starts))


def qkv(total_q: int, total_k: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    heads_q, heads_k = HEADS
    shapes = ((total_q, heads_q, DIMS[0]), (total_k, heads_k, DIMS[0]), (total_k, heads_k, DIMS[1]))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def arguments(
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    sink: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    kernel: str = "reference",
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> tuple[Any, ...]:
    """The arguments of the op after q, k and v."""
    given = (lengths(starts_q), lengths(starts_k), longest(starts_q), longest(starts_k))
    kind = "bottom_right" if causal else "none"
    return (*given, scale, kind, False, kernel, sink, window_left, window_right, softcap)


def good_call(sink: Tensor | None = None, **numbers: Any) -> tuple[Any, ...]:
    starts = STARTS["an empty key"]
    return (*qkv(9, 7), *arguments(*starts, sink, **numbers))


def backward_call(sink_grad: bool = True, **numbers: Any) -> tuple[Any, ...]:
    """A call of `attention_varlen_backward` for what `attention_varlen` gave."""
    q, k, v, *rest = good_call(torch.randn(4), **numbers)
    out, lse = attention_varlen(q, k, v, *rest)
    saved = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)
    return (*saved, *rest[:8], sink_grad, *rest[8:])


def metadata(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors]


def fake_metadata(op: Any, call: Sequence[Any]) -> list[tuple[Any, ...]]:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in call]
    with mode:
        return metadata(op(*fakes))
