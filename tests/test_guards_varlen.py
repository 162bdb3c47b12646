"""User code that calls `flash_attn_varlen_func`: in a graph it is an op of ours, or a break.

As in `test_guards.py`, graphs run with the kernel's name replaced by "reference".
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import flash_attn.cute
import pytest
import torch
from fa4_calls import DENSE, VARLEN, Recorder, run
from flash_attn.cute import interface
from sequence_oracle import batched, packed
from torch import Tensor
from torch._dynamo.exc import Unsupported
from varlen_func import CU_K, CU_Q, LENGTHS, STARTS_K, STARTS_Q, call_of, padded, thd

from fa_inductor import substitutes
from helpers import clone_inputs
from poison import poisoned

flash_attn_varlen_func = flash_attn.cute.flash_attn_varlen_func


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
