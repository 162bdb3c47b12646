"""User code that calls FlashAttention-4 itself: in a graph it is our op, or an honest break.

What breaks the graph: `test_guards_breaks.py`; `flash_attn_varlen_func`: `test_guards_varlen.py`.
"""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flash_attn.cute
import pytest
import torch
from fa4_calls import DENSE, INFERENCE, Recorder, dense_inputs, run
from flash_attn.cute import interface
from sequence_oracle import batched
from torch import Tensor

import fa_inductor
from fa_inductor import dynamo_compat, substitutes
from helpers import clone_inputs, oracle
from poison import poisoned

flash_attn_func = flash_attn.cute.flash_attn_func


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
    leaves = dense_inputs(grad)
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
    q, k, v = dense_inputs()
    call = (None, None, 0.25, True, (4, 1))  # qv, gather_kv_indices, softmax_scale, causal, window
    _, recorder = run(lambda q, k, v: flash_attn_func(q, k, v, *call), q, k, v)
    names = ("scale", "causal", "window_left", "window_right")
    assert [recorder.calls[0][name] for name in names] == [0.25, "bottom_right", 4, None]


@pytest.mark.parametrize(
    "entry", [flash_attn_func, functools.partial(flash_attn_func)], ids=["function", "partial"]
)
def test_the_function_compiled_by_itself(entry: Callable[..., Any]) -> None:
    """GB-04: `torch.compile(flash_attn_func)`, with no function of the user's around it."""
    _, recorder = run(entry, *dense_inputs())
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients_equal_the_definition(causal: bool, scale: float | None) -> None:
    """MK-03: causal is aligned bottom-right, FA4's way, also where the lengths differ."""
    given = dense_inputs(grad=True)
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
    q, k, v = dense_inputs(grad)
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
    q, k, v = dense_inputs()
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
    given = dense_inputs(grad=True)
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
    q, k, v = dense_inputs(grad=True)
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
    q, k, v = dense_inputs(dtype=torch.bfloat16)
    report = fa_inductor.explain(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0], target="sm_90a"
    )(q, k, v)
    report.assert_no_graph_breaks()
    assert [(site.kernel, site.spec and site.spec.causal) for site in report.sites] == [
        ("fa4", "bottom_right")
    ]


# --- Import order, and what stays as it is --------------------------------------------------------


def test_eager_function_is_the_original() -> None:
    torch.compile(lambda *x: flash_attn_func(*x), backend=Recorder())(*dense_inputs())
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
