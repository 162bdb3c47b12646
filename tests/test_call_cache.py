"""When a call is repeated and when it takes the long way, and how much is remembered."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_inputs import attend, in_order
from repeating_kernel import (
    HERE,
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
from torch.autograd import forward_ad

from fa_inductor import call_cache, op_calls
from fa_inductor.errors import DerivativeError, ShapeError
from fa_inductor.kernels import reference


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Repeating:
    return install(monkeypatch)


# --- When the long way is taken -------------------------------------------------------------------


def misaligned(tensor: Tensor) -> Tensor:
    """The same values and strides, one element past an aligned pointer."""
    memory = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size() + 1)
    memory = memory.to(tensor.dtype)[1:]
    return memory.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sink", "seqlens_q", "seqlens_k"])
def test_a_misaligned_pointer(name: str, kernel: Repeating) -> None:
    call = full()
    run(call)
    run(with_changed(**{name: misaligned})(call))
    assert kernel.ways() == (2, 0)
    run(call)
    assert kernel.ways() == (2, 1)


@pytest.mark.parametrize("name", ["out", "lse", "grad_out", "grad_lse", "k", "bias"])
def test_a_misaligned_pointer_in_the_backward(name: str, kernel: Repeating) -> None:
    call = differentiated(full())
    run(call)
    run(with_changed(**{name: misaligned})(call))
    assert kernel.ways() == (2, 0)
    run(call)
    assert kernel.ways() == (2, 1)


@pytest.mark.parametrize("make", [plain, lambda: differentiated(plain())], ids=["out", "gradients"])
def test_another_current_device(
    make: Callable[[], Call], kernel: Repeating, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory would be that one's, and the launch on its stream."""
    run(make())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: HERE + 1)
    run(make())
    assert kernel.ways() == (2, 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: HERE)
    run(make())
    assert kernel.ways() == (2, 1)


def test_a_thread_does_not_repeat_what_another_remembers(kernel: Repeating) -> None:
    run(plain())
    seen: list[Any] = []

    def work() -> None:
        for _ in range(2):
            run(plain())
            seen.append(kernel.ways())
        seen.append(op_calls.calls.repeated)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(2, 0), (2, 1), 1]
    run(plain())
    assert kernel.ways() == (2, 2)
    assert op_calls.calls.repeated == 1


def test_what_fails_or_cannot_be_repeated_is_not_remembered(
    kernel: Repeating, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "forward", reference.forward)  # returns None
        for _ in range(2):
            run(plain())
    with pytest.raises(ShapeError):
        attend({**plain(), "bias": torch.randn(5, 6)})
    attend({**plain(), "q": torch.randn(2, 4, 0, 8)})  # nothing to launch
    assert kernel.ways() == (0, 0)
    assert len(op_calls.calls.by_key) == 0


def test_a_tangent_is_refused_by_a_remembered_call_too(kernel: Repeating) -> None:
    call = plain()
    run(call)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(call["k"], torch.ones_like(call["k"]))
        with torch.no_grad(), pytest.raises(DerivativeError):
            attend({**call, "k": dual})
    assert kernel.ways() == (1, 0)


# --- How much is remembered -----------------------------------------------------------------------


def by_length(length: int) -> Call:
    return {**plain(), "q": in_order((2, 4, length, 8), (0, 2, 1), torch.float32)}


def by_scale(scale: int) -> Call:
    return {**plain(), "scale": float(scale)}


@pytest.mark.parametrize("make", [by_length, by_scale], ids=["tensors differ", "numbers differ"])
def test_only_so_many_classes_the_least_recently_used_dropped(
    make: Callable[[int], Call], kernel: Repeating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_cache, "CAPACITY", 3)
    for number in (1, 2, 3):
        run(make(number))
    assert kernel.ways() == (3, 0)
    run(make(1))  # used again: 2 is dropped for 4
    run(make(4))
    assert kernel.ways() == (4, 1)
    run(make(1))
    run(make(3))
    assert kernel.ways() == (4, 3)
    run(make(2))
    assert kernel.ways() == (5, 3)
    for number in range(20, 30):
        run(make(number))
    assert len(op_calls.calls.by_key) == 3
    assert len(op_calls.calls.recent) <= 3


def test_a_class_that_is_always_used_is_never_dropped(
    kernel: Repeating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_cache, "CAPACITY", 3)
    for number in range(2, 12):
        run(by_scale(1))
        run(by_scale(number))
    assert kernel.ways() == (11, 9)


def test_a_class_that_was_used_often_is_dropped_at_last(
    kernel: Repeating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_cache, "CAPACITY", 3)
    for number in (1, 1, 1, 2, 3, 4, 5, 6, 1):
        run(by_scale(number))
    assert kernel.ways() == (7, 2)


def test_nothing_of_a_call_is_kept(kernel: Repeating) -> None:
    """No tensor outlives its call, first or repeated."""
    for make in (full, lambda: differentiated(full())):
        for _ in range(2):
            call = make()
            held = [weakref.ref(tensor) for tensor in run(call)]
            held += [weakref.ref(each) for each in call.values() if isinstance(each, Tensor)]
            del call
            assert [each() for each in held] == [None] * len(held)


def test_what_was_forgotten_goes_the_long_way(kernel: Repeating) -> None:
    """Whichever thread forgets."""
    for _ in range(2):
        run(by_scale(1))
    assert kernel.ways() == (1, 1)
    thread = threading.Thread(target=call_cache.forget)
    thread.start()
    thread.join()
    run(by_scale(1))
    assert kernel.ways() == (2, 1)
