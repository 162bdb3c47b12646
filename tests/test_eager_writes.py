"""Hand-written attention of tensors that are written to: never taken for what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_attention import attend, left_for, qkv, randn
from torch import Tensor

from comparison import compare_forward, compare_with_eager
from helpers import compile_quick


def written_between(write: Callable[[Tensor, Tensor, Tensor, Tensor], Any]) -> Callable[..., Any]:
    """`write` to copies of q, k, v and the mask, after the scores were made."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v, mask = q + 0, k + 0, v + 0, mask + 0
        scores = (q * 0.5) @ k.contiguous().mT + mask
        write(q, k, v, mask)
        return scores.softmax(-1) @ v + q.sum() + k.sum() + v.sum() + mask.sum()

    return fn


WRITES: dict[str, tuple[Callable[..., Any], bool]] = {
    "queries": (lambda q, k, v, m: q.add_(1), False),
    "keys": (lambda q, k, v, m: k.mul_(2), False),
    "mask": (lambda q, k, v, m: m.fill_(0), False),
    "a view of the keys": (lambda q, k, v, m: k[:, :, 1].zero_(), False),
    "a view of a view": (lambda q, k, v, m: k.transpose(1, 2)[0].copy_(k[1].mT[0, 0, 0]), False),
    "item by item": (lambda q, k, v, m: k.__setitem__((0, 1), 0.0), False),
    "with out": (lambda q, k, v, m: torch.mul(q, 2.0, out=k), False),
    "by a function": (lambda q, k, v, m: torch.relu_(q), False),
    "by a functional": (lambda q, k, v, m: F.relu(q, inplace=True), False),
    "by an aten op": (lambda q, k, v, m: torch.ops.aten.add_.Scalar(q, 1.0), False),
    "values before they are read": (lambda q, k, v, m: v.mul_(2), True),
}


@pytest.mark.parametrize("what", WRITES)
def test_operands_that_are_written_to_before_the_values_are_read(what: str) -> None:
    write, taken = WRITES[what]
    fn = written_between(write)
    inputs = [*qkv(), randn(6, 6)]
    if taken:
        assert compare_forward(fn, compile_quick(fn), inputs).kernel_calls == 1
    else:
        assert "is written to by" in left_for(fn, inputs)


def test_writes_before_and_after_do_not_matter() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k * 1, v.clone()
        k[:, :, 0] = 1.0
        v[:, :, 0] = 2.0
        out = attend(q, k, v)
        k.zero_()
        v.zero_()
        return out + k.sum() + v.sum()

    assert compare_forward(fn, compile_quick(fn), qkv()).kernel_calls == 1


def test_an_output_that_is_written_to() -> None:
    """The op keeps its output for the backward; the product of eager does not."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        out.transpose(1, 2).mul_(2.0)
        return out

    assert compare_forward(fn, compile_quick(fn), qkv()).kernel_calls == 1
    torch._dynamo.reset()
    outcome = compare_with_eager(fn, compile_quick(fn), qkv())
    assert outcome.kernel_calls == 0
    assert "is written to by mul_" in outcome.reasons[0]


def test_weights_that_are_written_to_after_their_use() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        out = weights @ v
        weights.zero_()
        return out

    assert "also used by zero_" in left_for(fn, qkv())
