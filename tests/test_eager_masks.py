"""Masks of hand-written attention that are proven to be a band, in all ways to apply one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_attention import only_spec, qkv, randn, sink_attention
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from comparison import Outcome, compare_forward, compare_with_eager, run_poisoned
from fa_inductor import explain
from helpers import compile_quick

LENGTH = 12
LOWEST = torch.finfo(torch.float32).min
INFINITE = float("-inf")
Band = tuple[str, tuple[Any, Any]]
CAUSAL: Band = ("top_left", (None, None))
WINDOW: Band = ("top_left", (4, None))
EVERYTHING: Band = ("none", (None, None))


def band_of(outcome: Outcome) -> Band | None:
    """(causal, window) of the only site; None where a mask is left."""
    spec = only_spec(outcome)
    assert bool(spec.proven) == (spec.mask is None)
    return None if spec.mask else (spec.causal, spec.window)


def places(sq: int = LENGTH, sk: int = LENGTH) -> tuple[Tensor, Tensor]:
    return torch.arange(sq)[:, None], torch.arange(sk)[None]


def causal(*sizes: int) -> Tensor:
    i, j = places(*sizes)
    return j <= i


def in_window() -> Tensor:
    i, j = places()
    return (j <= i) & (j > i - 5)


def added(visible: Tensor, value: float = LOWEST) -> Tensor:
    """As transformers makes it."""
    return torch.where(visible, torch.tensor(0.0, dtype=torch.float32), value)


def sliced(length: int) -> Tensor:
    """As transformers had it before: a mask for more keys than there are."""
    mask = torch.full((LENGTH, 2 * LENGTH), LOWEST).triu(1)
    return mask[None, None].expand(2, 1, -1, -1)[:, :, :, :length]


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], Band]] = {
    "added": (lambda s: s + added(causal()), CAUSAL),
    "-inf added": (lambda s: s + added(causal(), INFINITE), CAUSAL),
    "added in place": (lambda s: s.add_(added(in_window())), WINDOW),
    "added and sliced": (lambda s: s + sliced(s.shape[-1]), CAUSAL),
    "added from the left": (lambda s: added(causal()) + s, CAUSAL),
    "added with a batch": (lambda s: s + added(in_window()).expand(2, 1, -1, -1), WINDOW),
    "added before scaling up": (lambda s: (s + added(causal())) * 1.5, CAUSAL),
    "added twice": (lambda s: s + added(causal()) + added(in_window()), WINDOW),
    "added as of old": (
        lambda s: s + (1.0 - torch.ones(LENGTH, LENGTH).tril()) * torch.finfo(s.dtype).min,
        CAUSAL,
    ),
    "added from bools": (
        lambda s: s + (causal().to(s.dtype) - 1.0) * torch.finfo(s.dtype).max,
        CAUSAL,
    ),
    "a window around each query": (
        lambda s: s + added((places()[0] - places()[1]).abs() <= 3),
        ("none", (3, 3)),
    ),
    "one chunk": (
        lambda s: s + added(causal() & (places()[0] // 64 == places()[1] // 64)),
        CAUSAL,
    ),
    "zeros added": (lambda s: s + torch.zeros(LENGTH, LENGTH), EVERYTHING),
    "masked_fill": (lambda s: s.masked_fill(~causal(), LOWEST), CAUSAL),
    "masked_fill with -inf": (lambda s: s.masked_fill(causal().logical_not(), INFINITE), CAUSAL),
    "masked_fill in place": (lambda s: s.masked_fill_(torch.logical_not(causal()), LOWEST), CAUSAL),
    "masked_fill of a triangle": (
        lambda s: s.masked_fill(torch.ones(LENGTH, LENGTH).triu(1) == 1, INFINITE),
        CAUSAL,
    ),
    "masked_fill as in nanoGPT": (
        lambda s: s.masked_fill(
            torch.tril(torch.ones(1, 1, 2 * LENGTH, 2 * LENGTH))[:, :, :LENGTH, :LENGTH] == 0,
            INFINITE,
        ),
        CAUSAL,
    ),
    "masked_fill with nothing": (lambda s: s.masked_fill(places()[1] < 0, LOWEST), EVERYTHING),
    "where": (lambda s: torch.where(causal(), s, LOWEST), CAUSAL),
    "where in a tensor": (
        lambda s: torch.where(
            torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
            s.to(torch.float32),
            torch.full([], LOWEST, dtype=torch.float32),
        ),
        CAUSAL,
    ),
    "where the other way round": (lambda s: torch.where(~in_window(), INFINITE, s), WINDOW),
    "replaced, then added": (
        lambda s: s.masked_fill(~causal(), INFINITE) + added(in_window()),
        WINDOW,
    ),
    "two sides": (
        lambda s: torch.where(places()[1] <= places()[0] + 2, s, LOWEST).masked_fill(
            places()[1] < places()[0] - 3, INFINITE
        ),
        ("none", (3, 2)),
    ),
    "softcap": (lambda s: torch.tanh(s / 2.0) * 2.0 + added(in_window()), WINDOW),
}


def attend_with(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v: change(q @ k.mT * 8**-0.5).softmax(-1) @ v


@pytest.mark.parametrize("way", WAYS)
def test_bands(way: str) -> None:
    change, band = WAYS[way]
    fn = attend_with(change)
    outcome = compare_with_eager(fn, compile_quick(fn), qkv(length=LENGTH))
    assert band_of(outcome) == band
    assert "test_eager_masks.py" in outcome.report.sites[0].notes[0]


def test_a_band_in_merged_scores() -> None:
    """(B·H, Sq, Sk): a mask that knows nothing of batch and heads is still a band."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        return torch.bmm((torch.bmm(q, k.mT) + added(causal())[None]).softmax(-1), v)

    assert band_of(compare_with_eager(fn, compile_quick(fn), qkv(length=LENGTH))) == CAUSAL


@pytest.mark.parametrize(("sq", "sk"), [(5, 12), (12, 5)], ids=str)
@pytest.mark.parametrize("bottom", [False, True])
def test_which_corner_a_band_starts_from(sq: int, sk: int, bottom: bool) -> None:
    offset = sk - sq if bottom else 0

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = places(sq, sk)
        visible = j <= i + offset
        out = (q @ k.mT).masked_fill(~visible, INFINITE).softmax(-1) @ v
        return torch.where(visible.any(-1)[:, None], out, 0.0)  # eager's rows without a key are NaN

    q, k, v = randn(2, 4, sq, 8), randn(2, 4, sk, 8), randn(2, 4, sk, 8)
    corner = "bottom_right" if bottom else "top_left"
    assert band_of(compare_forward(fn, compile_quick(fn), [q, k, v])) == (corner, (None, None))


def test_gemma2_is_left_with_nothing_but_a_softcap() -> None:
    """Which neither FA4 nor cuDNN would take beside a mask."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.tanh(q @ k.transpose(2, 3) * 0.1 / 30.0) * 30.0
        scores = scores + added(in_window(), torch.finfo(q.dtype).min).to(q.dtype)
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    inputs = [tensor.bfloat16() for tensor in qkv(length=LENGTH)]
    (site,) = explain(fn, target="sm_90a")(*inputs).sites
    assert site.spec
    assert (site.kernel, site.spec.softcap, site.spec.window) == ("fa4", 30.0, (4, None))


def test_a_band_beside_sinks() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return sink_attention(q, k, v, sinks, added(in_window()))

    outcome = compare_with_eager(fn, compile_quick(fn), [*qkv(length=LENGTH), randn(4)])
    assert band_of(outcome) == WINDOW
    assert only_spec(outcome).has_sink


def test_a_band_that_a_checkpoint_is_handed() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1) @ v

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(attend, q, k, v, added(in_window()), use_reentrant=False)

    assert band_of(compare_with_eager(fn, compile_quick(fn), qkv(length=LENGTH))) == WINDOW


# --- Left as masks --------------------------------------------------------------------------------


def padding() -> Tensor:
    kept = torch.ones(2, LENGTH, dtype=torch.bool)
    kept[0, 9:] = False
    return kept


LEFT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "padding": (
        lambda s, kept: s + added(causal() & kept[:, None, None]),
        "mask float32 (2, 1, 12, 12): causal, padding of keys (kept)",
    ),
    "padding replaced": (
        lambda s, kept: s.masked_fill(~kept[:, None, None], LOWEST),
        "mask bool (2, 1, 1, 12): padding of keys (kept)",
    ),
    "padding and a band": (
        lambda s, kept: torch.where(causal(), s, INFINITE) + added(kept[:, None, None]),
        "mask bool (12, 12) and mask float32 (2, 1, 1, 12): causal, padding of keys (kept)",
    ),
    "a mask of the user's": (
        lambda s, kept: s + torch.where(kept, 0.0, 1.0)[:, None, None],
        "mask float32 (2, 1, 1, 12)",
    ),
    "added and scaled down": (
        lambda s, kept: (s + added(causal())) * 0.5,
        "mask float32 (12, 12)",
    ),
    "chunks": (
        lambda s, kept: s + added(places()[0] // 5 == places()[1] // 5),
        "mask float32 (12, 12): ((i // 5) == (j // 5))",
    ),
    "added times a number": (
        lambda s, kept: torch.sub(s, added(causal(), -LOWEST)),
        "mask float32 (12, 12)",
    ),
    "too little": (lambda s, kept: s + added(causal(), -1e4), "mask float32 (12, 12)"),
    "rows that see nothing": (
        lambda s, kept: s + added(places()[1] < places()[0]),
        "mask float32 (12, 12): j <= i + -1",
    ),
    "rows that see nothing, replaced": (
        lambda s, kept: torch.where(places()[1] < places()[0], s, LOWEST),
        "mask bool (12, 12): j <= i + -1",
    ),
    "rows that see nothing, one way": (
        lambda s, kept: s.masked_fill(~causal(), INFINITE).masked_fill(places()[1] < 2, LOWEST),
        "mask bool (12, 12) and mask bool (1, 12): causal, (j - 2 >= 0)",
    ),
    "rows that see nothing of two": (
        lambda s, kept: (s + added(causal())).masked_fill(places()[0] >= places()[1], LOWEST),
        "mask float32 (12, 12) and mask bool (12, 12): causal, window 0",
    ),
    "a bias and a band": (
        lambda s, kept: s + torch.arange(LENGTH) * 0.1 + added(causal()),
        "mask float32 (12) and mask float32 (12, 12)",
    ),
    "a bias and a band that hides nothing": (
        lambda s, kept: s + torch.arange(LENGTH) * 0.1 + added(places()[1] >= 0),
        "mask float32 (12)",
    ),
    "no corner": (
        lambda s, kept: s + added(causal().roll(1, 0), INFINITE),
        "mask float32 (12, 12): dense (roll)",
    ),
}


@pytest.mark.parametrize("way", LEFT)
def test_what_is_no_band_is_left(way: str) -> None:
    """With the words that are known of it."""
    change, words = LEFT[way]

    def fn(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        return change(q @ k.mT, kept).softmax(-1) @ v

    outcome = compare_forward(fn, compile_quick(fn), [*qkv(length=LENGTH), padding()])
    assert band_of(outcome) is None
    assert only_spec(outcome).mask == words


def test_a_triangle_of_the_module_s_own_is_left() -> None:
    """GPT-2 of old: nothing in the graph says what is in the buffer."""
    triangle = causal()

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.where(triangle, q @ k.mT, torch.full([], LOWEST))
        return scores.softmax(-1) @ v

    outcome = compare_with_eager(fn, compile_quick(fn), qkv(length=LENGTH))
    assert band_of(outcome) is None


def test_a_mask_that_is_written_to_is_left() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = causal()
        mask[3, 7] = True
        return (q @ k.mT).masked_fill(~mask, LOWEST).softmax(-1) @ v

    assert band_of(compare_with_eager(fn, compile_quick(fn), qkv(length=LENGTH))) is None


def test_rows_that_see_nothing_of_minus_infinity_are_zero() -> None:
    """Contract 10: eager's are NaN, the others are eager's."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = places()
        return (q @ k.mT + added(j <= i - 3, INFINITE)).softmax(-1) @ v

    inputs = qkv(length=LENGTH)
    with torch.no_grad():
        out, outcome = run_poisoned(compile_quick(fn), inputs)
    assert only_spec(outcome).window == (None, -3) or only_spec(outcome).mask
    expected = fn(*inputs)
    assert expected[:, :, :3].isnan().all()
    torch.testing.assert_close(out, expected.nan_to_num(0.0), rtol=1e-4, atol=1e-5)


def test_one_graph_for_all_lengths() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = places(q.shape[2], k.shape[2])
        lowest = torch.finfo(q.dtype).min  # a global float would be an input of the graph
        return (q @ k.mT + added((j <= i) & (i - j < 9), lowest)).softmax(-1) @ v

    compiled, bands = compile_quick(fn, dynamic=True), []
    for length in (65, 100, 127, 300):
        inputs = qkv(length=length)
        with torch.no_grad():
            out, outcome = run_poisoned(compiled, inputs)
        torch.testing.assert_close(out, fn(*inputs), rtol=1e-4, atol=1e-5)
        bands += [(site.spec.causal, site.spec.window) for site in outcome.report.sites]
    assert bands == [("top_left", (8, None))]
