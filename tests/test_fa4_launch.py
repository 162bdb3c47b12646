"""Repeating an entry's launches: the same results, and never for what was not seen before.

Which calls are repeated at all is held by `test_op_calls.py`.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from fa4_stub import SIZE, Entry, Made, copy, enter, tensors
from torch import Tensor

from fa_inductor.kernels.fa4_launch import Repeat, recording
from poison import poisoned


def record(entry: Entry, given: Made) -> Repeat | None:
    """Enter once, right, and give what repeats it."""
    with recording((entry,)) as noted:
        entry(*given, 3.0)
    assert_right(given)
    return noted.repeat(given)


def recorded(entry: Entry, given: Made) -> Repeat:
    repeat = record(entry, given)
    assert repeat is not None
    return repeat


def assert_right(given: Made) -> None:
    x, y, out = given
    torch.testing.assert_close(out, 3 * (x + y))


def test_a_repeated_sequence_gives_the_same_without_the_entry() -> None:
    entry = Entry()
    with poisoned():
        repeat = recorded(entry, tensors())
        for _ in range(3):
            given = tensors()
            repeat(given)
            assert_right(given)
    assert entry.entered == 1
    held = weakref.ref(given[0])
    del given
    assert held() is None, "kept beyond its call"


@pytest.mark.parametrize("repeatable", [True, False])
def test_nothing_of_a_call_waits_for_the_collector(repeatable: bool) -> None:
    """CUDA graph trees take a tensor that does for an output of the graph, and refuse the graph
    once it is collected: the first training step of a process under "reduce-overhead"."""
    entry, given = Entry(), tensors()
    gc.collect()
    gc.disable()
    try:
        with recording((entry,)) as noted:
            entry(*given, 3.0)
        used = [each for _, arguments in noted.calls for each in arguments]
        held = [weakref.ref(each) for each in used if isinstance(each, Tensor)]
        repeat = noted.repeat(given if repeatable else (*given, torch.ones(1)))
        assert (repeat is not None) == repeatable
        del noted, given, used
        assert len(held) > 3  # temporaries too
        assert [each() for each in held] == [None] * len(held)
    finally:
        gc.enable()


def test_tensors_of_rank_4_are_seen_as_the_entry_saw_them() -> None:
    """The op has (B, H, S, D), FA4 was given transposed views; offsets are each call's own."""
    entry = Entry()

    def of_the_op() -> Made:
        packed = torch.randn(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
        out = torch.full((2, 5, 4, 8), float("nan")).transpose(1, 2)
        return packed[1], packed[2].requires_grad_(), out

    repeat = recorded(entry, tuple(tensor.detach().transpose(1, 2) for tensor in of_the_op()))
    with poisoned():
        given = of_the_op()
        repeat(given)
    assert_right(tuple(tensor.detach() for tensor in given))
    assert given[2].grad_fn is None


def test_what_the_entry_does_not_take_is_skipped() -> None:
    """`given` has a place for each of the op's tensors, None where there is none."""
    entry = Entry()
    x, y, out = tensors()
    with recording((entry,)) as noted:
        entry(x, y, out, 3.0)
    repeat = noted.repeat((None, x, None, y, out, None))
    assert repeat is not None
    repeat((torch.ones(1), out.clone(), None, y, out, None))
    torch.testing.assert_close(out, 9 * (x + y) + 3 * y)


def test_inputs_with_a_history_are_detached() -> None:
    """Kernels are handed tensors that autograd does not watch."""
    seen: list[bool] = []
    entry = Entry()
    entry.compile_cache["scale"] = lambda x, to, scale, _: (
        seen.append(x.requires_grad),
        to.copy_(x * scale),
    )
    entry.compile_cache["add"] = entry._add
    repeat = recorded(entry, tensors())
    x, y, out = tensors()
    repeat((x.requires_grad_(), y, out))
    assert seen == [False, False]
    assert not out.requires_grad


# --- Temporaries ----------------------------------------------------------------------------------


def test_temporaries_that_the_first_kernel_does_not_see_start_as_zero() -> None:
    """FA4 fills some with zeros in Python; those that its first kernel gets, it fills itself."""
    repeat = recorded(Entry(), tensors())
    assert [each.zero for each in repeat.temporaries] == [False, True]
    with poisoned():  # what is not asked to be zero is NaN
        for _ in range(2):  # and zero each time
            given = tensors()
            repeat(given)
            assert_right(given)


OTHER_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshaped": lambda temporary: temporary.view(8, 2),
    "a part": lambda temporary: temporary[:1],
    "transposed": lambda temporary: temporary.mT,
    "of another dtype": lambda temporary: temporary.view(torch.int32),
}


@pytest.mark.parametrize("view", OTHER_VIEWS.values(), ids=OTHER_VIEWS.keys())
def test_a_temporary_that_was_viewed_otherwise_is_never_repeated(
    view: Callable[[Tensor], Tensor],
) -> None:
    """Two views of one temporary are not told apart."""
    x, _, out = tensors()
    temporary = torch.empty(SIZE)
    noted = enter([(copy, (x, temporary)), (lambda part, to: to.fill_(1), (view(temporary), out))])
    assert noted.repeat((x, out)) is None


def test_a_temporary_that_is_not_dense_is_never_repeated() -> None:
    x, _, out = tensors()
    temporary = torch.empty(2, 16)[:, :8]
    noted = enter([(copy, (x, temporary)), (copy, (temporary, out))])
    assert noted.repeat((x, out)) is None


# --- What is never repeated -----------------------------------------------------------------------

PREPARATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "copied": torch.clone,
    "copied with other strides": lambda x: x.mT.contiguous().mT,
    "viewed with other strides": lambda x: x.as_strided((2, 8), (8, 1)),
}


@pytest.mark.parametrize("prepare", PREPARATIONS.values(), ids=PREPARATIONS.keys())
def test_an_input_that_was_not_used_as_it_is(prepare: Callable[[Tensor], Tensor]) -> None:
    entry = Entry(prepare)
    x, y, out = torch.randn(2, 16)[:, :8], *tensors()[1:]
    with recording((entry,)) as noted:
        entry(x, y, out, 3.0)
    assert noted.repeat((x, y, out)) is None


def test_an_input_that_was_seen_as_another_dtype() -> None:
    x, _, out = tensors()
    noted = enter([(copy, (x.view(torch.int32), out))])
    assert noted.repeat((x, out)) is None


def test_an_input_that_no_kernel_saw() -> None:
    """It may have been looked at in Python."""
    x, y, out = tensors()
    noted = enter([(copy, (x, out))])
    assert noted.repeat((x, y, out)) is None


def test_inputs_that_share_memory() -> None:
    """Repeated, another call would read one tensor for both."""
    entry = Entry()
    x, y, out = tensors()
    assert record(entry, (x, x, out)) is None
    assert record(entry, (out.zero_(), y, out.clone())) is not None
    assert record(entry, (x, x[:], out)) is None


# --- Around it ------------------------------------------------------------------------------------


def test_calls_of_another_thread_are_not_noted() -> None:
    entry = Entry()
    given, others = tensors(), tensors()
    with recording((entry,)) as noted:
        other = threading.Thread(target=entry, args=(*others, 5.0))
        other.start()
        other.join()
        entry(*given, 3.0)
    torch.testing.assert_close(others[2], 5 * (others[0] + others[1]))
    assert len(noted.calls) == 2
    assert noted.repeat(others) is None
    repeat = noted.repeat(given)
    assert repeat is not None
    given = tensors()
    repeat(given)
    assert_right(given)


def test_a_failing_entry_leaves_nothing_behind() -> None:
    """Neither in the entry nor locked."""
    entry = Entry()
    cache, given = entry.compile_cache, tensors()

    def failing() -> None:
        with recording((entry,)):
            entry(*given, 3.0)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        failing()
    assert entry.compile_cache is cache
    assert record(entry, tensors()) is not None


def test_several_entries_are_noted_in_the_order_of_their_calls() -> None:
    """FA4's backward is three."""
    first, second = Entry(), Entry()
    x, y, out = tensors()
    middle = torch.empty(SIZE)
    with recording((first, second)) as noted:
        second(x, y, middle, 3.0)
        first(middle, y, out, 1.0)
    repeat = noted.repeat((x, y, out))
    assert repeat is not None
    x, y, out = tensors()
    repeat((x, y, out))
    torch.testing.assert_close(out, 3 * x + 4 * y)
