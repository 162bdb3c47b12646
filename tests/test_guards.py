"""User code that calls FlashAttention-4 itself: in a graph it is our op, or an honest break.

There is no GPU here, so graphs are looked at as Dynamo hands them over, and run with the kernel's
name replaced by "reference".
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
from flash_attn.cute import interface
from torch import Tensor, fx
from torch._dynamo.exc import Unsupported

import fa_inductor
from fa_inductor import dynamo_compat, guards
from helpers import clone_inputs, oracle
from poison import poisoned

flash_attn_func = flash_attn.cute.flash_attn_func


class Recorder:
    """A backend that notes each attention op, then has the graph run on the reference kernel."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.outputs: list[Any] = []

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.fa_inductor.attention):
            assert not node.kwargs
            self.calls.append(node.args)
            node.args = (*node.args[:-1], "reference")
        gm.recompile()
        (output,) = gm.graph.find_nodes(op="output")
        self.outputs = [value.meta["example_value"] for value in output.args[0]]
        return gm.forward


def _run(fn: Callable[..., Any], *tensors: Tensor, **options: Any) -> tuple[Any, Recorder]:
    recorder = Recorder()
    options.setdefault("fullgraph", True)
    return torch.compile(fn, backend=recorder, **options)(*tensors), recorder


def _qkv(grad: bool = False, **options: Any) -> list[Tensor]:
    """FA4's layout (B, S, H, D): four query heads on two, longer keys than queries."""
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16))
    return [torch.randn(shape, requires_grad=grad, **options) for shape in shapes]


def _bhsd(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


# --- The op and its arguments ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "scale", "causal", "deterministic"),
    [
        ({}, None, "none", False),
        ({"softmax_scale": 0.3}, 0.3, "none", False),
        ({"causal": True}, None, "bottom_right", False),
        ({"deterministic": True, "causal": False}, None, "none", True),
        (dict(guards.NOT_CARRIED), None, "none", False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) and len(value) < 9 else None,
)
def test_call_becomes_the_op(
    given: dict[str, Any], scale: float | None, causal: str, deterministic: bool
) -> None:
    """... with each argument in its place, and FA4's own output layout in the fake."""
    q, k, v = _qkv()
    (out, lse), recorder = _run(lambda q, k, v: flash_attn_func(q, k, v, **given), q, k, v)
    ((*inputs, graph_scale, graph_causal, order, graph_deterministic, kernel),) = recorder.calls
    assert [tuple(node.meta["example_value"].shape) for node in inputs] == [
        tuple(tensor.shape) for tensor in _bhsd((q, k, v))
    ]
    assert (graph_scale, graph_causal, graph_deterministic) == (scale, causal, deterministic)
    assert (order, kernel) == ([0, 2, 1, 3], "fa4")
    for output in (recorder.outputs[0], out):
        assert tuple(output.shape) == (2, 5, 4, 16)
        assert output.is_contiguous()
    assert lse is None


def test_positional_arguments_keep_their_meaning() -> None:
    q, k, v = _qkv()
    call = (None, None, 0.25, True)  # qv, gather_kv_indices, softmax_scale, causal
    _, recorder = _run(lambda q, k, v: flash_attn_func(q, k, v, *call), q, k, v)
    assert recorder.calls[0][3:5] == (0.25, "bottom_right")


@pytest.mark.parametrize(
    "entry", [flash_attn_func, functools.partial(flash_attn_func)], ids=["function", "partial"]
)
def test_the_function_compiled_by_itself(entry: Callable[..., Any]) -> None:
    """GB-04: `torch.compile(flash_attn_func)`, with no function of the user's around it."""
    _, recorder = _run(entry, *_qkv())
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
        (out, _), recorder = _run(
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
        result, _ = _run(lambda q, k, v: flash_attn_func(q, k, v, return_lse=return_lse), q, k, v)
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


def test_gradient_of_lse_is_not_dropped() -> None:
    """PM-10: a loss on both outputs."""
    given = _qkv(grad=True)
    exact = clone_inputs(*given, dtype=torch.float64)
    with poisoned():
        (out, lse), _ = _run(lambda *x: flash_attn_func(*x, return_lse=True), *given)
        grads = torch.autograd.grad(out.square().sum() + lse.square().sum(), given)
    q, k, v = _bhsd(exact)
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    loss = oracle(q, k, v).square().sum() + scores.logsumexp(-1).square().sum()
    for grad, expected in zip(grads, torch.autograd.grad(loss, exact), strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)


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
    "window_size": (3, None),
    "learnable_sink": torch.zeros(4),
    "softcap": 30.0,
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
    parameters = inspect.signature(flash_attn_func).parameters
    assert set(parameters) == carried | set(guards.NOT_CARRIED)
    assert set(_USED) == set(guards.NOT_CARRIED)
    for name, unused in guards.NOT_CARRIED.items():
        assert parameters[name].default == unused


@pytest.mark.parametrize("name", _USED)
def test_uncarried_argument_raises_under_fullgraph(name: str) -> None:
    with pytest.raises(Unsupported, match=rf"flash_attn_func\({name}=\.\.\.\)"):
        _run(lambda q, k, v: flash_attn_func(q, k, v, **{name: _USED[name]}), *_qkv())


@pytest.mark.parametrize("window", [(0, 0), (None, 0), (-1, -1), [2, 2]], ids=str)
def test_any_window_is_one(window: Any) -> None:
    """PM-09: 0 is a window, and -1 is not taken for "no window" on FA4's behalf."""
    with pytest.raises(Unsupported, match="window_size"):
        _run(lambda q, k, v: flash_attn_func(q, k, v, window_size=window), *_qkv())


def test_shared_keys_of_head_dim_512_are_another_problem() -> None:
    """FA4 computes multi-head latent attention when k is v and D is 512."""
    q, kv = torch.randn(1, 3, 1, 512), torch.randn(1, 3, 1, 512)
    with pytest.raises(Unsupported, match="k is v, head_dim 512"):
        _run(lambda q, kv: flash_attn_func(q, kv, kv), q, kv)
    _, recorder = _run(lambda q, kv: flash_attn_func(q, kv, kv), q[..., :64], kv[..., :64])
    assert len(recorder.calls) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: interface.FlashAttnFunc.apply(q, k, v),
        lambda q, k, v: flash_attn.cute.flash_attn_varlen_func(q, k, v),
        lambda q, k, v: interface._flash_attn_fwd(q, k, v),
    ],
    ids=["FlashAttnFunc.apply", "flash_attn_varlen_func", "_flash_attn_fwd"],
)
def test_other_entries_break_the_graph_instead_of_being_traced(call: Callable[..., Any]) -> None:
    """GB-04: traced into, FA4 gives a graph that allocates an output and launches nothing."""
    recorder = Recorder()
    with pytest.raises(Unsupported):
        torch.compile(call, backend=recorder, fullgraph=True)(*_qkv(dtype=torch.bfloat16))
    assert recorder.calls == []


def _windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, _ = flash_attn_func(q * 2, k, v, softmax_scale=0.3, window_size=(3, None), causal=True)
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
    result, recorder = _run(_windowed, q, k, v, fullgraph=False)
    torch.testing.assert_close(result, (q * 2 + 1) * 3)
    assert recorder.calls == []
    (given,) = seen
    assert (given["softmax_scale"], given["window_size"], given["causal"]) == (0.3, (3, None), True)
    unused = {name: value for name, value in guards.NOT_CARRIED.items() if name != "window_size"}
    assert {name: given[name] for name in unused} == unused


def test_without_fullgraph_nothing_below_the_original_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What FA4 calls outside its own folder (CUTLASS, QuACK, TVM-FFI) is no food for Dynamo."""
    monkeypatch.setattr(interface, "_flash_attn_fwd", lambda q, *_, **__: (q + 1, *(None,) * 4))
    codes: list[str] = []

    def recording(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        codes.append(gm.code)
        return gm.forward

    torch.compile(_windowed, backend=recording)(*_qkv())
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
    references = ("global", "closure", "partial", "attribute", "dict")
    assert _ops_in_child(order, references) == [1] * len(references)


def test_the_first_thing_compiled_may_be_the_function_itself() -> None:
    """Dynamo has then met nothing else of FA4's that could have brought in the substitute."""
    assert _ops_in_child(("flash_attn.cute", "fa_inductor"), ("itself",)) == [1]
