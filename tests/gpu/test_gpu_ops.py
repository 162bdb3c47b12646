"""The op on FA4: layouts, head dims, groups, lengths; against float64, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa_inductor import ops
from helpers import oracle, relative_error
from poison import poison_cuda_free_memory, poisoned

# bf16 keeps 8 bits: one rounding is 2^-9 = 2e-3 relative; scores, weights and output are rounded.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
ORDERS = list(itertools.permutations((0, 1, 2)))


def _leaf(shape: tuple[int, ...], order: tuple[int, ...] = (0, 2, 1), dtype=torch.bfloat16):
    tensor = torch.empty_permuted(shape, (*order, 3), device="cuda", dtype=dtype)
    return tensor.normal_().requires_grad_()


def _check(q, k, v, causal: str = "none", scale: float | None = None, grad: bool = True) -> None:
    """Op on fa4 against the float64 oracle; out, lse and gradients have no NaN left."""
    arguments = (scale, causal, "BSHD", False, "fa4")
    poison_cuda_free_memory(0.3)
    out, lse = ops.attention(q, k, v, *arguments)
    tolerance = TOLERANCE[q.dtype]
    precise = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = oracle(*precise, causal=causal, scale=scale)
    assert torch.isfinite(out).all()
    assert not torch.isnan(lse).any()
    assert relative_error(out, expected) < tolerance
    if not grad:
        return
    grad_out = torch.randn_like(out)
    actual = torch.autograd.grad(out, (q, k, v), grad_out)
    wanted = torch.autograd.grad(expected, precise, grad_out.double())
    scale_of_gradients = wanted[2].norm()  # with a single key dq and dk are exactly zero
    for name, ours, theirs in zip("qkv", actual, wanted, strict=True):
        assert torch.isfinite(ours).all(), name
        error = (ours.double() - theirs).norm() / torch.maximum(theirs.norm(), scale_of_gradients)
        assert error < 2 * tolerance, name


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("dim", [24, 32, 64, 96, 120, 128, 136, 160, 192, 224, 248, 256])
def test_head_dim(dim: int, causal: str) -> None:
    q, k, v = (_leaf((2, 4, 300, dim)) for _ in range(3))
    _check(q, k, v, causal)


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("dim", [8, 16, 40, 48, 72, 80, 104, 112])
def test_head_dim_forward_only(dim: int, causal: str) -> None:
    """FA4's dQ is wrong at these (flash-attention#2896), so the support table has no backward."""
    q, k, v = (_leaf((2, 4, 300, dim)) for _ in range(3))
    _check(q, k, v, causal, grad=False)


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("dims", [(192, 128), (128, 64), (256, 128), (96, 64)])
def test_unequal_head_dims(dims: tuple[int, int], causal: str) -> None:
    q, k = (_leaf((2, 4, 300, dims[0])) for _ in range(2))
    _check(q, k, _leaf((2, 4, 300, dims[1])), causal)


@pytest.mark.parametrize("dims", [(16, 8), (8, 16), (64, 128), (128, 96)])
def test_unequal_head_dims_forward_only(dims: tuple[int, int]) -> None:
    q, k = (_leaf((2, 4, 300, dims[0])) for _ in range(2))
    _check(q, k, _leaf((2, 4, 300, dims[1])), grad=False)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_dimension_order(order: tuple[int, ...]) -> None:
    q, k, v = (_leaf((2, 4, 130, 64), order) for _ in range(3))
    _check(q, k, v, "top_left")


@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_grouped_queries(heads: tuple[int, int], causal: str) -> None:
    q = _leaf((2, heads[0], 200, 128))
    k, v = (_leaf((2, heads[1], 200, 128)) for _ in range(2))
    _check(q, k, v, causal)


@pytest.mark.parametrize(
    "lengths", [(1, 1), (1, 300), (5, 2), (128, 200), (129, 65), (300, 1000)], ids=str
)
def test_bottom_right_with_unequal_lengths(lengths: tuple[int, int]) -> None:
    q = _leaf((2, 4, lengths[0], 64))
    k, v = (_leaf((2, 4, lengths[1], 64)) for _ in range(2))
    _check(q, k, v, "bottom_right")
    _check(q, k, v, "none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_scale(dtype: torch.dtype, scale: float) -> None:
    q, k, v = (_leaf((2, 4, 256, 64), dtype=dtype) for _ in range(3))
    _check(q, k, v, scale=scale)


def test_fp16_with_large_logits() -> None:
    """DT-03: unscaled q·k of about 1e5 overflows fp16; softmax is taken in float32."""
    q, k, v = (_leaf((1, 2, 256, 64), dtype=torch.float16) for _ in range(3))
    with torch.no_grad():
        q *= 40
        k *= 40
    _check(q, k, v, scale=1e-3, grad=False)


def test_packed_views_and_oddly_strided_inputs() -> None:
    packed = torch.randn(2, 200, 3, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    q, k, v = (packed[:, :, index].transpose(1, 2) for index in range(3))
    _check(*(t.detach().requires_grad_() for t in (q, k, v)), causal="top_left")
    wide = torch.randn(2, 4, 200, 65, device="cuda", dtype=torch.bfloat16)
    offset = torch.randn(2 * 4 * 200 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    shifted = offset[1:].view(2, 4, 200, 64)
    innermost = torch.randn(2, 4, 64, 200, device="cuda", dtype=torch.bfloat16).mT
    expanded = torch.randn(1, 1, 200, 64, device="cuda", dtype=torch.bfloat16).expand(2, 4, -1, -1)
    views = [wide[..., :64], shifted, innermost, expanded]
    for each in views:
        other = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)
        for triple in ((each, other, other), (other, each, other), (other, other, each)):
            _check(*(t.detach().requires_grad_() for t in triple))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "zero strides"])
def test_grad_out_of_any_layout(layout: str) -> None:
    """ST-08: the same gradients whatever the layout of grad_out."""
    q, k, v = (_leaf((2, 4, 200, 64)) for _ in range(3))
    out, _ = ops.attention(q, k, v, None, "none", "BSHD", True, "fa4")
    base = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)
    grad_out = {
        "contiguous": base,
        "transposed": base.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": torch.stack([base, base], -1).flatten(-2)[..., ::2],
        "zero strides": torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 4, 200, 64),
    }[layout]
    actual = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
    expected = torch.autograd.grad(out, (q, k, v), grad_out.contiguous())
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def _opcheck_inputs() -> dict[str, tuple[torch.Tensor, ...]]:
    cases: dict[str, tuple[torch.Tensor, ...]] = {}
    for order in ORDERS:
        cases[f"order {order}"] = tuple(_leaf((2, 4, 96, 64), order) for _ in range(3))
    for dim, shape in enumerate([(1, 4, 96, 64), (2, 1, 96, 64), (2, 4, 1, 64)]):
        cases[f"size 1 in dimension {dim}"] = tuple(_leaf(shape) for _ in range(3))
    packed = torch.randn(2, 96, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    cases["packed"] = tuple(
        packed[:, :, i].transpose(1, 2).detach().requires_grad_() for i in range(3)
    )
    cases["GQA"] = (_leaf((2, 8, 96, 64)), _leaf((2, 2, 96, 64)), _leaf((2, 2, 96, 64)))
    return cases


@pytest.mark.parametrize(
    "name",
    [
        *(f"order {o}" for o in ORDERS),
        *(f"size 1 in dimension {d}" for d in range(3)),
        "packed",
        "GQA",
    ],
)
def test_opcheck(name: str) -> None:
    q, k, v = _opcheck_inputs()[name]
    arguments = (None, "bottom_right", "BSHD", True, "fa4")
    torch.library.opcheck(ops.attention, (q, k, v, *arguments), atol=2e-2, rtol=2e-2)
    q, k, v = (t.detach() for t in (q, k, v))
    out, lse = ops.attention(q, k, v, *arguments)
    backward = (torch.randn_like(out), None, q, k, v, out, lse, None, "bottom_right", True, "fa4")
    torch.library.opcheck(ops.attention_backward, backward)


def test_every_element_is_written_with_poisoned_allocations() -> None:
    """The op's own allocations are NaN before the kernel runs."""
    with poisoned():
        q, k, v = (_leaf((2, 4, 333, 128)) for _ in range(3))
        _check(q, k, v, "bottom_right")


def test_empty_inputs() -> None:
    for shape_q, shape_k in [
        ((0, 4, 16, 64), (0, 4, 16, 64)),
        ((2, 4, 0, 64), (2, 4, 16, 64)),
        ((2, 4, 16, 64), (2, 4, 0, 64)),
    ]:
        q, k, v = _leaf(shape_q), _leaf(shape_k), _leaf(shape_k)
        out, lse = ops.attention(q, k, v, None, "none", "BSHD", False, "fa4")
        assert out.shape == shape_q
        assert (out == 0).all()
        assert torch.isneginf(lse).all()
        for grad, leaf in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
            assert grad.shape == leaf.shape
            assert (grad == 0).all()
