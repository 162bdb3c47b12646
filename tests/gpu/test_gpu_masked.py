"""Masks as text on FA4: forward, gradients and repeated launches, in memory that is full of NaN."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from masked_cases import CASES, Case
from torch import Tensor

from fa_inductor import call_cache, masked_ops, op_calls
from helpers import kernels_of, relative_error, run_reported
from poison import poison_cuda_free_memory

# bf16 rounds to 2^-9; scores, weights, output and their gradients are each rounded once.
TOLERANCE = {torch.bfloat16: (1.5e-2, 4e-2), torch.float16: (3e-3, 8e-3)}
TIMES = 3  # the first call goes the long way, the others repeat its launches


@pytest.fixture(autouse=True)
def no_known_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_calls, "calls", call_cache.Calls())


def _attention(case: Case, kernel: str, tensors: list[Tensor], *mask: list[Tensor]) -> list[Tensor]:
    """out, lse and the gradients."""
    q, k, v, grad_out, *sink = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, *sink)]
    out, lse = masked_ops.attention_masked(
        *leaves[:3],
        case.text,
        *mask,
        *(case.dims[0] ** -0.5, "BSHD", False, kernel),
        *(leaves[3:] or [None]),
        case.softcap,
    )
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, grad_out)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_the_reference_in_float64(case: Case) -> None:
    of_out, of_grad = TOLERANCE[case.dtype]
    for time in range(TIMES):
        tensors = case.inputs("cuda")
        if case.sink:
            tensors.append(torch.randn(case.heads[0], device="cuda", dtype=case.dtype))
        read = case.read("cuda")
        blocks = case.blocks(read, "cuda")
        doubles = [tensor.double() for tensor in tensors]
        wanted = _attention(case, "reference", doubles, read, blocks)
        poison_cuda_free_memory()
        made = _attention(case, "fa4", tensors, read, blocks)
        for place, (ours, theirs) in enumerate(zip(made, wanted, strict=True)):
            if place == 1:
                lost = theirs.isneginf()
                assert torch.equal(ours.isneginf(), lost)
                ours, theirs = ours[~lost], theirs[~lost]
            assert relative_error(ours, theirs) < (of_grad if place > 1 else of_out), (place, time)
    assert op_calls.calls.repeated >= TIMES - 1  # at the least the forward


def _padded(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    places = torch.arange(q.shape[2], device=q.device)
    mask = (places[None] <= places[:, None]) & padding[:, None, None, :]
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, mask)
    return q


def _key_padding(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, padding[:, None, None, :].expand(-1, 1, 500, -1))


def _given(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, padding)


@pytest.mark.parametrize("fn", [_padded, _key_padding, _given], ids=lambda fn: fn.__name__)
def test_compiled(fn: Callable[..., Tensor]) -> None:
    """What the pass makes of SDPA, with block lists from a kernel of Inductor's."""
    shape = (2, 4, 500, 64)
    for time in range(2):
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        padding = torch.arange(500, device="cuda") < torch.tensor([[123 + time], [500]]).cuda()
        if fn is _given:
            padding = padding[:, None, None, :] & (torch.rand(2, 1, 500, 500) < 0.9).cuda()
        leaves = [tensor.requires_grad_() for tensor in inputs]
        options = {"fa.kernels": ("fa4",), "fa.on_fallback": "error"}
        compiled = torch.compile(fn, backend="fa_inductor", fullgraph=True, options=options)
        poison_cuda_free_memory()
        out, report = run_reported(compiled, *leaves, padding)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        if time == 0:
            assert set(kernels_of(report)) == {"fa4"}
        floats = [tensor.detach().double().requires_grad_() for tensor in inputs]
        wanted = fn(*floats, padding)
        expected = torch.autograd.grad(wanted.square().sum(), floats)
        for ours, theirs in zip((out, *grads), (wanted, *expected), strict=True):
            assert relative_error(ours, theirs) < 4e-2
        torch._dynamo.reset()


def test_no_tensor_is_as_large_as_the_scores() -> None:
    length = 16384
    q, k, v = (
        torch.randn(1, length, 8, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    padding = torch.ones(1, length, device="cuda", dtype=torch.bool)
    padding[:, length - 1000 :] = False
    compiled = torch.compile(
        _padded, backend="fa_inductor", fullgraph=True, options={"fa.kernels": ("fa4",)}
    )
    with torch.no_grad():
        compiled(q, k, v, padding)
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compiled(q, k, v, padding)
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < length * length / 2, f"{peak / 1e6:.0f} MB"  # a byte a score is 268 MB
