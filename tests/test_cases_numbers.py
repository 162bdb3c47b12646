"""Cases about numbers: alignment of causal, broadcast heads, dtypes, head dims."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from comparison import TOLERANCE, compare_with_eager, gradients, run_poisoned
from fa_inductor.kernels import reference
from helpers import compile_quick, compile_reference, kernels_of, oracle, relative_error
from poison import poisoned

BOTH_ROUTES = pytest.mark.parametrize("compiler", [compile_quick, compile_reference])
attend = F.scaled_dot_product_attention
DOUBLE = {"rtol": 1e-10, "atol": 1e-12}


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, dtype=dtype)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True)


def causal_and_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=mask, is_causal=True)


# --- Causal masks -------------------------------------------------------------------------------

LENGTHS = [(2, 5), (5, 2), (1, 7), (128, 200)]


def one_hot_problem(sq: int, sk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Equal scores, and values that make the output rows the attention weights."""
    return torch.zeros(1, 1, sq, sk), randn(1, 1, sk, sk), torch.eye(sk)[None, None]


@pytest.mark.parametrize(("sq", "sk"), LENGTHS)
@BOTH_ROUTES
def test_is_causal_is_aligned_top_left(compiler: Callable[..., Any], sq: int, sk: int) -> None:
    """Row i shares its weight among keys 0..i, whatever Sq - Sk is (MK-03)."""
    inputs = one_hot_problem(sq, sk)
    rows = torch.ones(sq, sk).tril()
    out, outcome = run_poisoned(compiler(causal), inputs)
    torch.testing.assert_close(out[0, 0], rows / rows.sum(-1, keepdim=True), **TOLERANCE)
    assert kernels_of(outcome.report) == ["reference"]
    q, k, v = randn(2, 3, sq, 16), randn(2, 3, sk, 16), randn(2, 3, sk, 16)
    assert compare_with_eager(causal, compiler(causal), (q, k, v)).kernel_calls == 1


@pytest.mark.parametrize(("sq", "sk"), LENGTHS)
def test_a_bias_aligned_otherwise_gives_the_other_answer(sq: int, sk: int) -> None:
    """`CausalBias`: upper left is is_causal; lower right is never taken for it (MK-03)."""
    q, k, v = randn(1, 2, sq, 16), randn(1, 2, sk, 16), randn(1, 2, sk, 16)

    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attend(q, k, v, attn_mask=bias)

    for bias, kind in ((causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")):
        torch._dynamo.reset()
        with torch.no_grad():
            out, _ = run_poisoned(compile_quick(biased), [q, k, v, bias(sq, sk)])
        keyless = max(0, sq - sk) if kind == "bottom_right" else 0  # these rows are NaN in eager
        expected = oracle(q, k, v, causal=kind)[:, :, keyless:]
        torch.testing.assert_close(out[:, :, keyless:].double(), expected, **TOLERANCE)


MASKED = "attn_mask bool (1, 1, 8, 8): dense (mask)"


@BOTH_ROUTES
def test_a_mask_beside_is_causal_is_applied_too(compiler: Callable[..., Any]) -> None:
    """Where PyTorch's CPU path takes both, it applies both; neither may get lost (MK-07).
    Newer PyTorch takes them nowhere: the same error then."""
    q, k, v = (randn(1, 2, 8, 16) for _ in range(3))
    mask = torch.rand(1, 1, 8, 8) > 0.4
    mask[..., 0] = True
    compiled = compiler(causal_and_masked)
    try:
        causal_and_masked(q, k, v, mask)
    except RuntimeError as refusal:
        with pytest.raises(RuntimeError, match=re.escape(str(refusal))):
            compiled(q, k, v, mask)
        return
    outcome = compare_with_eager(causal_and_masked, compiled, (q, k, v, mask))
    assert outcome.kernel_calls == 1
    (site,) = outcome.report.sites
    assert site.spec
    assert (site.spec.causal, site.spec.mask) == ("top_left", MASKED)
    with torch.no_grad():
        out, _ = run_poisoned(compiled, (q, k, v, mask))
        torch.testing.assert_close(out, attend(q, k, v, attn_mask=mask.tril()), **TOLERANCE)


@BOTH_ROUTES
def test_a_mask_beside_is_causal_fails_as_in_eager(compiler: Callable[..., Any]) -> None:
    """PyTorch's math path refuses the pair, compiled or not (MK-07)."""
    inputs = (*(randn(1, 2, 8, 16) for _ in range(3)), torch.ones(1, 1, 8, 8, dtype=torch.bool))
    message = "Explicit attn_mask should not be set when is_causal=True"
    with sdpa_kernel(SDPBackend.MATH):
        with pytest.raises(RuntimeError, match=message):
            causal_and_masked(*inputs)
        with pytest.raises(RuntimeError, match=message):
            compiler(causal_and_masked)(*inputs)


# --- Broadcast and grouped heads ----------------------------------------------------------------

BROADCASTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "one key head": ((2, 8, 12, 16), (2, 1, 12, 16), (2, 1, 12, 16)),
    "one key batch": ((2, 8, 12, 16), (1, 8, 12, 16), (1, 8, 12, 16)),
    "one key batch and head": ((2, 8, 12, 16), (1, 1, 12, 16), (1, 1, 12, 16)),
    "only k's head": ((2, 8, 12, 16), (2, 1, 12, 16), (2, 8, 12, 16)),
    "only v's head": ((2, 8, 12, 16), (2, 8, 12, 16), (2, 1, 12, 16)),
    "only k's batch": ((2, 8, 12, 16), (1, 8, 12, 16), (2, 1, 12, 16)),
    "one query head": ((2, 1, 12, 16), (2, 8, 12, 16), (2, 8, 12, 16)),
    "one query batch": ((1, 8, 12, 16), (2, 8, 12, 16), (2, 8, 12, 16)),
}


@pytest.mark.parametrize("sizes", BROADCASTS.values(), ids=BROADCASTS.keys())
def test_broadcast_without_enable_gqa(sizes: tuple[tuple[int, ...], ...]) -> None:
    """Values as if expanded; gradients summed to the size that was given (GQ-02)."""
    inputs = [randn(*size, dtype=torch.float64) for size in sizes]
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.clone().requires_grad_() for tensor in inputs]
    out, outcome = run_poisoned(compile_quick(lambda *inputs: attend(*inputs)), ours)
    with poisoned():
        actual = gradients(out, ours)
    expected = oracle(*(tensor.expand(2, 8, -1, -1) for tensor in exact))
    torch.testing.assert_close(out, expected, **DOUBLE)
    torch.testing.assert_close(actual, gradients(expected, exact), **DOUBLE)
    assert kernels_of(outcome.report) == ["reference"]


@pytest.mark.parametrize(("heads", "gqa"), [(3, True), (4, False)], ids=["Hq 8, Hkv 3", "no GQA"])
def test_heads_that_do_not_fit_fail_as_without_us(heads: int, gqa: bool) -> None:
    """Refused in eager, and with the very words of a compile that we have no part in (GQ-02)."""
    q, k = randn(2, 8, 6, 16), randn(2, heads, 6, 16)

    def grouped(q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k, k, enable_gqa=gqa)

    messages = []
    for call in (torch.compile(grouped, backend="eager", fullgraph=True), compile_quick(grouped)):
        with pytest.raises(RuntimeError) as refusal:
            call(q, k)
        messages.append(str(refusal.value))
        torch._dynamo.reset()
    assert messages[0] == messages[1]
    with pytest.raises(RuntimeError, match="must"):
        grouped(q, k)


# --- Dtypes -------------------------------------------------------------------------------------


def rotated(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q is beyond what float16 could hold on the way, and k makes up for it."""
    q, k, v = (x @ w).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind(0)
    return q * 2.0**17, k * 2.0**-17, v


def rotated_in_float32(x: Tensor, w: Tensor) -> Tensor:
    """q and k leave the rotary embedding in float32, v is what the projection gave."""
    q, k, v = rotated(x, w)
    return attend(q.float(), k.float(), v)


def under_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return rotated_in_float32(x, w)


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "around"])
def test_mixed_dtypes_under_autocast(outside: bool) -> None:
    """bfloat16 comes out and the error stays eager's, wherever autocast is entered (DT-01)."""
    x, w = randn(2, 24, 32), randn(32, 96) / 32**0.5
    ours = [tensor.clone().requires_grad_() for tensor in (x, w)]
    eager = [tensor.clone().requires_grad_() for tensor in (x, w)]
    exact = [tensor.double().requires_grad_() for tensor in (x, w)]
    compiled = compile_quick(rotated_in_float32 if outside else under_autocast)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=outside),
        mock.patch.object(reference, "forward", wraps=reference.forward) as kernel,
    ):
        out, _ = run_poisoned(compiled, ours)
    _, inputs, *_ = kernel.call_args.args
    assert [tensor.dtype for tensor in inputs[:3]] == [torch.bfloat16] * 3
    expected = under_autocast(*eager)
    truth = oracle(*rotated(*exact))
    with poisoned():
        actual = [out, *gradients(out, ours)]
    wanted = [expected, *gradients(expected, eager)]
    for got, theirs, true in zip(actual, wanted, [truth, *gradients(truth, exact)], strict=True):
        assert got.dtype == theirs.dtype
        eager_error = relative_error(theirs.detach(), true.detach())
        assert relative_error(got.detach(), true.detach()) <= 1.2 * eager_error


def test_mixed_dtypes_outside_autocast_fail_as_in_eager() -> None:
    x, w = randn(2, 24, 32).bfloat16(), randn(32, 96).bfloat16()
    message = "Expected query, key, and value to have the same dtype"
    with pytest.raises(RuntimeError, match=message):
        rotated_in_float32(x, w)
    with pytest.raises(RuntimeError, match=message):
        compile_quick(rotated_in_float32)(x, w)


@BOTH_ROUTES
def test_float64_stays_float64(compiler: Callable[..., Any]) -> None:
    """Neither float32 nor autocast gets between (DT-03)."""
    inputs = [randn(2, 4, 17, 8, dtype=torch.float64) for _ in range(3)]
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.clone().requires_grad_() for tensor in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        out, outcome = run_poisoned(compiler(causal), ours)
    with poisoned():
        actual = gradients(out, ours)
    expected = oracle(*exact, causal="top_left")
    torch.testing.assert_close(out, expected, **DOUBLE)
    torch.testing.assert_close(actual, gradients(expected, exact), **DOUBLE)
    assert outcome.kernel_calls == 1


def check_precision(
    fn: Callable[..., Tensor], inputs: tuple[Tensor, ...], eps: float, gradient_eps: float
) -> None:
    """Output and gradients keep the dtype, are finite, and are that close to float64's."""
    ours = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    out, outcome = run_poisoned(compile_quick(fn), ours)
    with poisoned():
        actual = [out, *gradients(out, ours)]
    expected = oracle(*exact, scale=1.0)
    assert outcome.kernel_calls == 1
    wanted = [expected, *gradients(expected, exact)]
    limits = [eps, *[gradient_eps] * len(inputs)]
    for got, true, limit in zip(actual, wanted, limits, strict=True):
        assert got.dtype == inputs[0].dtype
        assert got.isfinite().all()
        error = float((got.double() - true).detach().norm())
        assert error <= limit * (1 + float(true.detach().norm()))


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, scale=1.0)


def test_float32_is_not_computed_in_less() -> None:
    """Seven digits in, six out (DT-03)."""
    q, k, v = (randn(2, 4, 17, 8) for _ in range(3))
    check_precision(unscaled, (q, k, v), 1e-6, 5e-6)


def test_float16_scores_beyond_its_range() -> None:
    """q·k of 1e5 is no infinity: the softmax is taken in float32 (DT-03)."""
    q, k, v = (randn(1, 2, 8, 64, dtype=torch.float16) for _ in range(3))
    q = q.sign() * 40
    k[:, :, :4] = q[:, :, :4]
    assert (q.double() @ k.double().mT).max() > 65504
    # The backward starts from the rounded output; keys of length 40 * 8 multiply that rounding.
    eps = torch.finfo(torch.float16).eps
    check_precision(unscaled, (q, k, v), eps, 20 * eps)


def in_float8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(*(tensor.to(torch.float8_e4m3fn) for tensor in (q, k, v)))


def test_float8_fails_as_in_eager() -> None:
    """Left to PyTorch, which has no such attention on the CPU (DT-03)."""
    inputs = [randn(1, 2, 8, 16) for _ in range(3)]
    with pytest.raises(NotImplementedError, match="Float8_e4m3fn"):
        in_float8(*inputs)
    with pytest.raises(NotImplementedError, match="Float8_e4m3fn"):
        compile_quick(in_float8)(*inputs)


# --- Head dims ----------------------------------------------------------------------------------


@BOTH_ROUTES
def test_values_of_another_width(compiler: Callable[..., Any]) -> None:
    """The gradient of v has v's own head dim, not q's (HD-03)."""
    project = nn.Linear(8, 16)

    def widened(x: Tensor) -> Tensor:
        return attend(x, x, project(x), is_causal=True)

    outcome = compare_with_eager(
        widened, compiler(widened), [randn(1, 2, 4, 8)], [*project.parameters()]
    )
    assert outcome.kernel_calls == 1
