"""Repeated calls of the ops: the same results, and for the very same metadata only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_inputs import attend, qkv
from repeating_kernel import (
    NAME,
    Call,
    Repeating,
    differentiated,
    full,
    install,
    plain,
    run,
    with_changed,
)
from torch import Tensor

from fa_inductor import op_calls, ops
from poison import poisoned


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Repeating:
    return install(monkeypatch)


CALLS: dict[str, Callable[[], Call]] = {
    "plain": plain,
    "full": full,
    "without lse": lambda: {**full(), "with_lse": False},
    "plain, without lse": lambda: {**plain(), "with_lse": False},
    "gradients": lambda: differentiated(plain()),
    "gradients without that of lse": lambda: differentiated(plain(), with_lse=False),
    "gradients of all": lambda: differentiated(full()),
    "gradients of bias alone": lambda: {**differentiated(full()), "sink_grad": False},
    "gradients of sink alone": lambda: {**differentiated(full()), "bias_grad": False},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_gives_the_same_for_other_tensors(name: str, kernel: Repeating) -> None:
    for repeated in range(4):
        run(CALLS[name]())
        assert kernel.ways() == (1, repeated)
    assert op_calls.calls.repeated == 3


def test_through_autograd(kernel: Repeating) -> None:
    """Forward and backward of a training step, inputs that require gradients."""
    for repeated in range(3):
        tensors = [tensor.requires_grad_() for tensor in qkv()]
        out, lse = attend(dict(zip("qkv", tensors, strict=True)), kernel=NAME)
        assert out.requires_grad
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), tensors)
        out, lse = attend(dict(zip("qkv", tensors, strict=True)))
        expected = torch.autograd.grad(out.square().sum() + lse.sum(), tensors)
        torch.testing.assert_close(grads, expected, rtol=0, atol=0)
        assert kernel.ways() == (2, 2 * repeated)


def test_inference_is_repeated_on_bshd(kernel: Repeating) -> None:
    for repeated in range(3):
        q, k, v = (tensor.transpose(1, 2) for tensor in qkv())
        with poisoned():
            out = ops.attention_inference(q, k, v, None, "none", "BHSD", NAME)
        expected = ops.attention_inference(q, k, v, None, "none", "BHSD", "reference")
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        assert out.stride() == expected.stride()
        assert kernel.ways() == (1, repeated)


# --- What is a class of calls ---------------------------------------------------------------------


def in_another_order(tensor: Tensor) -> Tensor:
    """The same values, (B, H, S, ...) contiguous, which no input here is."""
    return tensor.mT.contiguous().mT if tensor.dim() == 3 else tensor.contiguous()


def double(tensor: Tensor) -> Tensor:
    return tensor.double()


CHANGES_OF_STRIDES = {
    name: with_changed(**{name: in_another_order})
    for name in ("q", "k", "v", "out", "lse", "grad_out", "grad_lse")
}
CHANGES: dict[str, Callable[[Call], Call]] = {
    "dtype": with_changed(q=double, k=double, v=double),
    **{f"{name}'s strides": CHANGES_OF_STRIDES[name] for name in "qkv"},
    "k's and v's size": with_changed(k=lambda k: k[:, :1], v=lambda v: v[:, :1]),
    "bias's strides": with_changed(bias=lambda bias: bias.mT.contiguous().mT),
    "bias's size": with_changed(bias=lambda bias: bias[:1]),
    "bias's dtype": with_changed(bias=double),
    "bias expanded": with_changed(bias=lambda bias: bias.expand(2, 4, 5, 6)),
    "no bias": with_changed(bias=None),
    "sink's stride": with_changed(sink=lambda sink: sink.repeat_interleave(2)[::2]),
    "sink's dtype": with_changed(sink=double),
    "no sink": with_changed(sink=None),
    "no seqlens_q": with_changed(seqlens_q=None),
    "no seqlens_k": with_changed(seqlens_k=None),
    "seqlens_k expanded": with_changed(seqlens_k=lambda given: given[:1].expand(2)),
    "rng's stride": with_changed(rng=lambda given: given.repeat_interleave(2)[::2]),
    "no rng": with_changed(rng=None, dropout_p=0.0),
    "dropout_p": with_changed(dropout_p=0.5),
    "scale": with_changed(scale=0.25),
    "default scale": with_changed(scale=None),
    "causal": with_changed(causal="top_left"),
    "not causal": with_changed(causal="none"),
    "window_left": with_changed(window_left=2),
    "no window_left": with_changed(window_left=None),
    "window_right": with_changed(window_right=-1),
    "softcap": with_changed(softcap=3.0),
    "kernel": with_changed(kernel="another"),
}
FORWARD_CHANGES = {
    **CHANGES,
    "out_order": with_changed(out_order="SBHD"),
    "with_lse": with_changed(with_lse=False),
}
BACKWARD_CHANGES = {
    **CHANGES,
    "dtype": with_changed(
        **dict.fromkeys(("q", "k", "v", "out", "lse", "grad_out", "grad_lse"), double)
    ),
    "no bias": with_changed(bias=None, bias_grad=False),
    "no sink": with_changed(sink=None, sink_grad=False),
    "bias_grad": with_changed(bias_grad=False),
    "sink_grad": with_changed(sink_grad=False),
    "deterministic": with_changed(deterministic=True),
    "no grad_lse": with_changed(grad_lse=None),
    **{f"{name}'s strides": CHANGES_OF_STRIDES[name] for name in CHANGES_OF_STRIDES},
}


def assert_another_class(kernel: Repeating, call: Call, change: Callable[[Call], Call]) -> None:
    run(call)
    run(change(call))
    assert kernel.ways() == (2, 0)
    run(call)
    run(change(call))
    assert kernel.ways() == (2, 2)


@pytest.mark.parametrize("name", FORWARD_CHANGES)
def test_what_makes_another_class_of_forwards(name: str, kernel: Repeating) -> None:
    """Each is entered once, and repeated as itself."""
    assert_another_class(kernel, full(), FORWARD_CHANGES[name])


@pytest.mark.parametrize("name", BACKWARD_CHANGES)
def test_what_makes_another_class_of_backwards(name: str, kernel: Repeating) -> None:
    assert_another_class(kernel, differentiated(full()), BACKWARD_CHANGES[name])


EXTRAS = ("bias", "sink", "seqlens_q", "seqlens_k", "rng")


@pytest.mark.parametrize("name", EXTRAS)
def test_each_extra_alone_is_a_class_of_forwards(name: str, kernel: Repeating) -> None:
    assert_another_class(kernel, plain(), with_changed(**{name: full()[name]}))


@pytest.mark.parametrize("name", [*EXTRAS, "grad_lse"])
def test_each_extra_alone_is_a_class_of_backwards(name: str, kernel: Repeating) -> None:
    call = differentiated(plain(), with_lse=False)
    assert_another_class(kernel, call, with_changed(**{name: differentiated(full())[name]}))


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "grad_out"])
def test_strides_where_there_is_no_extra(name: str, kernel: Repeating) -> None:
    """What is compared is told from the rest faster there."""
    call = differentiated(plain(), with_lse=False)
    assert_another_class(kernel, call, CHANGES_OF_STRIDES[name])
    if name in "qkv":
        kernel.entered = kernel.repeated = 0
        assert_another_class(kernel, plain(), CHANGES_OF_STRIDES[name])


def test_inference_is_a_class_of_its_own(kernel: Repeating) -> None:
    """It means other numbers by the same tensors."""
    q, k, v = (torch.randn(2, 4, 4, 8) for _ in range(3))
    numbers = {"scale": 1.0, "causal": "bottom_right", "kernel": NAME}
    for _ in range(2):
        out, _ = attend({"q": q, "k": k, "v": v}, **numbers, with_lse=False)
        swapped = ops.attention_inference(q, k, v, 1.0, "bottom_right", "BSHD", NAME)
        assert not out.equal(swapped)
    assert kernel.ways() == (2, 2)
