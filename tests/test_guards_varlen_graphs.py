"""Graphs of `flash_attn_varlen_func`: what is in them, when they are made again, reports."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import flash_attn.cute
import pytest
import torch
from fa4_calls import VARLEN
from functorch.compile import make_boxed_func
from sequence_oracle import packed
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from varlen_func import CU_K, CU_Q, STARTS_K, STARTS_Q, call_of, padded, thd

import fa_inductor
from fa_inductor import compile_pass
from fa_inductor.config import Config
from fa_inductor.patterns import op_call
from helpers import clone_inputs, compile_reference
from poison import poisoned

flash_attn_varlen_func = flash_attn.cute.flash_attn_varlen_func


# --- Compiled graphs ------------------------------------------------------------------------------


def graphs_of(fn: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], list[str], Any]:
    """`fn` through the pass and AOTAutograd; what the graphs call, and how often Dynamo asked."""
    targets: list[str] = []
    asked = SimpleNamespace(times=0)

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        targets.extend(str(n.target) for n in gm.graph.nodes if "fa_inductor" in str(n.target))
        return make_boxed_func(gm.forward)

    aot = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        asked.times += 1
        op_call.move_to_reference(gm)
        compile_pass.run(gm, Config(kernels=("reference",), on_fallback="ignore"))
        return aot(gm, inputs)

    return torch.compile(fn, backend=backend, fullgraph=True, **options), targets, asked


def test_a_compiled_graph_has_no_autograd_kernel_in_it() -> None:
    compiled, targets, _ = graphs_of(lambda *x: call_of(causal=True)(*x)[0])
    compiled(*thd(grad=True)).sum().backward()
    assert targets == [
        "fa_inductor.attention_varlen_forward.default",
        "fa_inductor.attention_varlen_gradients.default",
    ]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_symbolic_lengths_do_not_recompile(grad: bool) -> None:
    """Tq, Tk, the number of sequences and the bounds all change; the numbers stay right."""

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *bounds: int) -> Tensor:
        return flash_attn_varlen_func(q * 1, k, v, None, starts, starts, *bounds, causal=True)[0]

    compiled, _, asked = graphs_of(attend, dynamic=True)
    for lengths in ([3, 4], [5, 2, 6], [2, 2, 2, 9, 3], [7, 8]):
        starts = [0, *itertools.accumulate(lengths)]
        cu_seqlens = torch.tensor(starts, dtype=torch.int32)
        shapes = [(starts[-1], heads, 8) for heads in (4, 2, 2)]
        leaves = [torch.randn(shape, requires_grad=grad) for shape in shapes]
        exact = clone_inputs(*leaves, dtype=torch.float64)
        expected, _ = packed(*exact, starts, starts, causal=True)
        with poisoned():
            out = compiled(*leaves, cu_seqlens, max(lengths), max(lengths))
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
            grads = torch.autograd.grad(out.square().sum(), leaves) if grad else ()
        wanted = torch.autograd.grad(expected.square().sum(), exact) if grad else ()
        for ours, theirs in zip(grads, wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    assert asked.times == 1


def test_bounds_read_from_the_device_inside_the_graph() -> None:
    """An unbacked bound: nothing may be asked of its value while tracing."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bounds = [int((cu[1:] - cu[:-1]).max()) for cu in (CU_Q, CU_K)]
        return flash_attn_varlen_func(q, k, v, None, CU_Q, CU_K, *bounds)[0]

    leaves = thd(grad=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), poisoned():
        compiled, _, _ = graphs_of(attend)
        out = compiled(*leaves)
        out.sum().backward()
    expected, _ = packed(*leaves, STARTS_Q, STARTS_K)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_inductor_compiles_the_op() -> None:
    """The whole backend, in memory that starts as NaN, on the op itself."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        numbers = (CU_Q, CU_K, 6, 5, None, "bottom_right", False, "reference", sink, 2, None, 3.0)
        out, lse = VARLEN(q * 2, k, v, *numbers)
        return out.mul(3).sum((1, 2)) + lse.exp().sum(0)

    leaves = [*thd(grad=True), torch.randn(4, requires_grad=True)]
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    with poisoned():
        result = compile_reference(attend)(*leaves)
        grads = torch.autograd.grad(result.sum(), leaves)
    torch.testing.assert_close(result, attend(*leaves))
    torch.testing.assert_close(grads, expected)


# --- Reports --------------------------------------------------------------------------------------


def test_the_site_is_reported() -> None:
    q, k, v = thd(grad=True, dtype=torch.bfloat16)
    sink = torch.randn(4, dtype=torch.bfloat16)
    attend = call_of(causal=True, window_size=(2, None), softcap=3.0)
    report = fa_inductor.explain(lambda *x: attend(*x)[0], target="sm_90a")(q, k, v, sink)
    report.assert_no_graph_breaks()
    (site,) = report.sites
    assert site.kernel == "fa4"
    spec = site.spec
    assert spec is not None
    assert (spec.q.shape, spec.k.shape, spec.v.shape) == (
        (1, 4, 9, 8),
        (1, 2, 11, 8),
        (1, 2, 11, 16),
    )
    assert spec.q.stride[1:] == (8, 32, 1)
    assert (spec.causal, spec.window, spec.softcap) == ("bottom_right", (2, None), 3.0)
    assert (spec.has_sink, spec.has_seqlens, spec.needs_grad) == (True, True, True)


def test_a_padded_site_is_reported_with_its_lengths() -> None:
    used = torch.tensor([3, 5], dtype=torch.int32)
    report = fa_inductor.explain(
        lambda *x: flash_attn_varlen_func(*x, seqused_q=used)[0], target="sm_90a"
    )(*padded())
    (site,) = report.sites
    assert site.spec is not None
    assert (site.spec.has_seqlens, site.spec.has_sink, site.spec.causal) == (True, False, "none")
