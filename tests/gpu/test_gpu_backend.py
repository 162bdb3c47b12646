"""The backend on a GPU: what is pinned, falls back, casts or recompiles, with right numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_inductor.errors import FaInductorError
from helpers import kernels_of, oracle, relative_error, run_reported
from poison import poison_cuda_free_memory

BF16_TOLERANCE = 8e-3  # scores, weights and output are each rounded to 8 bits (2^-9 = 2e-3)


def _randn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def _compile(fn: Any, *, dynamic: bool | None = None, **options: Any) -> Any:
    options = {"fa.on_fallback": "ignore", "fa.kernels": ("fa4",), **options}
    return torch.compile(
        fn, backend="fa_inductor", fullgraph=True, dynamic=dynamic, options=options
    )


@pytest.mark.parametrize(
    "pinned", ["MATH", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION"]
)
def test_pinned_inside(pinned: str) -> None:
    """GB-01: what the user pins stays; FLASH_ATTENTION may be FA4, as in core's own registry."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([getattr(SDPBackend, pinned)]):
            return F.scaled_dot_product_attention(q, k, v)

    q, k, v = (_randn(2, 4, 128, 64) for _ in range(3))
    compiled = _compile(f, **{"fa.kernels": ("cudnn", "fa4")})
    out, report = run_reported(compiled, q, k, v)
    allowed = {"FLASH_ATTENTION": "fa4", "CUDNN_ATTENTION": "cudnn"}
    assert kernels_of(report) == [allowed.get(pinned)]
    assert len(report.graphs) == 1
    assert relative_error(out, oracle(q, k, v)) < BF16_TOLERANCE
    if pinned not in allowed:
        assert f"sdpa_kernel({pinned})" in report.sites[0].reason_texts[0]


@pytest.mark.parametrize("pinned", ["MATH", "CUDNN_ATTENTION"])
def test_pinned_outside_after_the_first_compile(pinned: str) -> None:
    compiled = _compile(F.scaled_dot_product_attention)
    q, k, v = (_randn(2, 4, 128, 64) for _ in range(3))
    _, first = run_reported(compiled, q, k, v)
    with sdpa_kernel([getattr(SDPBackend, pinned)]):
        out, second = run_reported(compiled, q, k, v)
    _, third = run_reported(compiled, q, k, v)
    assert (kernels_of(first), kernels_of(second), kernels_of(third)) == (["fa4"], [None], [])
    assert relative_error(out, oracle(q, k, v)) < BF16_TOLERANCE


def test_float32_falls_back_by_name_under_a_pinned_list() -> None:
    """GB-02."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(backends=backends, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)

    q = _randn(4, 1, 10, 64, dtype=torch.float32)
    k, v = (_randn(4, 1, 6, 64, dtype=torch.float32) for _ in range(2))
    mask = _randn(4, 1, 10, 6, dtype=torch.float32)
    out, report = run_reported(_compile(f), q, k, v, mask)
    assert kernels_of(report) == [None]
    assert any("dtype float32" in text for text in report.sites[0].reason_texts)
    torch.testing.assert_close(out, f(q, k, v, mask))


@pytest.mark.parametrize("causal", [False, True])
def test_lengths_of_one_dynamic_graph(causal: bool) -> None:
    """GB-04, DY-02: symbolic lengths never reach the kernel, and cost no further graph."""
    compiled = _compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    graphs = []
    for length in (4096, 3000, 64, 65, 127, 128, 129, 1000, 2, 1):
        q, k, v = (_randn(1, 4, length, 128) for _ in range(3))
        if length > 1 and length != 4096:
            for tensor in (q, k, v):
                torch._dynamo.maybe_mark_dynamic(tensor, 2)
        poison_cuda_free_memory(0.2)
        out, report = run_reported(compiled, q, k, v)
        graphs.append(len(report.graphs))
        assert kernels_of(report) in ([], ["fa4"])
        wanted = oracle(q, k, v, causal="top_left" if causal else "none")
        assert relative_error(out, wanted) < BF16_TOLERANCE
    assert graphs == [1, 1, 0, 0, 0, 0, 0, 0, 0, 1]


def test_default_scale_under_dynamic_shapes() -> None:
    """DY-01."""
    compiled = _compile(F.scaled_dot_product_attention, dynamic=True)
    for shape in ((2, 12, 2980, 128), (8, 20, 900, 64)):
        q, k, v = (_randn(*shape) for _ in range(3))
        out = compiled(q, k, v)
        assert relative_error(out, oracle(q, k, v)) < BF16_TOLERANCE


def test_is_causal_from_a_length() -> None:
    """GB-05."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        is_causal = True if q.shape[2] > 1 else False  # noqa: SIM210  (a plain bool in the graph)
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    compiled = _compile(f)
    graphs = 0
    for length in (200, 100, 1, 77):
        q, k, v = (_randn(1, 8, length, 64) for _ in range(3))
        out, report = run_reported(compiled, q, k, v)
        graphs += len(report.graphs)
        assert length != 77 or not report.graphs
        assert relative_error(out, oracle(q, k, v, causal="top_left")) < BF16_TOLERANCE
    assert graphs <= 3


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
@pytest.mark.parametrize("lengths", [(2, 5), (5, 2), (1, 7), (128, 200)], ids=str)
def test_causal_with_unequal_lengths_stays_top_left(lengths: tuple[int, int], kernel: str) -> None:
    """MK-03: FA4 would align bottom-right, so the site is left to core, by name; cuDNN runs it."""
    q, k, v = (_randn(1, 1, n, 64, grad=True) for n in (lengths[0], lengths[1], lengths[1]))
    compiled = _compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        **{"fa.kernels": (kernel,)},
    )
    out, report = run_reported(compiled, q, k, v)
    if kernel == "fa4":
        assert kernels_of(report) == [None]
        assert f"Sq {lengths[0]} and Sk {lengths[1]}" in report.sites[0].reason_texts[0]
    else:
        assert kernels_of(report) == ["cudnn"]
    precise = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = oracle(*precise, causal="top_left")
    assert relative_error(out, wanted) < BF16_TOLERANCE
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    for ours, theirs in zip(
        grads, torch.autograd.grad(wanted.square().sum(), precise), strict=True
    ):
        assert (ours.double() - theirs).norm() < 2e-2 * (1 + theirs.norm())


def test_mask_and_is_causal_together_do_what_eager_does() -> None:
    """MK-07: an error where eager raises one, else eager's result; never one mask dropped."""
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device="cuda").triu()

    def f(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True)

    q = _randn(1, 2, 8, 64)
    try:
        expected = f(q)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="is_causal"):
            _compile(f)(q)
        return
    out, report = run_reported(_compile(f), q)
    assert kernels_of(report) == [None]
    torch.testing.assert_close(out, expected)


def test_shared_and_broadcast_key_heads() -> None:
    """GQ-02."""
    q = _randn(2, 8, 64, 64, grad=True)
    for shape in ((2, 1, 64, 64), (1, 8, 64, 64), (1, 1, 64, 64)):
        k, v = _randn(*shape, grad=True), _randn(*shape, grad=True)
        out, report = run_reported(_compile(F.scaled_dot_product_attention), q, k, v)
        assert kernels_of(report) == ["fa4"]
        precise = [t.detach().double().requires_grad_() for t in (q, k, v)]
        q64, k64, v64 = precise
        wanted = oracle(q64, k64.expand(2, 8, -1, -1), v64.expand(2, 8, -1, -1))
        assert relative_error(out, wanted) < BF16_TOLERANCE
        grad_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v), grad_out)
        expected = torch.autograd.grad(wanted, precise, grad_out.double())
        for ours, theirs in zip(grads, expected, strict=True):
            assert ours.shape == theirs.shape
            assert relative_error(ours, theirs) < 2 * BF16_TOLERANCE


def test_mixed_dtypes_under_autocast() -> None:
    """DT-01: q and k in float32 from a rotary embedding, v in bf16."""

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k = ((x @ w).float() * c for c in (0.5, 0.7))
        return F.scaled_dot_product_attention(q, k, x @ w)

    x, w = _randn(2, 4, 128, 64, dtype=torch.float32), _randn(64, 64, dtype=torch.float32) / 8
    with torch.autocast("cuda", torch.bfloat16):
        out, report = run_reported(_compile(f), x, w)
        eager = f(x, w)
    assert kernels_of(report) == ["fa4"]
    assert out.dtype == eager.dtype == torch.bfloat16
    assert relative_error(out, eager) < 2 * BF16_TOLERANCE
    with pytest.raises(Exception, match="dtype"):
        _compile(lambda q, v: F.scaled_dot_product_attention(q, q, v))(x, x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_wide_dtypes_keep_their_precision(dtype: torch.dtype) -> None:
    """DT-03."""
    q, k, v = (_randn(2, 4, 64, 64, dtype=dtype, grad=True) for _ in range(3))
    out, report = run_reported(
        _compile(lambda *t: F.scaled_dot_product_attention(*t, is_causal=True)), q, k, v
    )
    assert kernels_of(report) == [None]
    assert any("dtype float" in text for text in report.sites[0].reason_texts)
    assert out.dtype == dtype
    precise = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = oracle(*precise, causal="top_left")
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert relative_error(out, wanted) < tolerance
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for ours, theirs in zip(grads, torch.autograd.grad(wanted.sum(), precise), strict=True):
        assert relative_error(ours, theirs) < tolerance


def test_second_derivative_is_refused() -> None:
    """EX-03."""
    q = _randn(1, 2, 64, 64, grad=True)
    out = _compile(lambda q: F.scaled_dot_product_attention(q, q, q))(q)
    refusal = r"double backward|second derivative"
    with pytest.raises((RuntimeError, FaInductorError), match=refusal):
        torch.autograd.grad(out.sum(), q, create_graph=True)[0].pow(2).sum().backward()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_with_inputs_changed_between_calls(mode: str) -> None:
    q, k, v = (_randn(2, 4, 512, 64) for _ in range(3))
    compiled = torch.compile(
        lambda *t: F.scaled_dot_product_attention(*t) * 2,
        backend="fa_inductor",
        fullgraph=True,
        mode=mode,
    )
    with torch.no_grad():
        for _ in range(4):
            for tensor in (q, k, v):
                tensor.normal_()
            out = compiled(q, k, v)
            assert relative_error(out, 2 * oracle(q, k, v)) < BF16_TOLERANCE


def test_the_callers_stream() -> None:
    """CG-02 (b): producer, attention and consumer on one side stream, without a sync between."""
    compiled = _compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    q, k, v = (_randn(2, 4, 2048, 64) for _ in range(3))
    compiled(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        big = torch.randn(8192, 8192, device="cuda")
        for _ in range(4):
            big = big @ big * 1e-4
        late = v + big[0, 0] * 0 + 1
        out = compiled(q, k, late) * 3
    stream.synchronize()
    assert relative_error(out, 3 * oracle(q, k, late)) < BF16_TOLERANCE
