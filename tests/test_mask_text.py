"""Masks as text mean what Python makes of them, place by place, for both who read them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import masked_cases
import pytest
import torch
from torch import Tensor

from fa_inductor import mask_text
from fa_inductor.kernels import fa4_masked

SHAPE = (2, 3, 5, 7)
B, H, SQ, SK = SHAPE
EVERYTHING = {  # texts, and the sizes of the tensors that they read
    masked_cases.CAUSAL_PADDING: [(B, SK)],
    masked_cases.CAUSAL_DOCUMENTS: [(B, SK)],
    masked_cases.PREFIX: [(B,)],
    masked_cases.DENSE: [(B, 1, SQ, SK)],
    masked_cases.PER_HEAD: [(1, H, SQ, SK)],
    masked_cases.SHIFTED: [(B, SK)],
    "(j < i)": [],
    "(i > j + 1)": [],
    "(i >= j)": [],
    "(i == 2)": [],
    "True": [],
    "False": [],
    "(h * 2 - b == 1)": [],
    "((i - j) // 2 < -1)": [],
    "((i - j) % 3 == 1)": [],
    "((j <= i) and (b == 0) and (h != 1))": [],
    "((j == i) or (b == 0) or (j > 5))": [],
    "(not ((j <= i) and (not (h == 0))))": [],
    "(-j + Sk - Sq >= -i)": [],
    "(t0[i + 3] == t1[j - 4, b])": [(SQ,), (SK, B)],
    "(t0[t1[j] - 2] != 0)": [(SQ,), (SK,)],
    "(t0[0, h - 1, -1 * i, 2 * j] > 0)": [(1, H, SQ, SK)],
}


class Read:
    """A tensor as plain Python reads it; outside of it the nearest element, or an error."""

    def __init__(self, tensor: Tensor, nearest: bool) -> None:
        self.tensor, self.shape, self.nearest = tensor, tensor.shape, nearest

    def __getitem__(self, places: Any) -> Any:
        places = places if isinstance(places, tuple) else (places,)
        inside = [min(max(p, 0), size - 1) for p, size in zip(places, self.shape, strict=True)]
        assert self.nearest or inside == list(places), "read outside of the tensor"
        return self.tensor[tuple(inside)].item()


def drawn(text: str) -> list[Tensor]:
    """Small numbers, with many zeros."""
    return [torch.randint(-1, 3, size) for size in EVERYTHING[text]]


def places() -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, SHAPE))


def by_python(text: str, tensors: Sequence[Tensor]) -> Tensor:
    names: dict[str, Any] = {f"t{n}": Read(each, True) for n, each in enumerate(tensors)}
    names |= {"Sq": SQ, "Sk": SK}
    made = [eval(text, {**names, **dict(zip("bhij", place, strict=True))}) for place in places()]
    return torch.tensor(made, dtype=torch.bool).view(SHAPE)


@pytest.mark.parametrize("text", EVERYTHING)
def test_rendered(text: str) -> None:
    tensors = drawn(text)
    rendered = mask_text.rendered(text, tensors, SHAPE, "cpu")
    assert (rendered.shape, rendered.dtype) == (SHAPE, torch.bool)
    assert torch.equal(rendered, by_python(text, tensors))


@pytest.mark.parametrize("text", EVERYTHING)
def test_what_fa4_calls(text: str) -> None:
    """Run by Python with numbers: FA4's values are of the same operators. Nothing is read outside
    of its tensor, which on a GPU nobody would see."""
    cutlass = SimpleNamespace(Boolean=bool, min=min, max=max)
    utils = SimpleNamespace(scalar_to_ssa=lambda value, _: value)
    names: dict[str, Any] = {"cutlass": cutlass, "utils": utils}
    exec(fa4_masked.mask_source(text), names)
    tensors = drawn(text)
    read, lengths = (
        [Read(each, False) for each in tensors],
        SimpleNamespace(seqlen_q=SQ, seqlen_k=SK),
    )
    made = [names["mask_mod"](*([each] for each in place), lengths, read) for place in places()]
    assert torch.equal(torch.tensor(made).view(SHAPE), by_python(text, tensors))
