"""Masks that are proven to be a band: the kernel gets causal or a window, and no mask is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fa_inductor.report import Report
from helpers import compile_quick, run_reported
from poison import poisoned

attend = F.scaled_dot_product_attention
LOWEST = torch.finfo(torch.float32).min  # scores are lost beside it in float64 too


def qkv(sq: int = 12, sk: int = 12, b: int = 2) -> list[Tensor]:
    return [torch.randn(b, 4, s, 8, dtype=torch.float64) for s in (sq, sk, sk)]


def planned(fn: Callable[..., Tensor], *inputs: Tensor, dynamic: bool | None = None) -> Report:
    """The report; the result and gradients of the first three are eager's."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    rest = inputs[3:]
    wanted = fn(*leaves, *rest)
    torch._dynamo.reset()
    with poisoned():
        out, report = run_reported(compile_quick(fn, dynamic=dynamic), *leaves, *rest)
        weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
        grads = torch.autograd.grad((out * weight).sum(), leaves)
    expected = torch.autograd.grad((wanted * weight).sum(), leaves)
    for ours, theirs in zip((out, *grads), (wanted, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    return report


def band_of(report: Report) -> list[tuple[str, tuple[int | None, int | None]] | None]:
    """(causal, window) of each site; None where a mask is left."""
    specs = [site.spec for site in report.sites]
    return [None if s is None or s.mask else (s.causal, s.window) for s in specs]


def places(length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)[None]


def less_equal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.arange(12)[None] <= torch.arange(12)[:, None]
    return attend(q, k, v, mask.expand(2, 1, 12, 12))


def tril(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, torch.ones(12, 12, dtype=torch.bool).tril())


def added_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((12, 12), float("-inf"), dtype=q.dtype).triu(1)
    return attend(q, k, v, mask)


def added_lowest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(12)
    return attend(q, k, v, torch.where(j <= i, 0.0, LOWEST).to(q.dtype))


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(12)
    return attend(q, k, v, (j <= i) & (j > i - 5))


def both_sides(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = places(12)
    return attend(q, k, v, (i - j < 4) & (j - i < 3))


def everything(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, torch.ones(2, 1, 12, 12, dtype=torch.bool))


def zeros_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, torch.zeros(12, 12, dtype=q.dtype))


SQUARE: dict[str, tuple[Any, tuple[str, tuple[int | None, int | None]]]] = {
    "less or equal": (less_equal, ("top_left", (None, None))),
    "tril": (tril, ("top_left", (None, None))),
    "-inf above the diagonal": (added_infinity, ("top_left", (None, None))),
    "lowest number": (added_lowest, ("top_left", (None, None))),
    "window": (window, ("top_left", (4, None))),
    "both sides": (both_sides, ("none", (3, 2))),
    "everything": (everything, ("none", (None, None))),
    "zeros added": (zeros_added, ("none", (None, None))),
}


@pytest.mark.parametrize(("fn", "band"), SQUARE.values(), ids=SQUARE.keys())
def test_bands_of_a_square(fn: Any, band: Any) -> None:
    report = planned(fn, *qkv())
    assert band_of(report) == [band]
    assert "proven from the mask at" in report.sites[0].notes[0]
    assert "test_mask_bands.py" in report.sites[0].notes[0]


@pytest.mark.parametrize(("sq", "sk"), [(5, 12), (12, 5)], ids=str)
@pytest.mark.parametrize("bottom", [False, True])
def test_which_corner_a_band_starts_from(sq: int, sk: int, bottom: bool) -> None:
    """MK-08: with Sq and Sk apart, j <= i and j <= i + Sk - Sq are two different masks."""
    offset = sk - sq if bottom else 0

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(sq)[:, None], torch.arange(sk)[None]
        mask = j <= i + offset
        out = attend(q, k, v, mask)
        return torch.where(mask.any(-1)[:, None], out, 0.0)  # eager's rows without a key

    report = planned(fn, *qkv(sq, sk))
    corner = "bottom_right" if bottom else "top_left"
    assert band_of(report) == [(corner, (None, None))]


def test_a_cache_longer_than_the_queries() -> None:
    """Five queries behind seven keys of before: a band with an offset that ends elsewhere."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(7, 12)[:, None], torch.arange(16)[None]
        return attend(q, k, v, j <= i)

    assert band_of(planned(fn, *qkv(5, 16))) == [None]  # neither corner: it stays a mask


@pytest.mark.parametrize("kind", ["padding", "finite", "near"])
def test_what_is_no_band_is_left(kind: str) -> None:
    """PM-11: causal and padding is never taken for causal."""
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[0, 9:] = False

    def fn(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        i, j = places(12)
        if kind == "padding":
            return attend(q, k, v, (j <= i) & padding[:, None, None])
        if kind == "finite":  # -1e4 hides nothing for certain
            return attend(q, k, v, torch.where(j <= i, 0.0, -1e4).to(q.dtype))
        return attend(q, k, v, (j <= i) | (padding[:, None, None] & (j == i + 1)))

    assert band_of(planned(fn, *qkv(), padding)) == [None]


def test_the_lowest_number_in_whole_rows_is_left() -> None:
    """Rows that see nothing are an average of all values then, not 0."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = places(12)
        return attend(q, k, v, torch.where(j <= i - 2, 0.0, LOWEST).to(q.dtype))

    inputs = qkv()
    with torch.no_grad(), poisoned():
        out, report = run_reported(compile_quick(fn), *inputs)
        torch.testing.assert_close(out, fn(*inputs), rtol=1e-10, atol=1e-10)
    assert band_of(report) == [None]


def test_a_mask_that_is_written_to_is_left() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(12, 12, dtype=torch.bool).tril()
        mask[3, 7] = True
        return attend(q, k, v, mask)

    assert band_of(planned(fn, *qkv())) == [None]


def test_a_mask_that_is_written_while_it_is_made() -> None:
    """As `nn.MultiheadAttention` turns a bool mask into a float one; what looked at the memory
    before, through a view even, would see something else."""

    def made(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.zeros(12, 12, dtype=torch.bool).logical_not_().triu_(1)
        return attend(q, k, v, torch.zeros(12, 12, dtype=q.dtype).masked_fill_(hidden, -math.inf))

    def seen_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        zeros = torch.zeros(12, 12, dtype=q.dtype)
        view = zeros[None]
        zeros.masked_fill_(torch.ones(12, 12, dtype=torch.bool).triu(1), -math.inf)
        return attend(q, k, v, view)

    def written_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(12, 12, dtype=q.dtype)
        mask.masked_fill_(torch.ones(12, 12, dtype=torch.bool).triu(1), -math.inf)
        mask.fill_(0)
        return attend(q, k, v, mask)

    def written_as_a_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = torch.ones(24, 12, dtype=torch.bool)
        upper, _ = whole.chunk(2)
        upper.masked_fill_(torch.ones(12, 12, dtype=torch.bool).triu(1), False)
        return attend(q, k, v, whole[:12])

    assert band_of(planned(made, *qkv())) == [("top_left", (None, None))]
    for fn in (seen_before, written_twice, written_as_a_part):
        assert band_of(planned(fn, *qkv())) == [None]


def test_documents_counted_from_plain_positions_are_one() -> None:
    """What transformers builds: no mask at all but the causal one."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(12).unsqueeze(0).expand(2, -1)
        first = positions[:, :1] - 1
        documents = (torch.diff(positions, prepend=first, dim=-1) != 1).cumsum(-1)
        batch = torch.arange(2)[:, None, None, None]
        i, j = torch.arange(12)[None, None, :, None], torch.arange(12)[None, None, None]
        same = documents[batch, i] == documents[batch, j]
        return attend(q, k, v, (j <= i) & same)

    assert band_of(planned(fn, *qkv())) == [("top_left", (None, None))]


# --- Sub-graphs -----------------------------------------------------------------------------------


def _checkpointed(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
    for mask in masks:
        q = checkpoint(attend, q, k, v, mask, use_reentrant=False)
    return q


def test_a_mask_that_a_checkpoint_is_handed() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = places(12)
        return _checkpointed(q, k, v, j <= i, (j <= i) & (j > i - 3))

    report = planned(fn, *qkv())
    assert band_of(report) == [("top_left", (None, None)), ("top_left", (2, None))]


def test_padding_that_a_checkpoint_is_handed_is_left() -> None:
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[0, 9:] = False

    def fn(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        i, j = places(12)
        return _checkpointed(q, k, v, (j <= i) & padding[:, None, None])

    assert band_of(planned(fn, *qkv(), padding)) == [None]


@pytest.mark.parametrize("alike", [True, False])
def test_one_region_called_with_two_masks(alike: bool) -> None:
    """A body that two calls share is resolved through both of them."""
    region = torch.compiler.nested_compile_region(lambda q, k, v, mask: attend(q, k, v, mask))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = places(12)
        other = j <= i if alike else j <= i + 2
        return region(region(q, k, v, j <= i), k, v, other)

    inputs = qkv()
    with torch.no_grad(), poisoned():
        out, report = run_reported(compile_quick(fn), *inputs)
        torch.testing.assert_close(out, fn(*inputs), rtol=1e-10, atol=1e-10)
    assert band_of(report) == [("top_left", (None, None)) if alike else None]


# --- Symbolic lengths -----------------------------------------------------------------------------


def test_one_graph_for_all_lengths() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        return attend(q, k, v, (j <= i) & (i - j < 9))

    compiled = compile_quick(fn, dynamic=True)
    sites = []
    for length in (65, 100, 127, 300):
        inputs = qkv(length, length)
        with torch.no_grad(), poisoned():
            out, report = run_reported(compiled, *inputs)
        torch.testing.assert_close(out, fn(*inputs), rtol=1e-10, atol=1e-10)
        sites += band_of(report)
    assert sites == [("top_left", (8, None))]
