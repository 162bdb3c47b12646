"""User code that calls FlashAttention-4 itself: in a graph it is our op, or an honest break.

`flash_attn_varlen_func` has its own file, `test_guards_varlen.py`.
"""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flash_attn.cute
import pytest
import torch
from fa4_calls import DENSE, INFERENCE, Recorder, run
from flash_attn.cute import interface
from sequence_oracle import batched
from torch import Tensor, fx
from torch._dynamo.exc import Unsupported

import fa_inductor
from fa_inductor import dynamo_compat, substitutes
from helpers import clone_inputs, oracle
from poison import poisoned

flash_attn_func = flash_attn.cute.flash_attn_func


def _qkv(grad: bool = False, **options: Any) -> list[Tensor]:
    """FA4's layout (B, S, H, D): four query heads on two, longer keys than queries."""
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16))
    return [torch.randn(shape, requires_grad=grad, **options) for shape in shapes]


def _bhsd(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


# --- The op and its arguments ---------------------------------------------------------------------


_SINK = torch.linspace(-1.0, 1.0, 4)
_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True}, {"causal": "bottom_right"}),
    "deterministic": ({"deterministic": True, "causal": False}, {"deterministic": True}),
    "all unused": (dict(substitutes.NOT_CARRIED), {}),
    "left window": ({"window_size": (3, None)}, {"window_left": 3}),
    "window": ({"window_size": [2, 0]}, {"window_left": 2, "window_right": 0}),
    "no window": ({"window_size": (-1, -1)}, {}),
    "causal, no window": ({"window_size": (-1, -1), "causal": True}, {"causal": "bottom_right"}),
    "causal window": (
        {"window_size": (3, -1), "causal": True},
        {"window_left": 3, "causal": "bottom_right"},
    ),
    "softcap": ({"softcap": 30}, {"softcap": 30.0}),
    "sink": ({"learnable_sink": _SINK}, {"sink": ...}),
    "lse": ({"return_lse": True}, {}),
}


@pytest.mark.parametrize(("given", "expected"), _CALLS.values(), ids=_CALLS.keys())
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_call_becomes_the_op(given: dict[str, Any], expected: dict[str, Any], grad: bool) -> None:
    """... with each argument in its place, and FA4's own output layout in the fake."""
    leaves = _qkv(grad)
    (out, lse), recorder = run(lambda q, k, v: flash_attn_func(q, k, v, **given), *leaves)
    with_lse = grad or given.get("return_lse", False)
    assert recorder.ops == [DENSE if with_lse else INFERENCE]
    (call,) = recorder.calls
    inputs = [call.pop(name).meta["example_value"] for name in "qkv"]
    taken = _bhsd(leaves) if with_lse else leaves
    assert [tuple(tensor.shape) for tensor in inputs] == [tuple(t.shape) for t in taken]
    assert (call.pop("sink") is not None) is ("sink" in expected)
    plain = {"causal": "none", "out_order": "BSHD", "kernel": "fa4"}
    unused = {"dropout_p": 0.0, "softcap": 0.0, "deterministic": False}
    filled = {**dict.fromkeys(call), **plain, **unused, **expected}
    assert call == {name: filled[name] for name in call}
    for output in (recorder.outputs[0], out):
        assert tuple(output.shape) == (2, 5, 4, 16)
        assert output.is_contiguous()
    assert (lse is not None) is with_lse


def test_positional_arguments_keep_their_meaning() -> None:
    q, k, v = _qkv()
    call = (None, None, 0.25, True, (4, 1))  # qv, gather_kv_indices, softmax_scale, causal, window
    _, recorder = run(lambda q, k, v: flash_attn_func(q, k, v, *call), q, k, v)
    names = ("scale", "causal", "window_left", "window_right")
    assert [recorder.calls[0][name] for name in names] == [0.25, "bottom_right", 4, None]


@pytest.mark.parametrize(
    "entry", [flash_attn_func, functools.partial(flash_attn_func)], ids=["function", "partial"]
)
def test_the_function_compiled_by_itself(entry: Callable[..., Any]) -> None:
    """GB-04: `torch.compile(flash_attn_func)`, with no function of the user's around it."""
    _, recorder = run(entry, *_qkv())
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients_equal_the_definition(causal: bool, scale: float | None) -> None:
    """MK-03: causal is aligned bottom-right, FA4's way, also where the lengths differ."""
    given = _qkv(grad=True)
    exact = clone_inputs(*given, dtype=torch.float64)
    kind = "bottom_right" if causal else "none"
    expected = oracle(*_bhsd(exact), causal=kind, scale=scale).transpose(1, 2)
    weight = torch.randn(expected.shape)
    with poisoned():
        (out, _), recorder = run(
            lambda q, k, v: flash_attn_func(q, k, v, softmax_scale=scale, causal=causal), *given
        )
        grads = torch.autograd.grad(out, given, weight)
    assert len(recorder.calls) == 1
    expected_grads = torch.autograd.grad(expected, exact, weight.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_lse_is_there_when_fa4_gives_one(return_lse: bool, grad: bool) -> None:
    """FA4 always returns a pair; lse is not None when asked for or when a gradient may be, and
    differentiable only when asked for."""
    q, k, v = _qkv(grad)
    with poisoned():
        result, _ = run(lambda q, k, v: flash_attn_func(q, k, v, return_lse=return_lse), q, k, v)
    assert isinstance(result, tuple)
    out, lse = result
    assert out.requires_grad is grad
    if not (return_lse or grad):
        assert lse is None
        return
    scores = q.double().transpose(1, 2) @ k.double().repeat_interleave(2, 2).permute(0, 2, 3, 1)
    expected = (scores * 8**-0.5).logsumexp(-1)
    assert (lse.dtype, lse.is_contiguous()) == (torch.float32, True)
    torch.testing.assert_close(lse.double(), expected)
    assert lse.requires_grad is (return_lse and grad)


def test_a_sink_alone_is_differentiated() -> None:
    """... so a graph in which nothing else is must not take the op of inference."""
    q, k, v = _qkv()
    sink = _SINK.clone().requires_grad_()
    (out, lse), recorder = run(lambda s: flash_attn_func(q, k, v, learnable_sink=s), sink)
    assert recorder.ops == [DENSE]
    assert (out.requires_grad, lse is not None) == (True, True)
    exact = sink.detach().double().requires_grad_()
    expected, _ = batched(q, k, v, exact)
    (grad,) = torch.autograd.grad(out.square().sum(), sink)
    (wanted,) = torch.autograd.grad(expected.square().sum(), exact)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-5)


def test_gradient_of_lse_is_not_dropped() -> None:
    """PM-10: a loss on both outputs."""
    given = _qkv(grad=True)
    exact = clone_inputs(*given, dtype=torch.float64)
    with poisoned():
        (out, lse), _ = run(lambda *x: flash_attn_func(*x, return_lse=True), *given)
        grads = torch.autograd.grad(out.square().sum() + lse.square().sum(), given)
    q, k, v = _bhsd(exact)
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    loss = oracle(q, k, v).square().sum() + scores.logsumexp(-1).square().sum()
    for grad, expected in zip(grads, torch.autograd.grad(loss, exact), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", _CALLS.values(), ids=_CALLS.keys())
def test_what_each_argument_computes(
    given: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """Values and gradients, the sink's too."""
    arguments, expected = given
    q, k, v = _qkv(grad=True)
    sink = _SINK.clone().requires_grad_() if "sink" in expected else None
    leaves = [q, k, v] if sink is None else [q, k, v, sink]
    weight = torch.randn(2, 5, 4, 16)

    def attend(*leaves: Tensor) -> Tensor:
        rest = {"learnable_sink": leaves[3]} if len(leaves) == 4 else {}
        return flash_attn_func(*leaves[:3], **{**arguments, **rest})[0]

    with poisoned():
        out, recorder = run(attend, *leaves)
        grads = torch.autograd.grad(out, leaves, weight)
    assert len(recorder.calls) == 1
    exact = clone_inputs(*leaves, dtype=torch.float64)
    names = ("scale", "window_left", "window_right", "softcap")
    numbers = {name: value for name, value in expected.items() if name in names}
    wanted, _ = batched(*exact, causal=arguments.get("causal", False), **numbers)
    with poisoned():
        inferred, recorder = run(attend, *(tensor.detach() for tensor in leaves))
    assert recorder.ops == [DENSE if arguments.get("return_lse") else INFERENCE]
    for result in (out, inferred):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-6)
    wanted_grads = torch.autograd.grad(wanted, exact, weight.double())
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-4, atol=1e-5)


def test_through_the_backend_the_site_is_reported() -> None:
    """The user has chosen the kernel; a plan for a named GPU says so, from CPU tensors too."""
    q, k, v = _qkv(dtype=torch.bfloat16)
    report = fa_inductor.explain(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0], target="sm_90a"
    )(q, k, v)
    report.assert_no_graph_breaks()
    assert [(site.kernel, site.spec and site.spec.causal) for site in report.sites] == [
        ("fa4", "bottom_right")
    ]


# --- What is not carried --------------------------------------------------------------------------

_USED: dict[str, Any] = {
    "qv": torch.zeros(2, 5, 4, 8),
    "gather_kv_indices": torch.zeros(2, 5, 4, dtype=torch.int32),
    "num_splits": 2,
    "pack_gqa": True,
    "score_mod": lambda *arguments: arguments[0],
    "score_mod_bwd": lambda *arguments: arguments[0],
    "mask_mod": lambda *arguments: True,
    "aux_tensors": [torch.zeros(3)],
    "aux_scalars": (1.0,),
    "block_sparse_tensors": SimpleNamespace(),
    "block_sparse_tensors_bwd": SimpleNamespace(),
    "gather_bwd_recompute_p": True,
    "gather_bwd_token_chunk": 128,
}


def test_every_argument_of_fa4_is_carried_or_listed() -> None:
    carried = {"q", "k", "v", "softmax_scale", "causal", "deterministic", "return_lse"}
    carried |= {"window_size", "softcap", "learnable_sink"}
    parameters = inspect.signature(flash_attn_func).parameters
    assert set(parameters) == carried | set(substitutes.NOT_CARRIED)
    assert set(_USED) == set(substitutes.NOT_CARRIED)
    for name, unused in substitutes.NOT_CARRIED.items():
        assert parameters[name].default == unused


@pytest.mark.parametrize("name", _USED)
def test_uncarried_argument_raises_under_fullgraph(name: str) -> None:
    with pytest.raises(Unsupported, match=rf"flash_attn_func\({name}=\.\.\.\)"):
        run(lambda q, k, v: flash_attn_func(q, k, v, **{name: _USED[name]}), *_qkv())


@pytest.mark.parametrize("window", [(-1, None), (None, -1), (-1, 0), (3, -1), (-2, 1)], ids=str)
def test_one_negative_bound_is_never_reinterpreted(window: Any) -> None:
    """PM-09: FA4 takes two negative bounds for no window, and one for a bound that hides keys."""
    with pytest.raises(Unsupported, match="window_size with one negative bound"):
        run(lambda q, k, v: flash_attn_func(q, k, v, window_size=window), *_qkv())


def test_a_negative_left_bound_hides_keys_under_causal_too() -> None:
    with pytest.raises(Unsupported, match="window_size with one negative bound"):
        run(lambda *x: flash_attn_func(*x, window_size=(-1, 5), causal=True), *_qkv())


@pytest.mark.parametrize("softcap", [None, -5.0, (1.0,)], ids=str)
def test_softcap_that_is_none_of_the_op_s(softcap: Any) -> None:
    with pytest.raises(Unsupported, match="softcap that is not a number from 0 on"):
        run(lambda q, k, v: flash_attn_func(q, k, v, softcap=softcap), *_qkv())


def test_autocast_to_another_dtype() -> None:
    """The op would cast as PyTorch's attention does; FA4 computes in the dtype it is given."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return flash_attn_func(q, k, v)[0]

    with pytest.raises(Unsupported, match="under autocast to another dtype"):
        run(attend, *_qkv(dtype=torch.float16))
    out, recorder = run(attend, *_qkv(dtype=torch.bfloat16))
    assert (out.dtype, len(recorder.calls)) == (torch.bfloat16, 1)


def test_shared_keys_of_head_dim_512_are_another_problem() -> None:
    """FA4 computes multi-head latent attention when k is v and D is 512."""
    q, kv = torch.randn(1, 3, 1, 512), torch.randn(1, 3, 1, 512)
    with pytest.raises(Unsupported, match="k is v, head_dim 512"):
        run(lambda q, kv: flash_attn_func(q, kv, kv), q, kv)
    _, recorder = run(lambda q, kv: flash_attn_func(q, kv, kv), q[..., :64], kv[..., :64])
    assert len(recorder.calls) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: interface.FlashAttnFunc.apply(q, k, v),
        lambda q, k, v: interface.FlashAttnVarlenFunc.apply(q, k, v),
        lambda q, k, v: interface._flash_attn_fwd(q, k, v),
    ],
    ids=["FlashAttnFunc.apply", "FlashAttnVarlenFunc.apply", "_flash_attn_fwd"],
)
def test_other_entries_break_the_graph_instead_of_being_traced(call: Callable[..., Any]) -> None:
    """GB-04: traced into, FA4 gives a graph that allocates an output and launches nothing."""
    recorder = Recorder()
    with pytest.raises(Unsupported):
        torch.compile(call, backend=recorder, fullgraph=True)(*_qkv(dtype=torch.bfloat16))
    assert recorder.calls == []


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    window = {"window_size": (3, None), "softcap": 20.0}
    out, _ = flash_attn_func(q * 2, k, v, softmax_scale=0.3, pack_gqa=True, causal=True, **window)
    return out * 3


def test_without_fullgraph_the_original_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """... with all arguments as given, between two graphs; CPU code stands in for the kernel."""
    seen: list[dict[str, Any]] = []
    names = list(inspect.signature(flash_attn_func).parameters)

    @torch._dynamo.disable
    def stand_in(*arguments: Any) -> tuple[Tensor, None]:
        assert flash_attn_func.__code__ in [caller.frame.f_code for caller in inspect.stack(0)]
        seen.append(dict(zip(names, arguments, strict=True)))
        return arguments[0] + 1, None

    monkeypatch.setattr(interface.FlashAttnFunc, "apply", stand_in)
    q, k, v = _qkv()
    result, recorder = run(_packed, q, k, v, fullgraph=False)
    torch.testing.assert_close(result, (q * 2 + 1) * 3)
    assert recorder.calls == []
    (given,) = seen
    used = {"softmax_scale": 0.3, "window_size": (3, None), "softcap": 20.0, "causal": True}
    unused = {**substitutes.NOT_CARRIED, "return_lse": False, "learnable_sink": None}
    expected = {**unused, **used, "pack_gqa": True}
    assert {name: given[name] for name in expected} == expected


def test_without_fullgraph_nothing_below_the_original_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What FA4 calls outside its own folder (CUTLASS, QuACK, TVM-FFI) is no food for Dynamo."""
    monkeypatch.setattr(interface, "_flash_attn_fwd", lambda q, *_, **__: (q + 1, *(None,) * 4))
    codes: list[str] = []

    def recording(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        codes.append(gm.code)
        return gm.forward

    torch.compile(_packed, backend=recording)(*_qkv())
    assert [any(sign in code for sign in ("* 2", "* 3")) for code in codes] == [True, True]


# --- Import order, and what stays as it is --------------------------------------------------------


def test_eager_function_is_the_original() -> None:
    torch.compile(lambda *x: flash_attn_func(*x), backend=Recorder())(*_qkv())
    assert flash_attn.cute.flash_attn_func is interface.flash_attn_func is flash_attn_func
    assert inspect.getsourcefile(flash_attn_func) == interface.__file__
    if dynamo_compat.compiles_polyfilled_functions():
        assert vars(flash_attn_func) == {}
    assert interface.FlashAttnFunc.__module__ == "flash_attn.cute.interface"


def _ops_in_child(order: tuple[str, ...], references: tuple[str, ...]) -> list[int]:
    """How many ops each graph has in a fresh process that imports modules in `order`."""
    child = Path(__file__).with_name("guards_child.py")
    process = subprocess.run(
        [sys.executable, str(child), ",".join(order), ",".join(references)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize(
    "order",
    [
        ("flash_attn.cute", "fa_inductor"),
        ("torch._dynamo", "flash_attn.cute", "fa_inductor"),
        ("fa_inductor", "torch._dynamo", "flash_attn.cute"),
    ],
    ids=" ".join,
)
def test_import_order_does_not_matter(order: tuple[str, ...]) -> None:
    """References taken before `import fa_inductor` are found too, wherever they are kept."""
    references = ("global", "closure", "partial", "attribute", "dict", "varlen")
    assert _ops_in_child(order, references) == [1] * len(references)


def test_the_first_thing_compiled_may_be_the_function_itself() -> None:
    """Dynamo has then met nothing else of FA4's that could have brought in the substitute."""
    assert _ops_in_child(("flash_attn.cute", "fa_inductor"), ("itself",)) == [1]
