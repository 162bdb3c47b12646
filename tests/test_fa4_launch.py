"""Repeating an entry's launches: the same results, and never for what was not seen before.

CPU functions stand in for FA4: entries with a `compile_cache`, as FA4's have. Which calls are
repeated at all is held by `test_op_calls.py`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fa_inductor.kernels.fa4_launch import Repeat, recording
from poison import poisoned


class AuxData(NamedTuple):
    """As FA4 passes with every forward."""

    tensors: list[Tensor] | None = None
    scalars: tuple[float, ...] | None = None


class SinkTensors(NamedTuple):
    """As FA4's `LearnableSinkBwdTensors`: a temporary, tensors of the caller, and a result."""

    total: Tensor
    sink: Tensor
    result: Tensor
    factor: float = 2.0


class Entry:
    """Fills `out` with scale · (x + y) in two kernels, through a temporary and a sum from zero."""

    def __init__(self, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.compile_cache: dict[str, Callable[..., None]] = {}
        self.prepare = prepare
        self.entered = 0

    def __call__(self, x: Tensor, y: Tensor, out: Tensor, scale: float) -> None:
        self.entered += 1
        x = self.prepare(x)
        product, total = torch.empty(x.shape), torch.zeros(x.shape)
        if "scale" not in self.compile_cache:
            self.compile_cache["scale"] = lambda x, to, scale, _: to.copy_(x * scale)
            self.compile_cache["add"] = self._add
        self.compile_cache["scale"](x, product, scale, None)
        self.compile_cache["add"](product, y, total, out, scale)

    @staticmethod
    def _add(product: Tensor, y: Tensor, total: Tensor, out: Tensor, scale: float) -> None:
        total += product + y * scale
        out.copy_(total)


SIZE = (2, 8)
Made = tuple[Tensor, Tensor, Tensor]


def tensors(*size: int) -> Made:
    """x, y and memory for out."""
    size = size or SIZE
    return torch.randn(size), torch.randn(size), torch.full(size, float("nan"))


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


def enter(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Any:
    """What was noted of these calls of kernels."""
    entry = Entry()
    entry.compile_cache.update({str(i): kernel for i, (kernel, _) in enumerate(calls)})
    with recording((entry,)) as noted:
        for i, (_, arguments) in enumerate(calls):
            entry.compile_cache[str(i)](*arguments)
    return noted


def copy(source: Tensor, to: Tensor) -> None:
    to.copy_(source.reshape(to.shape))


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


# --- Tuples ---------------------------------------------------------------------------------------

TUPLES: dict[str, Callable[[Tensor], Any]] = {
    "named, without tensors": lambda tensor: AuxData(scalars=(1.0,)),
    "named, with a tensor": lambda tensor: AuxData(tensor),
    "with a tensor": lambda tensor: (tensor, 2),
    "a list with a tensor": lambda tensor: [None, tensor],
    "named, with a list with a tensor": lambda tensor: AuxData([tensor]),
    "named in named, with a tensor": lambda tensor: AuxData(AuxData(tensor)),
}


@pytest.mark.parametrize("name", TUPLES)
def test_tuples_of_arguments(name: str) -> None:
    """The same again, with the tensors of the call at hand."""
    make = TUPLES[name]
    seen: list[Any] = []
    x, _, out = tensors()
    noted = enter([(lambda x, to, more: (seen.append(more), copy(x, to)), (x, out, make(x)))])
    repeat = noted.repeat((x, out))
    assert repeat is not None
    again, _, out = tensors()
    repeat((again, out))
    torch.testing.assert_close(out, again)
    assert pointers(seen[1]) == pointers(make(again))
    assert type(seen[1]) is type(make(again))


def pointers(value: Any) -> Any:
    """`value` with the pointers of tensors in their place."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return [pointers(each) for each in value] if isinstance(value, (list, tuple)) else value


def reduce_sink(result: Tensor, more: SinkTensors) -> None:
    result.copy_(more.total)
    more.result.copy_(more.total.sum(1) * more.sink * more.factor)


def test_a_result_that_fa4_allocates_lands_in_the_callers_tensor() -> None:
    """FA4's gradient of the sink, in a named tuple beside a temporary and the sink itself; never
    where FA4 gave a copy of what its kernel wrote."""
    (x, _, out), sink, made = tensors(), torch.randn(2), torch.empty(2)
    total = torch.zeros(SIZE)
    noted = enter([(copy, (x, total)), (reduce_sink, (out, SinkTensors(total, sink, made)))])
    assert noted.repeat((x, sink, out, None, None), {4: made.clone()}) is None
    repeat = noted.repeat((x, sink, out, None, None), {4: made})
    assert repeat is not None
    before = made.clone()
    with poisoned():
        (x, _, out), sink, result = tensors(), torch.randn(2), torch.full((2,), float("nan"))
        repeat((x, sink, out, None, result))
    torch.testing.assert_close(out, x)
    torch.testing.assert_close(result, 2 * x.sum(1) * sink)
    torch.testing.assert_close(made, before, rtol=0, atol=0)


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
