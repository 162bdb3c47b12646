"""What the attention op computes beside softmax(q·k) v, on the reference kernel.

Bias, sink, softcap, windows, sequence lengths, dropout: values and all gradients against an
oracle of its own, float64, which cuts each sequence out of the batch and fills its band one
score at a time, so that it shares no index arithmetic with the kernel.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attention_inputs import attend, leaves, lengths, qkv, rng
from torch import Tensor

from fa_inductor.errors import ShapeError
from fa_inductor.kernels import reference
from helpers import relative_error
from poison import poisoned

SIZES = {"b": 2, "hq": 4, "hkv": 2, "sq": 5, "sk": 7, "d": 8, "dv": 4}
SCORES = (2, 4, 5, 7)
INF = float("inf")

# Relative errors in the norm: float32 throughout, a few roundings after another.
FORWARD_ERROR, BACKWARD_ERROR = 1e-6, 1e-5


# --- The oracle -----------------------------------------------------------------------------------


def visible(sq: int, sk: int, causal: str, left: int | None, right: int | None) -> Tensor:
    """Which keys each query of one sequence sees, score by score."""
    offset = 0 if causal == "top_left" else sk - sq
    seen = torch.zeros(sq, sk, dtype=torch.bool)
    for i, j in itertools.product(range(sq), range(sk)):
        seen[i, j] = (
            (causal == "none" or j <= i + offset)
            and (left is None or j >= i + offset - left)
            and (right is None or j <= i + offset + right)
        )
    return seen


def oracle(
    tensors: dict[str, Tensor],
    *,
    keep: Tensor | None = None,
    scale: float | None = None,
    causal: str = "none",
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable in all of `tensors`; `keep` says which weights are not dropped."""
    q, k, v = (tensors[name] for name in "qkv")
    b, hq, sq, d = q.shape
    group, sk = hq // k.shape[1], k.shape[2]
    bias = tensors.get("bias", torch.zeros((), dtype=q.dtype)).expand(b, hq, sq, sk)
    sink = tensors.get("sink", torch.full((hq,), -INF, dtype=q.dtype))
    whole_q, whole_k = torch.full((b,), sq), torch.full((b,), sk)
    outs, lses = [], []
    for i in range(b):
        lq = int(tensors.get("seqlens_q", whole_q)[i])
        lk = int(tensors.get("seqlens_k", whole_k)[i])
        keys, values = (t[i, :, :lk].repeat_interleave(group, 0) for t in (k, v))
        scores = q[i, :, :lq] @ keys.mT * (d**-0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + bias[i, :, :lq, :lk]
        hidden = ~visible(lq, lk, causal, window_left, window_right)
        scores = torch.cat([scores.masked_fill(hidden, -INF), column(sink, lq)], -1)
        empty = scores.isneginf().all(-1)
        safe = scores.masked_fill(empty[..., None], 0.0)  # else the gradient is NaN, times 0
        weights = safe.softmax(-1)[..., :-1].masked_fill(empty[..., None], 0.0)
        if keep is not None:
            weights = weights * keep[i, :, :lq, :lk] / (1.0 - dropout_p)
        # Not logsumexp: its gradient is exp(score - lse), 1 for each of many scores of -3e38.
        top = safe.detach().amax(-1, keepdim=True)
        lse = (top[..., 0] + (safe - top).exp().sum(-1).log()).masked_fill(empty, -INF)
        outs.append(torch.cat([weights @ values, v.new_zeros(hq, sq - lq, v.shape[3])], 1))
        lses.append(torch.cat([lse, column(sink, sq - lq)[..., 0]], 1))
    return torch.stack(outs), torch.stack(lses)


def column(sink: Tensor, rows: int) -> Tensor:
    return sink[:, None, None].expand(-1, rows, 1)


# --- Running both ---------------------------------------------------------------------------------


def problem(**tensors: Tensor) -> dict[str, Tensor]:
    return {**dict(zip("qkv", qkv(**SIZES), strict=True)), **tensors}


def check(
    tensors: dict[str, Tensor], keep: Tensor | None = None, **numbers: Any
) -> dict[str, Tensor]:
    """out, lse and every gradient, of a loss over both, on poisoned memory. Gives all of them."""
    ours, exact = leaves(tensors), leaves(tensors, torch.float64)
    expected = oracle(exact, keep=keep, **numbers)
    weights = [torch.randn(result.shape) for result in expected]
    names = [name for name, tensor in ours.items() if tensor.requires_grad]
    with poisoned():
        results = attend(ours, **numbers)
        grads = torch.autograd.grad(results, [ours[name] for name in names], weights)
    double = [weight.double() for weight in weights]
    expected_grads = torch.autograd.grad(
        expected, [exact[n] for n in names], double, materialize_grads=True
    )
    assert results[0].isfinite().all()
    assert relative_error(results[0].detach(), expected[0].detach()) <= FORWARD_ERROR
    torch.testing.assert_close(results[1].double(), expected[1], rtol=2e-6, atol=2e-6)
    for name, grad, expected_grad in zip(names, grads, expected_grads, strict=True):
        assert grad.shape == tensors[name].shape, name
        assert grad.isfinite().all(), name
        assert relative_error(grad, expected_grad) <= BACKWARD_ERROR, name
    return {"out": results[0], "lse": results[1], **dict(zip(names, grads, strict=True))}


# --- Bias -----------------------------------------------------------------------------------------

BIAS_SHAPES = list(itertools.product(*((1, full) for full in SCORES)))


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_of_each_broadcast_shape(shape: tuple[int, ...]) -> None:
    """Its gradient is summed to its own shape; four heads' biases on two key heads (MK-05)."""
    check(problem(bias=torch.randn(shape)), causal="bottom_right")


def masked_rows(*shape: int) -> Tensor:
    """A random mask of zeros and -inf whose third row masks every key."""
    mask = torch.zeros(shape).masked_fill(torch.rand(shape) < 0.4, -INF)
    mask[..., 0, 0] = mask[..., 1, 1] = 0.0
    mask[..., 2, :] = -INF
    return mask


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (2, 1, 5, 7), (1, 1, 5, 7)], ids=str)
def test_rows_masked_by_the_bias(shape: tuple[int, ...]) -> None:
    """0, lse -inf and no gradient at all there, finite ones elsewhere (MK-01)."""
    bias = masked_rows(*shape)
    found = check(problem(bias=bias))
    for name in ("out", "q"):
        assert found[name][:, :, 2].eq(0).all()
        assert found[name][:, :, 0].ne(0).any()
    assert found["lse"][:, :, 2].isneginf().all()
    assert found["bias"][bias.isneginf()].eq(0).all()


def test_every_row_masked() -> None:
    found = check(problem(bias=torch.full((1, 1, 1, 7), -INF)))
    assert all(found[name].eq(0).all() for name in ("out", "q", "k", "v", "bias"))


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_masked_by_the_smallest_number(dtype: torch.dtype, with_sink: bool) -> None:
    """As in Hugging Face's masks: -3.4e38 swallows the scores, and all keys weigh the same."""
    bias = torch.zeros(2, 1, 5, 7)
    bias[:, :, 1] = torch.finfo(dtype).min
    bias[:, :, 3, 4:] = torch.finfo(dtype).min
    tensors = problem(bias=bias, **({"sink": torch.randn(4)} if with_sink else {}))
    found = check(tensors)
    mean = tensors["v"].repeat_interleave(2, 1).mean(2)
    expected = torch.zeros_like(mean) if with_sink else mean
    torch.testing.assert_close(found["out"][:, :, 1], expected)


MASKS = {
    "expanded heads": lambda: torch.randn(2, 1, 5, 7).expand(-1, 4, -1, -1),
    "expanded batch and rows": lambda: torch.randn(1, 4, 1, 7).expand(2, -1, 5, -1),
    "expanded keys": lambda: torch.randn(2, 4, 5, 1).expand(-1, -1, -1, 7),
    "one number": lambda: torch.randn(()).expand(SCORES),
    "transposed": lambda: torch.randn(2, 4, 7, 5).mT,
    "rows cut out of a longer mask": lambda: torch.randn(2, 4, 9, 16)[:, :, 2:7, 3:10],
    "bfloat16": lambda: torch.randn(2, 4, 5, 7, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", MASKS)
def test_bias_of_each_layout(name: str) -> None:
    """Strides of 0 and of any order; the gradient is one of the bias that the op was given."""
    bias = MASKS[name]()
    tensors = problem(bias=bias)
    if bias.dtype == torch.float32:
        check(tensors)
        return
    ours = leaves(tensors)
    precise = leaves({**tensors, "bias": bias.float()})
    grad, expected = (
        torch.autograd.grad(attend(each)[0].square().sum(), each["bias"])[0]
        for each in (ours, precise)
    )
    assert grad.dtype == bias.dtype
    torch.testing.assert_close(grad, expected.to(bias.dtype))


# --- Sink, softcap and windows --------------------------------------------------------------------


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_sink(causal: str) -> None:
    """A logit without a value: in the lse, in the gradient, and all there is in a masked row."""
    found = check(problem(sink=torch.randn(4), bias=masked_rows(2, 4, 5, 7)), causal=causal)
    assert found["out"][:, :, 2].eq(0).all()


def test_a_sink_of_minus_infinity_is_none() -> None:
    """In some heads, and in rows without a key too: nothing is NaN."""
    sink = torch.tensor([0.5, -INF, -INF, -1.0])
    found = check(problem(sink=sink, bias=masked_rows(2, 4, 5, 7)))
    assert found["sink"][1:3].eq(0).all()


@pytest.mark.parametrize("softcap", [0.5, 3.0])
def test_softcap(softcap: float) -> None:
    """Caps the scaled scores, before the bias is added."""
    check(problem(bias=3 * torch.randn(SCORES)), softcap=softcap, scale=1.0)


@pytest.mark.parametrize("window", [(0, None), (2, None), (None, 1), (1, 2), (0, 0), (-1, 3)])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(5, 5), (4, 7), (7, 4)], ids=str)
def test_windows(
    lengths: tuple[int, int], causal: str, window: tuple[int | None, int | None]
) -> None:
    """Both sides and alignments, with more and with fewer queries than keys (MK-06)."""
    tensors = dict(zip("qkv", qkv(**{**SIZES, "sq": lengths[0], "sk": lengths[1]}), strict=True))
    check(tensors, causal=causal, window_left=window[0], window_right=window[1])


# --- Sequence lengths -----------------------------------------------------------------------------


LENGTHS = {
    "of keys": {"seqlens_k": lengths(7, 3)},
    "of queries": {"seqlens_q": lengths(2, 5)},
    "of both": {"seqlens_q": lengths(5, 3), "seqlens_k": lengths(2, 6)},
    "no keys": {"seqlens_k": lengths(0, 4)},
    "no queries": {"seqlens_q": lengths(4, 0), "seqlens_k": lengths(7, 7)},
    "every second": {"seqlens_q": lengths(5, 0, 3)[::2], "seqlens_k": lengths(6).expand(2)},
}


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("name", LENGTHS)
def test_sequence_lengths(name: str, causal: str, with_sink: bool) -> None:
    """Rows past them are 0; bottom-right is each sequence's own corner (VL-01)."""
    given = LENGTHS[name]
    sink = {"sink": torch.randn(4)} if with_sink else {}
    found = check(problem(**given, **sink), causal=causal, window_left=3)
    for i, length in enumerate(given.get("seqlens_q", lengths(5, 5))):
        assert all(found[each][i, :, length:].eq(0).all() for each in ("out", "q"))
    for i, length in enumerate(given.get("seqlens_k", lengths(7, 7))):
        assert all(found[each][i, :, length:].eq(0).all() for each in ("k", "v"))


def test_what_lies_past_the_lengths_is_not_read() -> None:
    tensors = problem(seqlens_q=lengths(5, 3), seqlens_k=lengths(2, 6))
    expected = attend(tensors, causal="bottom_right")
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["q"][1, :, 3:] = changed["k"][0, :, 2:] = changed["v"][0, :, 2:] = 1e30
    torch.testing.assert_close(attend(changed, causal="bottom_right"), expected, rtol=0, atol=0)


# --- Dropout --------------------------------------------------------------------------------------


def kept(p: float, seed: Tensor, sizes: dict[str, int] = SIZES) -> Tensor:
    """Which weights the op keeps: with the identity for values, out is the weights."""
    q, k, _ = qkv(**{**sizes, "dv": 1})
    v = torch.eye(sizes["sk"]).expand(sizes["b"], sizes["hkv"], -1, -1)
    return attend({"q": q, "k": k, "v": v, "rng": seed}, dropout_p=p)[0] != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_rate_and_mean(p: float) -> None:
    """A share p is dropped, and the mean over seeds is the attention without dropout."""
    sizes = {**SIZES, "sq": 64, "sk": 64}
    count = 2 * 4 * 64 * 64
    share = kept(p, rng(0), sizes).float().mean().item()
    assert abs(share - (1 - p)) < 5 * (p * (1 - p) / count) ** 0.5
    tensors = problem()
    seeds = 400
    mean = sum(attend({**tensors, "rng": rng(s)}, dropout_p=p)[0] for s in range(seeds)) / seeds
    error = (mean - attend(tensors)[0]).abs().max().item()
    assert error < 5 * (p / (1 - p) / seeds) ** 0.5 * tensors["v"].abs().max().item()


def test_the_seed_and_the_offset_make_the_mask() -> None:
    masks = [kept(0.5, rng(*each)) for each in ((1, 0), (1, 0), (2, 0), (1, 4))]
    assert masks[0].equal(masks[1])
    assert not masks[0].equal(masks[2])
    assert not masks[0].equal(masks[3])
    assert not masks[0][0].equal(masks[0][1])
    assert not masks[0][0, 0].equal(masks[0][0, 1])


@pytest.mark.parametrize("rows", [2, 100])
def test_forward_and_backward_drop_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", rows * 2 * 4 * 7)
    seed, sink = rng(3, 8), torch.randn(4)
    keep = kept(0.4, seed)
    assert not keep[:, :, :2].equal(keep[:, :, 2:4])
    check(problem(rng=seed, sink=sink, bias=torch.randn(SCORES)), keep=keep, dropout_p=0.4)


def test_dropping_everything_and_nothing() -> None:
    tensors = leaves(problem(rng=rng(1)))
    with poisoned():
        out, lse = attend(tensors, dropout_p=1.0)
        grads = torch.autograd.grad(out.sum(), [tensors[name] for name in "qkv"])
    assert all(tensor.eq(0).all() for tensor in (out, *grads))
    del tensors["rng"]
    plain, plain_lse = attend(tensors, dropout_p=0.0)
    assert plain.ne(0).all()
    torch.testing.assert_close(lse, plain_lse)  # dropout is not in the lse
    with pytest.raises(ShapeError, match="needs rng"):
        attend(tensors, dropout_p=0.5)


# --- All together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("shape", [(1, 4, 5, 7), (2, 1, 1, 7), (1, 1, 5, 1)], ids=str)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_everything_at_once(
    causal: str, shape: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block of rows and in several, the last of them shorter."""
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", rows * 2 * 4 * 7)
    seed = rng(7)
    tensors = problem(
        bias=torch.randn(shape),
        sink=torch.randn(4),
        seqlens_q=lengths(5, 3),
        seqlens_k=lengths(4, 7),
        rng=seed,
    )
    numbers = {"window_left": 3, "window_right": 1, "softcap": 2.0, "dropout_p": 0.3, "scale": 0.7}
    check(tensors, keep=kept(0.3, seed), causal=causal, **numbers)
