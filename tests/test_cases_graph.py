"""Cases about the graph: backends that the user pins, and graph breaks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa_inductor
from comparison import TOLERANCE, Outcome, compare_with_eager, run_poisoned
from fa_inductor import torch_compat
from helpers import compile_quick, compile_reference, kernels_of, relative_error

BOTH_ROUTES = pytest.mark.parametrize("compiler", [compile_quick, compile_reference])
attend = F.scaled_dot_product_attention


def qkv(*size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(size or (2, 4, 8, 16), dtype=dtype) for _ in range(3)]


def pinned_inside(backends: Sequence[SDPBackend], **options: Any) -> Callable[..., Tensor]:
    """An attention that pins its backend itself."""

    def pinned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(list(backends), **options):
            return attend(q, k, v)

    return pinned


def around(backends: Sequence[SDPBackend], fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with sdpa_kernel(list(backends)):
            return fn(*args)

    return call


# --- Pinned backends ----------------------------------------------------------------------------

PINS = {
    "MATH": [SDPBackend.MATH],
    "cuDNN or MATH": [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
}
all_pins = pytest.mark.parametrize("backends", PINS.values(), ids=PINS.keys())


def assert_kept(outcome: Outcome, backends: Sequence[SDPBackend]) -> None:
    """One graph, the site left to PyTorch, and the pin as the only reason."""
    order = torch_compat.default_sdp_priority()
    pinned = ", ".join(sorted((backend.name for backend in backends), key=order.index))
    assert (len(outcome.report.graphs), outcome.kernel_calls) == (1, 0)
    assert kernels_of(outcome.report) == [None]
    assert [reason.partition(" (")[0] for reason in outcome.reasons] == [
        f"reference: sdpa_kernel({pinned})"
    ]


@all_pins
@BOTH_ROUTES
def test_a_backend_pinned_inside_is_kept(
    backends: Sequence[SDPBackend], compiler: Callable[..., Any]
) -> None:
    """The context manager inside the compiled function (GB-01)."""
    fn = pinned_inside(backends)
    assert_kept(compare_with_eager(fn, compiler(fn), qkv()), backends)


@all_pins
def test_a_backend_pinned_outside_is_kept(backends: Sequence[SDPBackend]) -> None:
    """The context manager around the compiled call (GB-01)."""
    compiled = around(backends, compile_quick(attend))
    assert_kept(compare_with_eager(around(backends, attend), compiled, qkv()), backends)


def planned_on_hopper(fn: Callable[..., Any]) -> list[str | None]:
    """By the rows alone or by the measured times: a pin is stronger than either."""
    inputs = qkv(1, 4, 16, 64, dtype=torch.bfloat16)
    return kernels_of(fa_inductor.explain(fn, target="sm_90a")(*inputs))


def test_a_kernel_runs_only_where_its_backend_is_first() -> None:
    """Whoever pins cuDNN gets cuDNN and never FA4, and the math path neither (GB-01)."""
    flash, cudnn, math = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
    assert planned_on_hopper(pinned_inside([flash, math])) == ["fa4"]
    assert planned_on_hopper(pinned_inside([math])) == [None]
    assert planned_on_hopper(pinned_inside([cudnn, math])) == ["cudnn"]
    assert planned_on_hopper(pinned_inside([cudnn, flash], set_priority=True)) == ["cudnn"]
    assert planned_on_hopper(pinned_inside([flash, cudnn], set_priority=True)) == ["fa4"]


CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def unordered_inside_ordered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(CUDNN_FIRST, set_priority=True), sdpa_kernel(CUDNN_FIRST):
        return attend(q, k, v)


def after_unordered_inside_ordered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        with sdpa_kernel(CUDNN_FIRST):
            q = q + 1
        return attend(q, k, v)


def unordered_in_the_graph(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(CUDNN_FIRST):
        return attend(q, k, v)


@pytest.mark.parametrize("fn", [unordered_inside_ordered, after_unordered_inside_ordered])
def test_a_priority_set_outside_stays_inside(fn: Callable[..., Any]) -> None:
    """An inner `sdpa_kernel` without an order keeps the outer one's: cuDNN first (GB-01)."""
    assert planned_on_hopper(fn) == ["cudnn"]


def test_a_priority_set_around_the_compiled_call_stays_inside() -> None:
    """The same with the outer one in force before the graph begins (GB-01)."""
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        assert planned_on_hopper(unordered_in_the_graph) == ["cudnn"]


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    backends = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends=backends, set_priority=True):
        return attend(q, k, v, attn_mask=mask, scale=1.0)


@BOTH_ROUTES
def test_keywords_of_sdpa_kernel(compiler: Callable[..., Any]) -> None:
    """`backends=`, `set_priority=`, a float mask and a scale of 1: as in eager, and the pin is the
    only reason (GB-02)."""
    shapes = ((4, 1, 10, 64), (4, 1, 6, 64), (4, 1, 6, 64), (4, 1, 10, 6))
    outcome = compare_with_eager(masked, compiler(masked), [torch.randn(s) for s in shapes])
    assert len(outcome.report.graphs) == 1
    assert [reason.partition(" (")[0] for reason in outcome.reasons] == [
        "reference: sdpa_kernel(EFFICIENT_ATTENTION, MATH)"
    ]
    (site,) = outcome.report.sites
    assert site.spec
    assert site.spec.mask == "attn_mask float32 (4, 1, 10, 6)"


def pin_later(compiled: Callable[..., Any]) -> list[Outcome]:
    """Call without a pin, then with one, then without again; all must equal eager."""
    inputs = qkv()
    outcomes = []
    for pins in (None, [SDPBackend.MATH], None):
        call = compiled if pins is None else around(pins, compiled)
        out, outcome = run_poisoned(call, inputs)
        torch.testing.assert_close(out, attend(*inputs), **TOLERANCE)
        outcomes.append(outcome)
    return outcomes


@BOTH_ROUTES
def test_pinning_after_the_first_compile(compiler: Callable[..., Any]) -> None:
    """Dynamo does not guard the pins; the pass does (GB-01)."""
    free, pinned, again = pin_later(compiler(lambda *inputs: attend(*inputs)))
    assert (kernels_of(free.report), free.kernel_calls) == (["reference"], 1)
    assert (kernels_of(pinned.report), pinned.kernel_calls) == ([None], 0)
    assert "sdpa_kernel(MATH)" in pinned.reasons[0]
    assert (len(again.report.graphs), again.kernel_calls) == (0, 1)  # the first graph again


def test_pinning_after_the_first_compile_with_plain_inductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with `backend="inductor"`, also with a graph from its cache (GB-01)."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for cached in (False, True):
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        with fa_inductor.enabled(kernels=("reference",), on_fallback="ignore"):
            compiled = torch.compile(lambda *inputs: attend(*inputs), backend="inductor")
            outcomes = pin_later(compiled)
        assert [outcome.kernel_calls for outcome in outcomes] == [1, 0, 1]
        assert bool(counters["aot_autograd"]["autograd_cache_hit"]) == cached
        if not cached:
            assert "sdpa_kernel(MATH)" in outcomes[1].reasons[0]


# --- One graph ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.out(attend(q, k, v).transpose(1, 2).reshape(batch, length, width))


def test_six_blocks_are_one_graph() -> None:
    """Whether a kernel can be used is asked of metadata, never in the user's code (GB-03)."""
    exact = nn.Sequential(*(Block() for _ in range(6))).double()
    model = copy.deepcopy(exact).bfloat16()
    x = torch.randn(2, 64, 256, dtype=torch.bfloat16)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        out, outcome = run_poisoned(compile_quick(model, fullgraph=False), [x])
        eager_error = relative_error(model(x), exact(x.double()))
        assert relative_error(out, exact(x.double())) <= 1.1 * eager_error
    assert not torch._dynamo.utils.counters["graph_break"]
    assert [record.sites for record in outcome.report.graphs] == [6]
    assert outcome.report.graph_breaks == []
    assert outcome.kernel_calls == 6
