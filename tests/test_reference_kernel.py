"""The numbers of the attention op on the reference kernel, against float64 by definition."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from attention_inputs import FLOATS, LAYOUTS, Inputs, arguments, dtype_id, qkv
from torch import Tensor

from fa_inductor import ops
from fa_inductor.kernels import reference
from helpers import clone_inputs, oracle, relative_error
from poison import poisoned

CAUSAL = ("none", "top_left", "bottom_right")
LENGTHS = ((6, 6), (3, 7), (7, 3), (1, 5), (5, 1))

# Relative errors in the norm. The kernel computes in float32 (float64) and rounds once, so
# the forward is within half a unit in the last place, eps/2, of its dtype. The backward starts
# from the rounded output, which adds as much again to sum(grad_out * out) in every row.
FORWARD_ERROR = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: torch.finfo(torch.float16).eps / 2,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 2,
}
BACKWARD_ERROR = {
    torch.float64: 1e-10,
    torch.float32: 5e-6,
    torch.float16: torch.finfo(torch.float16).eps,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps,
}


def oracle_lse(q: Tensor, k: Tensor, causal: str, scale: float | None) -> Tensor:
    """log sum_j exp(scale * q_i k_j) over the keys that row i sees, float64, -inf without any."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    offset = {"top_left": 0, "bottom_right": k.shape[2] - q.shape[2]}.get(causal, k.shape[2])
    return scores.masked_fill(j > i + offset, float("-inf")).logsumexp(-1)


def assert_close(actual: Tensor, expected: Tensor, error: float) -> None:
    """Same shape, nowhere NaN, and within `error` of `expected` in the norm."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    assert relative_error(actual.detach(), expected.detach()) <= error


def check_forward_and_backward(
    inputs: Inputs, *, causal: str = "none", scale: float | None = None, with_lse: bool = False
) -> None:
    """out, lse and the three gradients of a random loss over out (and lse) on poisoned memory."""
    dtype = inputs[0].dtype
    ours = [tensor.requires_grad_() for tensor in clone_inputs(*inputs)]
    exact = [tensor.requires_grad_() for tensor in clone_inputs(*inputs, dtype=torch.float64)]
    expected = oracle(*exact, causal=causal, scale=scale)
    expected_lse = oracle_lse(exact[0], exact[1], causal, scale)
    weight = torch.randn(expected.shape).to(dtype)
    weight_lse = torch.randn(expected_lse.shape).to(expected_lse.dtype)
    with poisoned():
        out, lse = ops.attention(*ours, *arguments(causal, scale=scale))
        loss = (out * weight).sum()
        grads = torch.autograd.grad(
            loss + (lse * weight_lse).sum() if with_lse else loss, ours, materialize_grads=True
        )
    loss = (expected * weight.double()).sum()
    expected_grads = torch.autograd.grad(
        loss + (expected_lse * weight_lse).sum() if with_lse else loss, exact
    )
    assert_close(out, expected, FORWARD_ERROR[dtype])
    error = FORWARD_ERROR[lse.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=error, atol=error)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        assert_close(grad, expected_grad, BACKWARD_ERROR[dtype])


# --- Values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda pair: f"Sq {pair[0]} Sk {pair[1]}")
@pytest.mark.parametrize("causal", CAUSAL)
def test_out_lse_and_gradients(causal: str, lengths: tuple[int, int], dtype: torch.dtype) -> None:
    """Both alignments of causal, with more and with fewer queries than keys (MK-03)."""
    sq, sk = lengths
    inputs = qkv(hkv=2, sq=sq, sk=sk, dv=4, dtype=dtype)
    check_forward_and_backward(inputs, causal=causal)


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_gives_the_same_numbers(make: Callable[[], Inputs]) -> None:
    """Views, packed projections, grouped and expanded heads, sizes 0 and 1 (ST-14, ST-15)."""
    check_forward_and_backward(make(), causal="top_left")


@pytest.mark.parametrize("scale", [0.3, 1.0, -0.25, 0.0, 2])
def test_scale_is_taken_as_given(scale: float) -> None:
    """Any number, negative and zero too (PM-02)."""
    check_forward_and_backward(qkv(dtype=torch.float64), scale=scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("causal", CAUSAL)
def test_the_gradient_of_lse_is_added(causal: str, dtype: torch.dtype) -> None:
    """A loss over lse reaches q and k (PM-10)."""
    inputs = qkv(hkv=2, sq=4, sk=7, dtype=dtype)
    check_forward_and_backward(inputs, causal=causal, with_lse=True)


def test_a_loss_over_lse_alone() -> None:
    """Without a gradient of out, v gets zeros and q and k what lse gives them (PM-10)."""
    ours = [tensor.requires_grad_() for tensor in qkv(dtype=torch.float64)]
    exact = [tensor.requires_grad_() for tensor in clone_inputs(*ours)]
    with poisoned():
        _, lse = ops.attention(*ours, *arguments())
        grads = torch.autograd.grad(lse.square().sum(), ours)
    loss = oracle_lse(exact[0], exact[1], "none", None).square().sum()
    expected = [*torch.autograd.grad(loss, exact[:2]), torch.zeros_like(exact[2])]
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)


def test_an_unused_lse_has_no_gradient_rather_than_zeros() -> None:
    """A kernel is spared the work: grad_lse is None unless the loss is over lse."""
    inputs = [tensor.requires_grad_() for tensor in qkv()]
    out, _ = ops.attention(*inputs, *arguments())
    with mock.patch.object(reference, "backward", wraps=reference.backward) as backward:
        out.sum().backward()
    assert backward.call_count == 1
    names = list(inspect.signature(reference.backward).parameters)
    assert backward.call_args.args[names.index("grad_lse")] is None


def test_gradients_by_parts_of_the_keys() -> None:
    """Given out and lse over all keys, the gradient op takes any part of them, as ring attention
    does: the parts' gradients are those of the whole, and the sink's in each part."""
    q, k, v = qkv(hkv=2, sk=8, dtype=torch.float64)
    bias = torch.randn(2, 1, 5, 8, dtype=torch.float64)
    bias[:, :, 2, :5] = bias[:, :, 3, 5:] = bias[:, :, 4] = float("-inf")
    sink = torch.randn(4, dtype=torch.float64)
    sink[1] = float("-inf")
    out, lse = ops.attention(q, k, v, *arguments(), bias, sink)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    after = (None, "none", False, "reference", True, True)

    def gradients(part: slice) -> tuple[Tensor, ...]:
        inputs = (q, k[:, :, part], v[:, :, part], out, lse)
        more = (bias[..., part], sink)
        return ops.attention_backward_all(grad_out, grad_lse, *inputs, *after, *more)

    with poisoned():
        whole = gradients(slice(8))
        first, second = gradients(slice(5)), gradients(slice(5, 8))
    torch.testing.assert_close(first[0] + second[0], whole[0])
    torch.testing.assert_close((first[4], second[4]), (whole[4], whole[4]))
    for index, dim in ((1, 2), (2, 2), (3, 3)):
        joined = torch.cat([first[index], second[index]], dim)
        torch.testing.assert_close(joined, whole[index])


@pytest.mark.parametrize("index", [0, 1, 2], ids=["q", "k", "v"])
def test_only_one_input_wants_a_gradient(index: int) -> None:
    ours = list(qkv(dtype=torch.float64))
    exact = clone_inputs(*ours)
    ours[index].requires_grad_()
    exact[index].requires_grad_()
    with poisoned():
        out, _ = ops.attention(*ours, *arguments())
        out.square().sum().backward()
    oracle(*exact).square().sum().backward()
    torch.testing.assert_close(ours[index].grad, exact[index].grad, rtol=1e-10, atol=1e-12)


def test_scores_beyond_the_range_of_float16_stay_finite() -> None:
    """q·k of about 1e5 overflows float16, not the float32 softmax (DT-03)."""
    q, k, v = qkv(d=64, dtype=torch.float16)
    inputs = (q.sign() * 40, k.sign() * 40, v)
    assert (inputs[0].double() @ inputs[1].double().mT).abs().max() > 32768
    check_forward_and_backward(inputs, scale=1.0)


# --- Blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("causal", CAUSAL)
def test_blocks_of_rows_change_nothing(
    causal: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks, the last of them shorter, give what one block gives."""
    inputs = qkv(hkv=2, sq=11, sk=7, dtype=torch.float64)
    scores_a_row = inputs[0].shape[0] * inputs[0].shape[1] * 7
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", rows * scores_a_row)
    sizes = [block.stop - block.start for block in reference._blocks(*inputs[:2])]
    assert sizes == [rows] * (11 // rows) + [11 % rows] * (rows > 1)
    check_forward_and_backward(inputs, causal=causal, with_lse=causal != "bottom_right")


def test_a_row_larger_than_a_block_is_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 3)
    check_forward_and_backward(qkv(dtype=torch.float64), with_lse=True)


# --- Nothing to attend to -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_rows_without_a_key(dtype: torch.dtype) -> None:
    """Bottom-right causal with Sq > Sk: 0, lse -inf and no gradient in those rows (MK-01)."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv(sq=7, sk=3, dtype=dtype))
    with poisoned():
        out, lse = ops.attention(q, k, v, *arguments("bottom_right"))
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert out[:, :, :4].eq(0).all()
    assert lse[:, :, :4].isneginf().all()
    assert grads[0][:, :, :4].eq(0).all()
    assert lse[:, :, 4:].isfinite().all()
    assert all(tensor.isfinite().all() for tensor in (out, *grads))


EMPTY: dict[str, dict[str, int]] = {
    "B=0": {"b": 0},
    "Hq=0": {"hq": 0},
    "Sq=0": {"sq": 0},
    "Sk=0": {"sk": 0},
    "D=0": {"d": 0},
    "Dv=0": {"dv": 0},
    "Sq=0 and Sk=0": {"sq": 0, "sk": 0},
}


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY.keys())
def test_sizes_of_zero(sizes: dict[str, int], causal: str) -> None:
    """Every element that exists is right, gradients included, whichever size is 0."""
    inputs = qkv(**{"sq": 5, "sk": 5, **sizes}, dtype=torch.float64)
    with_lse = sizes.get("sk") != 0  # without a key lse is -inf and has no gradient
    check_forward_and_backward(inputs, causal=causal, scale=0.5, with_lse=with_lse)


def test_no_heads_at_all() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in qkv(hq=0, hkv=0))
    out, lse = ops.attention(q, k, v, *arguments())
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_without_keys_no_gradient_comes_from_lse() -> None:
    """lse is -inf whatever q is, so its gradient is 0 and not NaN."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv(sk=0))
    with poisoned():
        _, lse = ops.attention(q, k, v, *arguments())
        grads = torch.autograd.grad(lse, (q, k, v), torch.ones_like(lse))
    assert lse.isneginf().all()
    assert grads[0].eq(0).all()
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
