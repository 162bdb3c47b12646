"""Cases from other projects' issues: how hand-written attention is spelled, scaled and biased."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from eager_attention import HIDDEN, left_for, only_spec, qkv, randn
from torch import Tensor, nn

from comparison import compare_forward, compare_with_eager
from helpers import compile_quick, run_reported
from poison import poisoned

# --- PM-02, PM-03: scales -------------------------------------------------------------------------

SCALE_SPELLINGS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "multiplied": lambda q, k, c: q @ k.mT * c,
    "divided": lambda q, k, c: q @ k.mT / (1 / c),
    "on the query": lambda q, k, c: (q * c) @ k.mT,
    "on both": lambda q, k, c: (q * abs(c) ** 0.5) @ (k.mT * (abs(c) ** 0.5 * (c / abs(c)))),
}


@pytest.mark.parametrize("scale", [1.0, 0.1, 1 / 7.5, -0.25, 2.0])
@pytest.mark.parametrize("way", SCALE_SPELLINGS)
def test_the_user_s_scale(way: str, scale: float) -> None:
    """PM-02: whatever its sign and place, and none at all is 1."""

    def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return (SCALE_SPELLINGS[way](q, k, scale) + m).softmax(-1) @ v

    spec = only_spec(compare_with_eager(fn, compile_quick(fn), [*qkv(), randn(6, 6)]))
    assert spec.scale == pytest.approx(scale)


class Temperature(nn.Module):
    """softmax(scores / t) v, t a 0-d tensor, a root of a parameter, or one for each head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        shape = {"root": (1,), "per head": (4, 1, 1)}.get(kind, ())
        self.value = nn.Parameter(torch.full(shape, 8.0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        divisor = self.value.sqrt() if self.kind == "root" else self.value
        return (q @ k.mT / divisor + m).softmax(-1) @ v


@pytest.mark.parametrize("kind", ["root", "per head", "0-d"])
def test_a_learned_scale_keeps_its_gradient(kind: str) -> None:
    """PM-03: left by name, and the parameter's gradient is eager's."""
    module = Temperature(kind)
    outcome = compare_with_eager(
        module, compile_quick(module), [*qkv(), randn(6, 6)], [module.value]
    )
    assert outcome.reasons == ["all: the scale is a tensor"]


def test_a_constant_tensor_as_scale() -> None:
    """PM-03: torch.tensor(0.5) in the code is a tensor too."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / torch.tensor(0.5)).softmax(-1) @ v

    compare_with_eager(fn, compile_quick(fn), qkv())


def test_a_learned_scale_on_the_query() -> None:
    """A product of the query alone is no part of the attention: the op takes its result."""
    module = nn.ParameterList([nn.Parameter(torch.full((4, 1, 1), 0.3))])

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q * module[0]) @ k.mT).softmax(-1) @ v

    outcome = compare_with_eager(fn, compile_quick(fn), qkv(), list(module))
    assert only_spec(outcome).scale == 1.0


# --- PM-04: equivalent spellings ------------------------------------------------------------------

Spelling = Callable[..., Tensor]
_BAND = ~HIDDEN


SPELLINGS: dict[str, Spelling] = {
    "mul": lambda q, k, v, m: (q @ k.mT * 8**-0.5 + m).softmax(-1) @ v,
    "div": lambda q, k, v, m: (q @ k.mT / 8**0.5 + m).softmax(-1) @ v,
    "mask first": lambda q, k, v, m: (m + q @ k.mT * 8**-0.5).softmax(-1) @ v,
    "number first": lambda q, k, v, m: (8**-0.5 * (q @ k.mT) + m).softmax(-1) @ v,
    "torch functions": lambda q, k, v, m: torch.matmul(
        torch.softmax(torch.add(torch.mul(torch.matmul(q, k.transpose(-2, -1)), 8**-0.5), m), -1),
        v,
    ),
    "functional softmax": lambda q, k, v, m: F.softmax(q @ k.mT * 8**-0.5 + m, dim=3) @ v,
    "dropout of zero": lambda q, k, v, m: (
        F.dropout((q @ k.mT * 8**-0.5 + m).softmax(-1), 0.0, training=True) @ v
    ),
    "dropout in eval": lambda q, k, v, m: (
        F.dropout((q @ k.mT * 8**-0.5 + m).softmax(-1), 0.5, training=False) @ v
    ),
    "in place": lambda q, k, v, m: (q @ k.mT).mul_(8**-0.5).add_(m).softmax(-1) @ v,
    "query scaled": lambda q, k, v, m: ((q * 8**-0.5) @ k.mT + m).softmax(-1) @ v,
    "transposed product": lambda q, k, v, m: ((k @ q.mT).mT * 8**-0.5 + m).softmax(-1) @ v,
    "merged heads": lambda q, k, v, m: torch.bmm(
        (torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * 8**-0.5 + m).softmax(-1),
        v.flatten(0, 1),
    ).view(q.shape),
    "baddbmm": lambda q, k, v, m: (
        torch.baddbmm(m[None], q.flatten(0, 1), k.flatten(0, 1).mT, alpha=8**-0.5).softmax(-1)
        @ v.flatten(0, 1)
    ).view(q.shape),
    "einsum": lambda q, k, v, m: torch.einsum(
        "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * 8**-0.5 + m).softmax(-1), v
    ),
    "filled": lambda q, k, v, m: (
        (q @ k.mT * 8**-0.5).masked_fill(HIDDEN, float("-inf")).softmax(-1) @ v
    ),
    "where": lambda q, k, v, m: (
        torch.where(_BAND, q @ k.mT * 8**-0.5, float("-inf")).softmax(-1) @ v
    ),
    "GPT-2's buffer": lambda q, k, v, m: (
        torch.where(
            torch.ones(16, 16, dtype=torch.bool).tril()[None, None, : q.shape[2], : k.shape[2]],
            q @ k.mT / 8**0.5,
            torch.full([], torch.finfo(torch.float32).min),
        ).softmax(-1)
        @ v
    ),
    "exponentials": lambda q, k, v, m: (
        ((q @ k.mT * 8**-0.5 + m).exp() / (q @ k.mT * 8**-0.5 + m).exp().sum(-1, keepdim=True)) @ v
    ),
}
# What is not taken, and why it says so; softmax written out is not looked for at all.
MISSED = {"transposed product": "the scores go through mT", "exponentials": None}


@pytest.mark.parametrize("way", SPELLINGS)
def test_every_spelling_is_taken(way: str) -> None:
    """PM-04: in training and not, for the first batch size and those that follow."""
    fn = SPELLINGS[way]
    compiled = compile_quick(fn)
    mask = torch.zeros(6, 6).masked_fill(HIDDEN, float("-inf"))
    seen: list[tuple[str | None, str]] = []
    for training in (False, True):
        for batch in (3, 5):  # the second is a symbol
            operands = [randn(batch, 4, 6, 8).requires_grad_(training) for _ in range(3)]
            with poisoned():
                ours, report = run_reported(_with_gradients, compiled, operands, mask)
            theirs = _with_gradients(fn, operands, mask)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            seen += [(site.kernel, " ".join(site.reason_texts)) for site in report.sites]
    if way in MISSED:
        reason = MISSED[way]
        assert set(seen) == (set() if reason is None else {(None, f"all: {reason}")})
    else:
        assert {kernel for kernel, _ in seen} == {"reference"}
        assert len(seen) <= 4


def _with_gradients(fn: Spelling, operands: list[Tensor], mask: Tensor) -> list[Tensor]:
    out = fn(*operands, mask)
    if not out.requires_grad:
        return [out]
    weight = torch.linspace(-1, 2, out.numel()).view(out.shape)
    return [out, *torch.autograd.grad((out * weight).sum(), operands)]


# --- PM-06: scale, bias and softcap in their order ------------------------------------------------


def test_a_bias_that_is_scaled_with_the_scores() -> None:
    """PM-06 (a): (q kᵀ + bias) / 8 has an eighth of the bias."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return ((q @ k.mT + bias) / 8).softmax(-1) @ v

    inputs = [*qkv(), 4 * randn(1, 4, 6, 6)]
    spec = only_spec(compare_with_eager(fn, compile_quick(fn), inputs))
    assert spec.scale == 1 / 8


def test_t5_has_no_scale() -> None:
    """PM-06 (b): and its position bias has a gradient."""

    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (q @ k.mT + bias).softmax(-1) @ v

    spec = only_spec(compare_with_eager(fn, compile_quick(fn), [*qkv(), randn(1, 4, 6, 6)]))
    assert spec.scale == 1.0
    assert spec.bias_needs_grad


def test_a_softcap_before_the_mask() -> None:
    """PM-06 (c): both the cap and the mask are in the op's arguments."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (20 * torch.tanh(q @ k.mT / 8 / 20) + mask).softmax(-1) @ v

    inputs = [*(8 * tensor for tensor in qkv()), randn(6, 6)]
    spec = only_spec(compare_with_eager(fn, compile_quick(fn), inputs))
    assert (spec.softcap, spec.scale) == (20, pytest.approx(1 / 8))
    assert spec.bias is not None


def test_a_softcap_after_the_mask_is_left() -> None:
    """PM-06 (c): tanh of masked scores is another function, in which nothing is hidden."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (20 * torch.tanh((q @ k.mT + mask) / 20)).softmax(-1) @ v

    assert "a mask inside tanh" in left_for(fn, [*qkv(), randn(6, 6)])


def test_a_sink_column_is_never_plain_attention() -> None:
    """PM-06 (d): dropped after the softmax, it still takes its share."""

    def fn(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        column = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        return torch.cat([q @ k.mT / 8, column], -1).softmax(-1)[..., :-1] @ v

    spec = only_spec(compare_with_eager(fn, compile_quick(fn), [*qkv(), 2 + randn(4)]))
    assert spec.has_sink


# --- DT-02: dtypes that eager refuses -------------------------------------------------------------


def _half_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).float().softmax(-1).half() @ v


def _wider_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v.float()


@pytest.mark.parametrize(
    ("fn", "dtypes"),
    [
        (_half_weights, (torch.float32,) * 3),
        (_wider_key, (torch.float16, torch.float32, torch.float16)),
        (_wider_key, (torch.bfloat16,) * 3),
    ],
    ids=["values", "key", "cast values"],
)
def test_dtypes_that_eager_refuses_are_refused(
    fn: Callable[..., Tensor], dtypes: tuple[torch.dtype, ...]
) -> None:
    """DT-02: the same error as without us, and nothing is made to run."""
    inputs = [tensor.to(dtype) for tensor, dtype in zip(qkv(), dtypes, strict=True)]
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        fn(*inputs)
    with pytest.raises(
        (RuntimeError, torch._dynamo.exc.TorchRuntimeError), match=r"dtype|scalar type"
    ):
        compile_quick(fn)(*inputs)


def test_a_mask_in_float64_widens_as_in_eager() -> None:
    """DT-02: float32 scores and a float64 mask: eager's product of float64 and float32 fails."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1) @ v

    inputs = [*qkv(), randn(6, 6).double()]
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        fn(*inputs)
    with pytest.raises(
        (RuntimeError, torch._dynamo.exc.TorchRuntimeError), match=r"dtype|scalar type"
    ):
        compile_quick(fn)(*inputs)


def test_a_mask_in_float64_that_is_cast_back() -> None:
    """DT-02: where eager does run it, the result is eager's."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1).float() @ v

    compare_forward(fn, compile_quick(fn), [*qkv(), randn(6, 6).double()])
