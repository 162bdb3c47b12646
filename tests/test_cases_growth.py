"""Lengths that grow from call to call, and sizes of zero, through compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fa_inductor import explain
from helpers import compile_quick, compile_reference, kernels_of, oracle, run_reported
from poison import poisoned

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
attend = F.scaled_dot_product_attention


def _decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, enable_gqa=True)


def _cache(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 4, 1, 16), torch.randn(1, 2, length, 16), torch.randn(1, 2, length, 16)


@pytest.mark.parametrize("compiler", [compile_quick, compile_reference])
def test_a_growing_cache_costs_two_graphs(compiler: Any) -> None:
    """DY-03: one query on 100 to 160 keys, then lengths in any order; right at each of them."""
    compiled = compiler(_decode)
    graphs = 0
    shuffled = torch.randperm(60).add(100).tolist()
    with poisoned():
        for count, length in enumerate([*range(100, 160, 4), *shuffled[:10]]):
            q, k, v = _cache(length)
            out, report = run_reported(compiled, q, k, v)
            graphs += len(report.graphs)
            assert count < 2 or not report.graphs
            torch.testing.assert_close(out, oracle(q, k, v).float(), **TOLERANCE)
    assert graphs == 2


def test_what_cudnn_costs_for_lengths_that_vary_is_said() -> None:
    """DY-03: cuDNN plans are made for each length; FA4 is taken where it can be."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)

    tensors = [torch.randn(1, 4, n, 64, dtype=torch.bfloat16) for n in (64, 100, 100)]
    for tensor in tensors[1:]:
        torch._dynamo.mark_dynamic(tensor, 2)
    (site,) = explain(f, {"fa.kernels": ("cudnn",)}, "sm_90a")(*tensors).sites
    assert site.kernel == "cudnn"
    assert any("builds a plan" in note for note in site.notes)
    (site,) = explain(f, None, "sm_90a")(*tensors).sites
    assert site.kernel == "fa4"
    assert site.notes == ()


# (B, Sq, Sk, D, Dv)
EMPTY = {
    "no batch": (0, 16, 16, 64, 64),
    "no query": (2, 0, 16, 64, 64),
    "no key": (2, 16, 0, 64, 64),
    "no features": (2, 5, 7, 0, 2),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_of_zero(name: str, dynamic: bool) -> None:
    """DY-05: empty or zero, and the mean of the values without features; after a normal call."""
    compiled = compile_quick(lambda q, k, v: attend(q, k, v, scale=1.0), dynamic=dynamic)
    for batch, sq, sk, d, dv in ((2, 16, 16, 64, 64), EMPTY[name]):
        sizes = ((batch, 4, sq, d), (batch, 4, sk, d), (batch, 4, sk, dv))
        leaves = [torch.randn(size, requires_grad=True) for size in sizes]
        with poisoned():
            out, report = run_reported(compiled, *leaves)
            assert set(kernels_of(report)) <= {"reference"}
            grads = torch.autograd.grad(out.sum(), leaves)
        if name == "no features" and d == 0:
            expected = leaves[2].mean(2, keepdim=True).expand(out.shape)
        elif sk == 0:
            expected = torch.zeros(out.shape)
        else:
            expected = oracle(*leaves, scale=1.0).float()
        torch.testing.assert_close(out, expected, **TOLERANCE)
        for grad, leaf in zip(grads, leaves, strict=True):
            assert grad.shape == leaf.shape
            assert grad.isfinite().all()
