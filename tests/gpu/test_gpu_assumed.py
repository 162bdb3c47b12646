"""`fa.assume_mask` on the GPU: right numbers on the kernel, and an assertion that speaks up."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import kernels_of, oracle, relative_error, run_reported
from poison import poison_cuda_free_memory

LENGTH = 500


def _layers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    for _ in range(2):
        q = F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v, mask)
    return q


@pytest.mark.parametrize("kernel", ["fa4", "cudnn"])
def test_a_promise_that_is_kept(kernel: str) -> None:
    """A causal mask from outside of the graph: forward and gradients against float64."""
    q, k, v, grad = (
        torch.randn(2, LENGTH, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    mask = torch.ones(LENGTH, LENGTH, device="cuda", dtype=torch.bool).tril()
    mask = mask.expand(2, 1, LENGTH, LENGTH)
    options = {"fa.kernels": (kernel,), "fa.on_fallback": "error", "fa.assume_mask": "causal"}
    compiled = torch.compile(_layers, backend="fa_inductor", fullgraph=True, options=options)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    poison_cuda_free_memory(0.2)
    out, report = run_reported(compiled, *leaves, mask)
    ours = [out, *torch.autograd.grad(out, leaves, grad)]
    assert kernels_of(report) == [kernel] * 2
    assert all(site.spec and site.spec.causal == "top_left" for site in report.sites)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    wanted = oracle(*doubles, causal="top_left")
    wanted = oracle(wanted, *doubles[1:], causal="top_left")
    theirs = [wanted, *torch.autograd.grad(wanted, doubles, grad.double())]
    for mine, right in zip(ours, theirs, strict=True):
        assert relative_error(mine, right) < 2e-2  # two layers, each rounded to bfloat16
    torch.cuda.synchronize()  # the assertion has been heard by now


_BROKEN = """
import torch, torch.nn.functional as F
options = {"fa.kernels": ("fa4",), "fa.assume_mask": "causal"}
attend = torch.compile(
    lambda x, mask: F.scaled_dot_product_attention(x, x, x, mask),
    backend="fa_inductor", options=options,
)
x = torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
mask = torch.ones(256, 256, device="cuda", dtype=torch.bool).tril()
with torch.no_grad():
    attend(x, mask)
    torch.cuda.synchronize()
    print("kept", flush=True)
    mask[7, 9] = True
    attend(x, mask)
    torch.cuda.synchronize()
print("unnoticed", flush=True)
"""


def test_a_promise_that_is_broken() -> None:
    """In a process of its own, as a device-side assertion is the end of its CUDA context."""
    done = subprocess.run([sys.executable, "-c", _BROKEN], capture_output=True, text=True)
    assert done.stdout.split() == ["kept"], done.stderr[-2000:]
    assert done.returncode != 0
    assert "device-side assert" in done.stderr
    assert "fa.assume_mask" in done.stderr + done.stdout
