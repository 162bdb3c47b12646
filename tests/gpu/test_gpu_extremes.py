"""Sizes, offsets and logits at the ends of what is possible: right, or refused by name."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from allocator import poison
from judging import Call, attempt, judge, problem_of, results
from torch import Tensor

from fa_inductor.problem import Inputs
from fa_inductor.support import reasons_against
from fa_inductor.target import Target

KERNELS = ("fa4", "cudnn")
BF16 = torch.bfloat16


def _bshd(b: int, h: int, s: int, d: int = 64, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(b, s, h, d, device="cuda", dtype=dtype).transpose(1, 2)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str = "none",
    bias: Tensor | None = None,
    backward: bool = True,
    peaked: bool = False,
) -> Call:
    grad_out = _bshd(*q.shape[:3], v.shape[3], q.dtype) if backward else None
    inputs = Inputs(q, k, v, bias)
    return Call(problem_of(q.shape[3], causal=causal), inputs, grad_out=grad_out, peaked=peaked)


def _reasons(call: Call, kernel: str) -> str:
    return "; ".join(reasons_against(kernel, call.spec(), Target.of_device(torch.device("cuda"))))


def _right_or_refused(call: Call, kernel: str, value: str) -> tuple[bool, list[str]]:
    """Whether it ran, and what is wrong; a refusal must name `value`."""
    reasons = _reasons(call, kernel)
    if reasons:
        return False, [] if value in reasons else [f"{value} is not in {reasons}"]
    return True, attempt(lambda: judge(call, kernel))


# --- Lengths of 1 ---------------------------------------------------------------------------------

SHORT = ((1, 1), (1, 2), (2, 1), (1, 300), (63, 1), (3, 5), (65, 129), (300, 1))


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_short_lengths(kernel: str, causal: str) -> None:
    found = {}
    for sq, sk in SHORT:
        q, k, v = _bshd(2, 4, sq), _bshd(2, 4, sk), _bshd(2, 4, sk)
        value = f"Sq {sq} > Sk {sk}" if sq > sk else "Sq = Sk = 1"
        ran, found[sq, sk] = _right_or_refused(_call(q, k, v, causal), kernel, value)
        assert ran or kernel == "cudnn"
    assert not any(found.values()), found


@pytest.mark.parametrize("kernel", KERNELS)
def test_sizes_of_one(kernel: str) -> None:
    found = {}
    for sizes in ((1, 1, 1), (1, 1, 200), (2, 1, 200), (1, 3, 1)):
        q, k, v = (_bshd(*sizes) for _ in range(3))
        found[sizes] = _right_or_refused(_call(q, k, v), kernel, "Sq = Sk = 1")[1]
    assert not any(found.values()), found


# --- Offsets and grids ----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_offsets_past_two_to_the_31(kernel: str) -> None:
    """The last two heads of a packed (1, S, 3, H, D) buffer of more than 2^31 elements."""
    s, h, d = 4096, 2800, 64
    packed = torch.full((1, s, 3, h, d), float("nan"), device="cuda", dtype=BF16)
    assert packed.numel() > 1 << 31
    views = [packed[:, :, i, -2:].transpose(1, 2) for i in range(3)]
    for view in views:
        view.normal_()
    last = views[2]
    reach = sum((n - 1) * step for n, step in zip(last.shape, last.stride(), strict=True))
    assert last.storage_offset() + reach > 1 << 31
    call = _call(*views, "top_left")
    assert _reasons(call, kernel) == ""
    assert judge(call, kernel, runs=1) == []


GRIDS = [
    (65535, 1, 10, "batch 65535"),
    (65536, 1, 10, "batch 65536"),
    (8192, 9, 10, "heads 9"),
    (1, 70000, 10, "heads 70000"),
    (32, 2, 2048, "no reason"),
    (16, 2, 4096, "no reason"),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_batches_and_heads_past_a_grid(kernel: str, grid: tuple[int, int, int, str]) -> None:
    """LG-03. The yardstick is taken from the first and last problems of the batch."""
    b, h, s, value = grid
    for causal in ("none", "top_left"):
        q, k, v = (_bshd(b, h, s) for _ in range(3))
        call = _call(q, k, v, causal)
        if reasons := _reasons(call, kernel):
            assert value in reasons
            continue
        poison([q.numel() * 2])
        out, lse = call.forward(kernel)
        made = {"out": out, "lse": lse, **call.backward(kernel, out, lse)}
        for tensor in made.values():
            assert torch.isfinite(tensor).all()
        for batch, heads in ((slice(0, 2), slice(0, 2)), (slice(-2, None), slice(-2, None))):
            part = [tensor[batch, heads] for tensor in (q, k, v)]
            assert call.grad_out is not None
            exact = _exact(*part, call.grad_out[batch, heads], causal)
            for name, tensor in made.items():
                assert _distance(tensor[batch, heads], exact[name]) < 2e-2, (name, causal)


def _exact(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, causal: str) -> dict[str, Tensor]:
    call = Call(problem_of(q.shape[3], causal=causal), Inputs(q, k, v), grad_out=grad_out)
    return results(call, exact=True)


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


# --- Long sequences -------------------------------------------------------------------------------


class Chunked(NamedTuple):
    """Attention of one head in float64, by rows: (S, D) inputs; delta is out · grad_out."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    lse: Tensor
    out: Tensor
    delta: Tensor
    causal: bool
    bias: Tensor | None = None

    def weights(self, rows: Tensor, keys: slice | Tensor = slice(None)) -> Tensor:
        scores = _scores(self.q, self.k, rows, keys, self.causal, self.bias)
        return torch.exp(scores - self.lse[rows, None])

    def grad_scores(self, rows: Tensor, keys: slice | Tensor = slice(None)) -> Tensor:
        grad = self.grad_out[rows] @ self.v[keys].mT
        return self.weights(rows, keys) * (grad - self.delta[rows, None]) * self.q.shape[1] ** -0.5


def _scores(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    keys: slice | Tensor,
    causal: bool,
    bias: Tensor | None,
) -> Tensor:
    scores = q[rows] @ k[keys].mT * q.shape[1] ** -0.5
    if bias is not None:
        scores += bias[rows if bias.shape[0] > 1 else slice(None)][:, keys]
    if causal:
        places = torch.arange(k.shape[0], device=k.device)[keys]
        scores = scores.masked_fill(places[None] > rows[:, None], float("-inf"))
    return scores


def _blocks(s: int) -> Iterator[Tensor]:
    return iter(torch.arange(s, device="cuda").split(2048))


def _chunked(call: Call) -> Chunked:
    assert call.grad_out is not None
    q, k, v, grad = (t[0, 0].double() for t in (*call.inputs[:3], call.grad_out))
    causal = call.problem.causal != "none"
    bias = None if call.inputs.bias is None else call.inputs.bias[0, 0]
    lse, out = [], []
    for rows in _blocks(q.shape[0]):
        scores = _scores(q, k, rows, slice(None), causal, bias)
        lse.append(scores.logsumexp(-1))
        out.append(torch.exp(scores - lse[-1][:, None]) @ v)
    whole = torch.cat(out)
    return Chunked(q, k, v, grad, torch.cat(lse), whole, (whole * grad).sum(-1), causal, bias)


def _check_sampled(call: Call, kernel: str, exact: Chunked, count: int = 64) -> None:
    """64 rows of everything, the last one among them, each against float64."""
    s = exact.q.shape[0]
    picked = torch.randperm(s, device="cuda")[: count - 2]
    picked = torch.cat([picked, torch.tensor([s - 1, s // 2], device="cuda")])
    poison([s * 128, s * 4])
    out, lse = call.forward(kernel)
    grads = call.backward(kernel, out, lse)
    for tensor in (out, *grads.values()):
        assert torch.isfinite(tensor).all()
    wanted = {"dq": exact.grad_scores(picked) @ exact.k}
    wanted["dk"], wanted["dv"] = torch.zeros_like(wanted["dq"]), torch.zeros_like(wanted["dq"])
    for rows in _blocks(s):
        wanted["dk"] += exact.grad_scores(rows, picked).mT @ exact.q[rows]
        wanted["dv"] += exact.weights(rows, picked).mT @ exact.grad_out[rows]
    assert (lse[0, 0] - exact.lse).abs().max() < 1e-3
    _check_rows(out[0, 0], exact.out, "out", 2e-2)  # all of them
    for name, grad in grads.items():
        _check_rows(grad[0, 0, picked], wanted[name], name, 6e-2)


def _check_rows(actual: Tensor, expected: Tensor, name: str, bound: float) -> None:
    """No row may be off by more than `bound` of its own norm, or of a tenth of the usual norm."""
    norms = expected.norm(dim=-1)
    scale = torch.maximum(norms, 0.1 * norms.median())
    worst = ((actual.double() - expected).norm(dim=-1) / scale).max()
    assert worst < bound, f"{name}: {float(worst):.2e}"


@functools.cache
def _long(s: int) -> tuple[Call, Chunked]:
    torch.manual_seed(s)
    call = _call(*(_bshd(1, 1, s) for _ in range(3)), "top_left")
    return call, _chunked(call)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("s", [65535, 65536, 65537, 70001])
def test_causal_past_65536(s: int, kernel: str) -> None:
    """LG-01."""
    call, exact = _long(s)
    assert _reasons(call, kernel) == ""
    _check_sampled(call, kernel, exact)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("s", [46340, 46341])
def test_a_dense_mask_around_two_to_the_31_elements(s: int, kernel: str) -> None:
    """LG-04: block-diagonal; one element too many is refused by its count."""
    q, k, v = (_bshd(1, 1, s) for _ in range(3))
    block = torch.arange(s, device="cuda", dtype=torch.int32) // 1000
    bias = torch.zeros(1, 1, s, s, device="cuda", dtype=BF16)
    bias.masked_fill_(block[:, None] != block, float("-inf"))
    call = _call(q, k, v, bias=bias)
    reasons = _reasons(call, kernel)
    if kernel == "fa4":
        assert "attn_mask" in reasons
    elif s * s >= 1 << 31:
        assert f"{s * s} elements" in reasons
    else:
        assert reasons == ""
        _check_sampled(call, kernel, _chunked(call))


def test_a_mask_of_one_row_stays_on_the_fast_path() -> None:
    """LG-04, its other half."""
    s = 46341
    q, k, v = (_bshd(1, 1, s) for _ in range(3))
    bias = torch.zeros(1, 1, 1, s, device="cuda", dtype=BF16)
    bias[..., 40000:] = float("-inf")
    call = _call(q, k, v, bias=bias)
    assert _reasons(call, "cudnn") == ""
    _check_sampled(call, "cudnn", _chunked(call))


# --- Logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_near_112(kernel: str, sign: float) -> None:
    """exp of them, and of a log-sum-exp below -88.7, leaves float32."""
    found = {}
    for s, causal in itertools.product((64, 128, 192, 256), ("none", "top_left")):
        q = _bshd(2, 4, s).abs() * 4.7
        k = _bshd(2, 4, s).abs() * 4.7 * sign
        call = _call(q, k, _bshd(2, 4, s), causal, peaked=True)
        assert sign > 0 or bool((call.forward("reference")[1] < -88.7).any())
        ran, found[s, causal] = _right_or_refused(call, kernel, f"Sq {s}")
        if not ran:
            assert (kernel, s % 128, causal) == ("cudnn", 64, "none")
            call = dataclasses.replace(call, grad_out=None)
            found[s, "forward"] = attempt(lambda call=call: judge(call, kernel))
    assert not any(found.values()), found


def test_a_bias_of_minus_120() -> None:
    found = {}
    for s in (64, 128, 192, 256):
        q, k, v = (_bshd(2, 4, s) for _ in range(3))
        bias = torch.full((1, 1, s, s), -120.0, device="cuda", dtype=BF16)
        ran, found[s] = _right_or_refused(_call(q, k, v, bias=bias), "cudnn", f"Sq {s}")
        assert ran == (s % 128 != 64)
    assert not any(found.values()), found
