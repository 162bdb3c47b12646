"""User code that calls `flash_attn_varlen_func`: in a graph it is an op of ours, or a break.

As in `test_guards.py`, graphs run with the kernel's name replaced by "reference".
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import flash_attn.cute
import pytest
import torch
from fa4_calls import DENSE, VARLEN, Recorder, run
from flash_attn.cute import interface
from functorch.compile import make_boxed_func
from sequence_oracle import batched, packed
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported

import fa_inductor
from fa_inductor import compile_pass, substitutes
from fa_inductor.config import Config
from fa_inductor.patterns import op_call
from helpers import clone_inputs, compile_reference
from poison import poisoned

flash_attn_varlen_func = flash_attn.cute.flash_attn_varlen_func

STARTS_Q, STARTS_K = [0, 3, 3, 9], [0, 5, 7, 11]
CU_Q, CU_K = (torch.tensor(starts, dtype=torch.int32) for starts in (STARTS_Q, STARTS_K))
LENGTHS: dict[str, Any] = {
    "cu_seqlens_q": CU_Q,
    "cu_seqlens_k": CU_K,
    "max_seqlen_q": 6,
    "max_seqlen_k": 5,
}


def thd(grad: bool = False, **options: Any) -> list[Tensor]:
    """FA4's layout (T, H, D): four query heads on two."""
    shapes = ((9, 4, 8), (11, 2, 8), (11, 2, 16))
    return [torch.randn(shape, requires_grad=grad, **options) for shape in shapes]


def call_of(**given: Any) -> Callable[..., Any]:
    """A function of q, k, v and perhaps a sink."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Any:
        rest = {"learnable_sink": sink[0]} if sink else {}
        return flash_attn_varlen_func(q, k, v, **{**LENGTHS, **given, **rest})

    return attend


# --- The op and its arguments ---------------------------------------------------------------------

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True}, {"causal": "bottom_right"}),
    "deterministic": ({"deterministic": True}, {"deterministic": True}),
    "window": ({"window_size": (2, 1)}, {"window_left": 2, "window_right": 1}),
    "no window": ({"window_size": [-1, -1]}, {}),
    "causal window": (
        {"window_size": (2, 3), "causal": True},
        {"window_left": 2, "causal": "bottom_right"},
    ),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "bounds not given": (
        {"max_seqlen_q": None, "max_seqlen_k": None},
        {"max_seqlen_q": 0, "max_seqlen_k": 0},
    ),
    "a bound on the device": ({"max_seqlen_q": torch.tensor(6)}, {"max_seqlen_q": 0}),
    "all unused": (dict(substitutes.VARLEN_NOT_CARRIED), {}),
}


@pytest.mark.parametrize(("given", "expected"), CALLS.values(), ids=CALLS.keys())
def test_call_becomes_the_op(given: dict[str, Any], expected: dict[str, Any]) -> None:
    q, k, v = thd()
    (out, lse), recorder = run(call_of(**given), q, k, v)
    assert recorder.ops == [VARLEN]
    (call,) = recorder.calls
    inputs = [call.pop(name).meta["example_value"] for name in "qkv"]
    assert [tuple(tensor.shape) for tensor in inputs] == [tuple(t.shape) for t in (q, k, v)]
    for name, starts in (("cu_seqlens_q", CU_Q), ("cu_seqlens_k", CU_K)):
        assert call.pop(name).meta["example_value"].shape == starts.shape
    plain = {"causal": "none", "deterministic": False, "kernel": "fa4", "softcap": 0.0}
    bounds = {"max_seqlen_q": 6, "max_seqlen_k": 5}
    assert call == {**dict.fromkeys(call), **plain, **bounds, **expected}
    for output in (recorder.outputs[0], out):
        assert tuple(output.shape) == (9, 4, 16)
        assert output.is_contiguous()
    assert lse is None


@pytest.mark.parametrize("given", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
def test_what_each_argument_computes(
    given: tuple[dict[str, Any], dict[str, Any]], with_sink: bool
) -> None:
    """Values and gradients, those of the lse and of the sink too."""
    arguments, expected = given
    leaves = thd(grad=True)
    if with_sink:
        leaves.append(torch.randn(4, requires_grad=True))
    exact = clone_inputs(*leaves, dtype=torch.float64)
    names = ("scale", "window_left", "window_right", "softcap")
    numbers = {name: value for name, value in expected.items() if name in names}
    numbers["causal"] = arguments.get("causal", False)
    wanted, wanted_lse = packed(*exact[:3], STARTS_Q, STARTS_K, *exact[3:], **numbers)
    with poisoned():
        (out, lse), recorder = run(call_of(**arguments, return_lse=True), *leaves)
        finite = lse.masked_fill(torch.isneginf(lse), 0.0)
        loss = out.square().sum() + finite.square().sum()
        grads = torch.autograd.grad(loss, leaves)
    assert recorder.ops == [VARLEN]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-6)
    wanted_lse = wanted_lse.masked_fill(torch.isneginf(wanted_lse), 0.0)
    loss = wanted.square().sum() + wanted_lse.square().sum()
    for grad, wanted_grad in zip(grads, torch.autograd.grad(loss, exact), strict=True):
        torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-4, atol=1e-5)


def test_positional_arguments_keep_their_meaning() -> None:
    q, k, v = thd()
    given = (None, CU_Q, CU_K, 6, 5, None, None, None, None, None, 0.25, True, (2, 0), None, 3.0)
    _, recorder = run(lambda q, k, v: flash_attn_varlen_func(q, k, v, *given), q, k, v)
    (call,) = recorder.calls
    names = ("max_seqlen_q", "max_seqlen_k", "scale", "causal", "window_left", "softcap")
    assert [call[name] for name in names] == [6, 5, 0.25, "bottom_right", 2, 3.0]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("grad", ["nothing", "q", "sink"])
def test_lse_is_there_when_fa4_gives_one(return_lse: bool, grad: str) -> None:
    """... and differentiable only when asked for."""
    q, k, v = thd()
    sink = torch.randn(4, requires_grad=grad == "sink")
    q.requires_grad_(grad == "q")
    (out, lse), _ = run(call_of(return_lse=return_lse), q, k, v, sink)
    assert out.requires_grad is (grad != "nothing")
    if not (return_lse or grad != "nothing"):
        assert lse is None
        return
    assert (tuple(lse.shape), lse.dtype, lse.is_contiguous()) == ((4, 9), torch.float32, True)
    assert lse.requires_grad is (return_lse and grad != "nothing")


# --- Padded sequences, which are the dense op -----------------------------------------------------


def padded(grad: bool = False) -> list[Tensor]:
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16))
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sides", ["", "q", "k", "qk"])
def test_padded_sequences_with_lengths(sides: str, causal: bool) -> None:
    used = {"q": [3, 5], "k": [7, 2]}
    given = {f"seqused_{side}": torch.tensor(used[side], dtype=torch.int32) for side in sides}
    leaves = padded(grad=True)
    exact = clone_inputs(*leaves, dtype=torch.float64)
    with poisoned():
        (out, _), recorder = run(
            lambda q, k, v: flash_attn_varlen_func(q, k, v, causal=causal, **given), *leaves
        )
        grads = torch.autograd.grad(out.square().sum(), leaves)
    assert recorder.ops == [DENSE]
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        rows = used["q"][b] if "q" in sides else 5
        keys = used["k"][b] if "k" in sides else 7
        q, k, v = exact[0][b, :rows], exact[1][b, :keys], exact[2][b, :keys]
        expected, _ = packed(q, k, v, [0, rows], [0, keys], causal=causal)
        torch.testing.assert_close(out[b, :rows].double(), expected, rtol=1e-5, atol=1e-6)
        loss = loss + expected.square().sum()
    for grad, wanted in zip(grads, torch.autograd.grad(loss, exact), strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-5)


def test_without_any_lengths_it_is_flash_attn_func() -> None:
    q, k, v = padded()
    sink = torch.randn(4)
    given = {"learnable_sink": sink, "window_size": (2, None), "softcap": 3.0, "return_lse": True}
    with poisoned():
        (out, lse), recorder = run(lambda *x: flash_attn_varlen_func(*x, **given), q, k, v)
    assert recorder.ops == [DENSE]
    expected, expected_lse = batched(q, k, v, sink, window_left=2, softcap=3.0)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-6)


# --- What is not carried --------------------------------------------------------------------------

USED: dict[str, Any] = {
    "qv": torch.zeros(9, 4, 16),
    "min_seqlen_k": 1,
    "gather_kv_indices": torch.zeros(9, 4, dtype=torch.int32),
    "page_table": torch.zeros(3, 1, dtype=torch.int32),
    "num_splits": 2,
    "pack_gqa": True,
    "score_mod": lambda *arguments: arguments[0],
    "score_mod_bwd": lambda *arguments: arguments[0],
    "mask_mod": lambda *arguments: True,
    "block_sparse_tensors": SimpleNamespace(),
    "aux_tensors": [torch.zeros(3)],
    "aux_scalars": (1.0,),
    "scheduler_metadata": SimpleNamespace(),
    "seqlen_k_per_split": 128,
    "disable_scheduler_metadata": True,
    "gather_bwd_recompute_p": True,
    "gather_bwd_token_chunk": 128,
}


def test_every_argument_of_fa4_is_carried_or_listed() -> None:
    carried = {"q", "k", "v", "softmax_scale", "causal", "deterministic", "return_lse"}
    carried |= {"window_size", "softcap", "learnable_sink", "seqused_q", "seqused_k", *LENGTHS}
    parameters = inspect.signature(flash_attn_varlen_func).parameters
    assert set(parameters) == carried | set(substitutes.VARLEN_NOT_CARRIED)
    assert set(USED) == set(substitutes.VARLEN_NOT_CARRIED)
    for name, unused in substitutes.VARLEN_NOT_CARRIED.items():
        assert parameters[name].default == unused


@pytest.mark.parametrize("name", USED)
def test_uncarried_argument_raises_under_fullgraph(name: str) -> None:
    with pytest.raises(Unsupported, match=rf"flash_attn_varlen_func\({name}=\.\.\.\)"):
        run(call_of(**{name: USED[name]}), *thd())


MIXED: dict[str, dict[str, Any]] = {
    "no cu_seqlens_q": {"cu_seqlens_q": None},
    "no cu_seqlens_k": {"cu_seqlens_k": None},
    "packed rows of a padded cache": {
        "cu_seqlens_k": None,
        "seqused_k": torch.tensor([3, 2, 4], dtype=torch.int32),
    },
    "fewer rows than packed": {"seqused_q": torch.tensor([1, 0, 2], dtype=torch.int32)},
}


@pytest.mark.parametrize("given", MIXED.values(), ids=MIXED.keys())
def test_mixed_forms_break_the_graph(given: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="neither packed with cu_seqlens_q and cu_seqlens_k"):
        run(call_of(**given), *thd())


@pytest.mark.parametrize("window", [(-1, None), (3, -1), (-1, 0)], ids=str)
def test_one_negative_bound_is_never_reinterpreted(window: Any) -> None:
    with pytest.raises(Unsupported, match="window_size with one negative bound"):
        run(call_of(window_size=window), *thd())


def test_shared_keys_of_head_dim_512_are_another_problem() -> None:
    q, kv = torch.randn(9, 1, 512), torch.randn(11, 1, 512)
    with pytest.raises(Unsupported, match="k is v, head_dim 512"):
        run(lambda q, kv: flash_attn_varlen_func(q, kv, kv, **LENGTHS), q, kv)


def test_without_fullgraph_the_original_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """... with all arguments as given; CPU code stands in for the kernel."""
    seen: list[dict[str, Any]] = []
    inner = list(inspect.signature(interface.FlashAttnVarlenFunc.forward).parameters)

    @torch._dynamo.disable
    def stand_in(*arguments: Any) -> tuple[Tensor, None]:
        seen.append(dict(zip(inner[1:], arguments, strict=True)))
        return arguments[0] + 1, None

    monkeypatch.setattr(interface.FlashAttnVarlenFunc, "apply", stand_in)
    given = {"softmax_scale": 0.3, "window_size": (3, -1), "softcap": 2.0, "return_lse": True}
    recorder = Recorder()
    attend = call_of(**given)
    q, k, v = thd()
    compiled = torch.compile(lambda q, k, v: attend(q * 2, k, v)[0] * 3, backend=recorder)
    torch.testing.assert_close(compiled(q, k, v), (q * 2 + 1) * 3)
    assert recorder.calls == []
    (arguments,) = seen
    for name, value in {**given, **LENGTHS}.items():
        assert arguments[name] is value or arguments[name] == value, name


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
