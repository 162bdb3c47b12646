"""FA4's launch repeated without its entry: the same numbers, and never for other metadata."""

from __future__ import annotations

import threading

import pytest
import torch

from fa_inductor import call_cache, op_calls, ops
from helpers import oracle, relative_error
from poison import poison_cuda_free_memory

TOLERANCE = 8e-3  # bf16: scores, weights and output are each rounded to 8 bits


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_calls, "calls", call_cache.Calls())


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: str = "none"
) -> torch.Tensor:
    poison_cuda_free_memory(0.1)
    return ops.attention(q, k, v, None, causal, "BSHD", False, "fa4")[0]


def test_a_repeated_launch_is_bitwise_the_entry() -> None:
    q, k, v = (_randn(2, 4, 300, 64) for _ in range(3))
    first = _attend(q, k, v)
    assert op_calls.calls.repeated == 0
    for _ in range(3):
        again = _attend(q, k, v)
        assert torch.equal(again, first)
    assert op_calls.calls.repeated == 3
    for tensor in (q, k, v):
        tensor.normal_()
    out = _attend(q, k, v)
    assert relative_error(out, oracle(q, k, v)) < TOLERANCE


def test_inputs_that_require_gradients() -> None:
    q, k, v = (_randn(2, 4, 300, 64).requires_grad_() for _ in range(3))
    first, second = _attend(q, k, v), _attend(q, k, v)
    assert op_calls.calls.repeated == 1
    assert torch.equal(first, second)
    grads = torch.autograd.grad(second.square().sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_repeated_backward(heads: tuple[int, int], causal: str, deterministic: bool) -> None:
    """Against float64 on fresh data each time, and bit by bit where FA4 promises it."""
    for _ in range(3):
        q = _randn(2, heads[0], 300, 64)
        k, v = (_randn(2, heads[1], 300, 64) for _ in range(2))
        precise = [t.double().requires_grad_() for t in (q, k, v)]
        out, lse = ops.attention_forward(q, k, v, None, causal, "BSHD", deterministic, "fa4")
        grad_out = torch.randn_like(out)
        saved = (grad_out, None, q, k, v, out, lse, None, causal, deterministic, "fa4")
        poison_cuda_free_memory(0.1)
        grads = ops.attention_gradients(*saved)
        wanted = torch.autograd.grad(oracle(*precise, causal=causal), precise, grad_out.double())
        for ours, theirs in zip(grads, wanted, strict=True):
            assert torch.isfinite(ours).all()
            assert relative_error(ours, theirs) < 2 * TOLERANCE
        again = ops.attention_gradients(*saved)
        assert not deterministic or all(
            torch.equal(a, b) for a, b in zip(grads, again, strict=True)
        )
    # Forward and backward of the first round, and the backward that follows it, were noted.
    assert op_calls.calls.repeated == 2 + 5


def test_grad_out_of_other_layouts_takes_the_entry() -> None:
    """ST-08, from the launch cache's side: contiguous, transposed, strided, expanded, twice."""
    q, k, v = (_randn(2, 4, 200, 64).requires_grad_() for _ in range(3))
    out, _ = ops.attention(q, k, v, None, "none", "BSHD", True, "fa4")
    base = _randn(2, 4, 200, 64)
    layouts = [
        base,
        base.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([base, base], -1).flatten(-2)[..., ::2],
        torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 4, 200, 64),
    ]
    for grad_out in layouts * 2:
        actual = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
        copied = grad_out.contiguous()
        expected = torch.autograd.grad(out, (q, k, v), copied, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_lse_gradients_alternate_with_none() -> None:
    q, k, v = (_randn(2, 4, 200, 64).requires_grad_() for _ in range(3))
    results = []
    for with_lse in (True, False, True, False):
        out, lse = ops.attention(q, k, v, None, "none", "BSHD", True, "fa4")
        loss = out.float().square().sum() + (lse.square().sum() if with_lse else 0)
        results.append(torch.autograd.grad(loss, (q, k, v)))
    for first, again in ((0, 2), (1, 3)):
        assert all(map(torch.equal, results[first], results[again]))
    assert not torch.equal(results[0][0], results[1][0])


def test_other_metadata_takes_the_entry() -> None:
    """Layout, dtype, flags and sizes one after another, each right and none taken for another."""
    shape = (2, 4, 256, 64)
    bshd = [_randn(2, 256, 4, 64).transpose(1, 2) for _ in range(3)]
    bhsd = [_randn(*shape) for _ in range(3)]
    half = [tensor.half() for tensor in bhsd]
    packed = _randn(2, 256, 3, 4, 64)
    views = [packed[:, :, index].transpose(1, 2) for index in range(3)]
    longer = [_randn(2, 4, 257, 64) for _ in range(3)]
    for _ in range(2):
        for inputs in (bshd, bhsd, half, views, longer):
            for causal in ("none", "bottom_right"):
                out = _attend(*inputs, causal)
                assert relative_error(out, oracle(*inputs, causal=causal)) < TOLERANCE
    assert op_calls.calls.repeated == 10


def test_a_pointer_that_is_not_aligned_takes_the_entry() -> None:
    """ST-13: the same shapes and strides, aligned, then not, then aligned again."""
    shape = (2, 4, 256, 64)
    k, v = _randn(*shape), _randn(*shape)
    buffer = _randn(2 * 4 * 256 * 64 + 8)
    for offset in (0, 8, 1, 3, 0):
        q = buffer[offset:][: 2 * 4 * 256 * 64].view(shape)
        out = _attend(q, k, v)
        assert relative_error(out, oracle(q, k, v)) < TOLERANCE
    # Two that are aligned, and one copy of the other two: it is a class of its own.
    assert op_calls.calls.repeated == 3


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
def test_inference_on_bshd_tensors(kernel: str) -> None:
    """The op for graphs without gradients repeats too, and never for another layout."""
    bshd = [_randn(2, 300, 4, 64) for _ in range(3)]
    bhsd = [_randn(2, 4, 300, 64).transpose(1, 2) for _ in range(3)]
    for _ in range(3):
        for inputs in (bshd, bhsd):
            for tensor in inputs:
                tensor.normal_()
            poison_cuda_free_memory(0.1)
            out = ops.attention_inference(*inputs, None, "top_left", "BSHD", kernel)
            assert out.is_contiguous()
            q, k, v = (tensor.transpose(1, 2) for tensor in inputs)
            wanted = oracle(q, k, v, causal="top_left").transpose(1, 2)
            assert relative_error(out, wanted) < TOLERANCE
    assert op_calls.calls.repeated == 4


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
def test_inference_where_a_stride_of_a_single_head_is_odd(kernel: str) -> None:
    """FA4 would copy for such a stride; it is made another one, on repeated calls too."""
    strides = (300 * 64, 64, 3331333, 1)
    for _ in range(3):
        q, k, v = (_randn(2, 300, 1, 64).as_strided((2, 300, 1, 64), strides) for _ in range(3))
        out = ops.attention_inference(q, k, v, None, "none", "BSHD", kernel)
        wanted = oracle(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)
        assert relative_error(out, wanted) < TOLERANCE
    assert op_calls.calls.repeated == 2


def test_threads_on_streams_of_their_own() -> None:
    inputs = [[_randn(2, 4, 128 * n, 64) for _ in range(3)] for n in (1, 2, 3, 4)]
    expected = [oracle(*each) for each in inputs]
    failures: list[float] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(20):
                arguments = (None, "none", "BSHD", False, "fa4")
                out, _ = ops.attention(*inputs[index], *arguments)
            error = relative_error(out, expected[index])
            if not error < TOLERANCE:
                failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_capture_into_a_cuda_graph_with_inputs_changed_between_replays() -> None:
    q, k, v = (_randn(2, 4, 256, 64) for _ in range(3))
    with torch.no_grad():
        for _ in range(2):
            _attend(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = ops.attention(q, k, v, None, "none", "BSHD", False, "fa4")
        for _ in range(3):
            for tensor in (q, k, v):
                tensor.normal_()
            graph.replay()
            assert relative_error(out, oracle(q, k, v)) < TOLERANCE
