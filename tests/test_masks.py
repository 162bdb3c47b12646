"""Masks through compiled attention on the reference kernel: values and gradients in float64's eyes.

All fresh memory is NaN. What a mask is: bool, True is visible, or a float added to the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from comparison import TOLERANCE, Outcome, compare_with_eager, leaves, run_poisoned
from fa_inductor import explain, times
from helpers import compile_quick, compile_reference, kernels_of, relative_error
from poison import poisoned

BOTH_ROUTES = pytest.mark.parametrize("compiler", [compile_quick, compile_reference])
INF = float("inf")
LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16)}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`attend` in float64; a row without a visible key is 0."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -INF) if hidden else scores + mask.double()
    empty = scores.isneginf().all(-1, keepdim=True)
    return torch.where(empty, 0.0, scores.masked_fill(empty, 0.0).softmax(-1)) @ v


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, dtype=dtype)


def weighted(out: Tensor, rows: Tensor | None = None) -> Tensor:
    """A loss that weighs every element differently, of the rows (B, 1, Sq, 1) that are True."""
    weight = torch.linspace(-1.0, 2.0, out.numel(), dtype=torch.float64).view(out.shape)
    weight = weight if rows is None else weight * rows
    return (out.double() * weight).sum()


def check(
    compiler: Callable[..., Any],
    inputs: Sequence[Tensor],
    rows: Tensor | None = None,
    tolerance: dict[str, float] = TOLERANCE,
) -> tuple[Tensor, list[Tensor], Outcome]:
    """Run and compare with `exact`; returns output, gradients of the float inputs, outcome."""
    ours, theirs = leaves(inputs), leaves(inputs)
    out, outcome = run_poisoned(compiler(attend), ours)
    wanted = [tensor for tensor in ours if tensor.requires_grad]
    with poisoned():
        grads = list(torch.autograd.grad(weighted(out, rows), wanted))
    expected = exact(*theirs)
    wanted = [tensor for tensor in theirs if tensor.requires_grad]
    expected_grads = torch.autograd.grad(weighted(expected, rows), wanted)
    assert kernels_of(outcome.report) == ["reference"]
    torch.testing.assert_close(out.double(), expected, **tolerance)
    for grad, expected_grad, tensor in zip(grads, expected_grads, wanted, strict=True):
        assert (grad.shape, grad.dtype) == (tensor.shape, tensor.dtype)
        torch.testing.assert_close(grad, expected_grad, **tolerance)
    return out, grads, outcome


# --- Rows that see no key -----------------------------------------------------------------------


def left_padded(length: int, padding: int = 3) -> Tensor:
    """(2, 1, S, S): causal, and the first keys of the first sequence are padding."""
    allowed = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    allowed[0, :, :, :padding] = False
    return allowed


@pytest.mark.parametrize("real_rows_only", [True, False], ids=["real rows", "all rows"])
@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("length", [16, 160])
def test_rows_without_a_key(length: int, form: str, real_rows_only: bool) -> None:
    """Exactly 0, with finite gradients and none for the query, whatever the loss (MK-01)."""
    allowed = left_padded(length)
    mask = allowed if form == "bool" else torch.zeros(allowed.shape).masked_fill(~allowed, -INF)
    inputs = (*(randn(2, 2, length, 64) for _ in range(3)), mask)
    rows = torch.ones(2, 1, length, 1)
    rows[0, :, :3] = 0.0
    out, (grad_q, *_), outcome = check(compile_quick, inputs, rows if real_rows_only else None)
    assert out[0, :, :3].eq(0).all()
    assert grad_q[0, :, :3].eq(0).all()
    assert outcome.kernel_calls == 1


@BOTH_ROUTES
@pytest.mark.parametrize("form", ["bool", "float"])
def test_no_row_sees_a_key(compiler: Callable[..., Any], form: str) -> None:
    mask = torch.zeros(5, 7, dtype=torch.bool) if form == "bool" else torch.full((5, 7), -INF)
    inputs = (randn(1, 2, 5, 8), randn(1, 2, 7, 8), randn(1, 2, 7, 8), mask)
    out, grads, _ = check(compiler, inputs)
    assert all(tensor.eq(0).all() for tensor in (out, *grads))


# --- Rows of huge elements ----------------------------------------------------------------------


def biased_rows(mask: Tensor, values: Sequence[float]) -> Tensor:
    """`mask` with its first rows filled."""
    mask = mask.clone()
    for row, value in enumerate(values):
        mask[..., row, :] = value
    return mask


@pytest.mark.parametrize("value", [None, -1e30, 1e31], ids=["lowest", "-1e30", "1e31"])
@pytest.mark.parametrize("dtype", LOWEST, ids=str)
def test_rows_of_the_lowest_number_are_the_mean_of_the_values(
    dtype: torch.dtype, value: float | None
) -> None:
    """score + min is min in float32 too, so that all keys weigh the same: neither 0 nor NaN. The
    scores do not matter then, and have no gradient (MK-06)."""
    q, k, v = (randn(2, 4, 8, 16, dtype=dtype) for _ in range(3))
    hidden = torch.rand(2, 1, 8, 8) > 0.6
    hidden[..., 0] = False
    mask = torch.zeros(2, 1, 8, 8, dtype=dtype).masked_fill(hidden, LOWEST[dtype])
    mask = biased_rows(mask, [LOWEST[dtype] if value is None else value])
    rows = torch.ones(2, 1, 8, 1)
    rows[:, :, 0] = 0.0
    eps = torch.finfo(dtype).eps
    tolerance = {"rtol": 8 * eps, "atol": 8 * eps}
    out, _, _ = check(compile_quick, (q, k, v, mask), rows, tolerance)
    mean = v.double().mean(2)
    torch.testing.assert_close(out[:, :, 0].double(), mean, **tolerance)
    ours = leaves((q, k, v, mask))
    with poisoned():
        grad_q, _, grad_v, _ = torch.autograd.grad(
            weighted(compile_quick(attend)(*ours), 1 - rows), ours
        )
    assert grad_q.eq(0).all()
    theirs = leaves((q, k, v, mask))
    (expected,) = torch.autograd.grad(weighted(exact(*theirs), 1 - rows), theirs[2])
    torch.testing.assert_close(grad_v, expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_large_elements_are_not_lost(dtype: torch.dtype) -> None:
    """What is the same in a row does not count, however large it is (MK-06)."""
    mask = biased_rows(torch.zeros(2, 1, 32, 32), [-1e9, -1e4, 1e4, 3e4, -2e3])
    mask[0, 0, 0, 5] = 0.0  # and one that is not the same
    inputs = [tensor.to(dtype) for tensor in (*(randn(2, 4, 32, 64) for _ in range(3)), mask)]
    eps = torch.finfo(dtype).eps
    check(compile_quick, inputs, None, {"rtol": 0.0, "atol": 1e-4 if eps < 1e-6 else 0.1})


def test_small_biases_keep_their_digits() -> None:
    """Steps of 1e-3 that bfloat16 would round away (MK-06)."""
    inputs = [randn(1, 2, 64, 16) for _ in range(3)]
    inputs[0] = inputs[0] * 0.01
    mask = torch.arange(64.0).repeat(64, 1) * 1e-3 + 100.0
    out, _, _ = check(compile_quick, (*inputs, mask))
    rounded = exact(*inputs, mask.bfloat16())
    assert relative_error(out.detach(), exact(*inputs, mask)) < 1e-5
    assert relative_error(out.detach(), rounded) > 1e-3


def float32_masks() -> dict[str, Tensor]:
    mask = torch.where(torch.rand(2, 1, 32, 32) > 0.5, 0.0, LOWEST[torch.float32])
    return {
        "a row of the lowest": biased_rows(mask, [LOWEST[torch.float32]]),
        "-1e4": torch.full((2, 1, 32, 32), -1e4),
        "small steps": torch.arange(32.0).expand(2, 1, 32, 32) * 1e-3,
    }


@pytest.mark.parametrize("kind", float32_masks())
def test_a_float32_mask_beside_bfloat16_is_left_to_pytorch(kind: str) -> None:
    """By name, and so with the very numbers of eager (MK-06)."""
    inputs = (*(randn(2, 4, 32, 64, dtype=torch.bfloat16) for _ in range(3)), float32_masks()[kind])
    outcome = compare_with_eager(attend, compile_quick(attend), inputs, (), {"rtol": 0, "atol": 0})
    assert outcome.kernel_calls == 0
    assert [reason.partition(" (bool")[0] for reason in outcome.reasons] == [
        "reference: attn_mask float32 (2, 1, 32, 32) beside a bfloat16 query"
    ]


# --- Gradients of masks -------------------------------------------------------------------------

MASK_SHAPES = [(1, 2, 64, 64), (1, 1, 64, 64), (2, 64, 64), (64, 64), (1, 2, 1, 64), (64, 1), (64,)]


@BOTH_ROUTES
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_a_mask_alone_that_wants_a_gradient(
    shape: tuple[int, ...], compiler: Callable[..., Any]
) -> None:
    """Summed to the mask's own shape, where nothing else is differentiated (MK-02)."""
    q, k, v = (randn(1, 2, 64, 16) for _ in range(3))
    ours, theirs = leaves([randn(*shape)] * 2)
    out, outcome = run_poisoned(compiler(lambda mask: attend(q, k, v, mask)), [ours])
    with poisoned():
        weighted(out).backward()
    weighted(exact(q, k, v, theirs)).backward()
    assert kernels_of(outcome.report) == ["reference"]
    assert ours.grad.shape == shape
    torch.testing.assert_close(ours.grad, theirs.grad, **TOLERANCE)


@pytest.mark.parametrize("dv", [64, 32], ids=["Dv = D", "Dv < D"])
@pytest.mark.parametrize("kind", ["each head", "bool", "padding"])
def test_grouped_heads_with_a_mask(kind: str, dv: int) -> None:
    """Gradients of k and v are sums over their group of query heads (GQ-01)."""
    masks = {
        "each head": randn(3, 8, 17, 17),
        "bool": torch.rand(3, 1, 17, 17) > 0.5,
        "padding": torch.rand(3, 1, 1, 17) > 0.5,
    }
    q, k, v = randn(3, 8, 17, 64), randn(3, 2, 17, 64), randn(3, 2, 17, dv)
    _, grads, outcome = check(compile_quick, (q, k, v, masks[kind]))
    assert [grad.shape[1] for grad in grads[1:3]] == [2, 2]
    assert outcome.kernel_calls == 1


# --- Garbage in slots that are masked -----------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 8])
def test_garbage_in_masked_slots(queries: int) -> None:
    """A cache that is not written yet: 1e30 does not show, NaN as on the math path (MK-09)."""
    q, k, v = randn(1, 4, queries, 64), randn(1, 4, 256, 64), randn(1, 4, 256, 64)
    keep = (torch.arange(256) < 100).expand(1, 1, queries, 256)
    expected = exact(q, k[:, :, :100], v[:, :, :100], keep[..., :100])
    for garbage in (1e30, 0.0):
        k[:, :, 100:], v[:, :, 100:] = garbage, garbage
        torch._dynamo.reset()
        ours = leaves((q, k, v, keep))
        out, _ = run_poisoned(compile_quick(attend), ours)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE)
        with poisoned():
            grads = torch.autograd.grad(weighted(out), ours[:3])
        assert all(grad.isfinite().all() for grad in grads)
        assert all(grad[:, :, 100:].eq(0).all() for grad in grads[1:])
    for where in ("k", "v", "k and v"):
        bad_k, bad_v = (t.index_fill(2, torch.tensor([200]), float("nan")) for t in (k, v))
        inputs = (q, bad_k if "k" in where else k, bad_v if "v" in where else v, keep)
        with sdpa_kernel(SDPBackend.MATH):
            pattern = attend(*inputs).isnan()
        out, _ = run_poisoned(compile_quick(attend), inputs)
        assert torch.equal(out.isnan(), pattern)


@pytest.mark.parametrize("way", ["proven", "repeated heads", "plain"])
def test_what_core_was_not_measured_with_is_not_left_to_it(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast core is without a mask: left alone, a site would keep its dense one, though it
    is proven to be causal, and so it would its repeated heads."""
    times_of = dict.fromkeys(("fa4", "cudnn"), 20.0) | {"core": 10.0}
    monkeypatch.setattr(times, "of", lambda spec, target: times_of)

    def fn(x: Tensor) -> Tensor:
        place = torch.arange(64)
        if way == "proven":
            return attend(x, x, x, place <= place[:, None])
        shared = x[:, :2].repeat_interleave(2, 1) if way == "repeated heads" else x
        return F.scaled_dot_product_attention(x, shared, shared, is_causal=True)

    report = explain(fn, target="sm_90a")(torch.randn(1, 4, 64, 64, dtype=torch.bfloat16))
    (site,) = report.sites
    assert site.spec is not None
    assert site.spec.causal == "top_left"
    assert site.kernel == ("core" if way == "plain" else "fa4")
