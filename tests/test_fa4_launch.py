"""Repeating an entry's launches: the same results, and never for what was not seen before.

CPU functions stand in for FA4: entries with a `compile_cache`, as FA4's have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fa_inductor.kernels import fa4_launch
from fa_inductor.kernels.fa4_launch import LaunchCache
from poison import poisoned


class AuxData(NamedTuple):
    tensors: list[Tensor] | None = None
    scalars: tuple[float, ...] | None = None


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


def run(cache: LaunchCache, entry: Entry, x: Tensor, y: Tensor, key: Any = "key") -> Tensor:
    out = torch.empty(x.shape)
    tensors = (x, y, out)
    if not cache.repeat(key, tensors):
        with cache.recording((entry,), key, tensors):
            entry(x, y, out, 3.0)
    return out


def test_a_repeated_sequence_gives_the_same_without_the_entry() -> None:
    cache, entry = LaunchCache(), Entry()
    with poisoned():
        for _ in range(4):
            x, y = torch.randn(2, 8), torch.randn(2, 8)
            torch.testing.assert_close(run(cache, entry, x, y), 3 * (x + y))
    assert (entry.entered, cache.repeated) == (1, 3)
    assert isinstance(entry.compile_cache, dict)


def test_another_key_takes_the_entry() -> None:
    cache, entry = LaunchCache(), Entry()
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    for key in ("one", "two", "one"):
        run(cache, entry, x, y, key)
    assert (entry.entered, cache.repeated) == (2, 1)


def test_a_pointer_that_is_not_aligned_takes_the_entry() -> None:
    cache, entry = LaunchCache(), Entry()
    x, y, buffer = torch.randn(2, 8), torch.randn(2, 8), torch.randn(17)
    run(cache, entry, x, y)
    shifted = buffer[1:].view(2, 8)
    torch.testing.assert_close(run(cache, entry, shifted, y), 3 * (shifted + y))
    assert (entry.entered, cache.repeated) == (2, 0)
    torch.testing.assert_close(run(cache, entry, x, y), 3 * (x + y))
    assert (entry.entered, cache.repeated) == (2, 1)


def test_an_input_that_was_copied_is_never_kept() -> None:
    cache, entry = LaunchCache(), Entry(prepare=torch.clone)
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    for _ in range(2):
        torch.testing.assert_close(run(cache, entry, x, y), 3 * (x + y))
    assert (entry.entered, cache.repeated) == (2, 0)


def test_an_input_that_was_viewed_otherwise_is_never_kept() -> None:
    cache, entry = LaunchCache(), Entry(prepare=lambda x: x.mT.contiguous().mT)
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    reshaped = Entry(prepare=lambda x: x.as_strided((2, 8), (8, 1)))
    for each in (entry, reshaped):
        for _ in range(2):
            square = torch.randn(2, 16)[:, :8] if each is reshaped else x
            run(cache, each, square, y, key=id(each))
    assert cache.repeated == 0


def test_inputs_that_share_memory_are_never_kept() -> None:
    """Kept, the second call would read one tensor for both."""
    cache, entry = LaunchCache(), Entry()
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    torch.testing.assert_close(run(cache, entry, x, x), 6 * x)
    for repeated in (0, 1):  # noted from the first call that can be told apart
        torch.testing.assert_close(run(cache, entry, x, y), 3 * (x + y))
        assert (entry.entered, cache.repeated) == (2, repeated)
    torch.testing.assert_close(run(cache, entry, y, y), 6 * y)


@pytest.mark.parametrize("holds_tensor", [False, True])
def test_a_tuple_is_kept_unless_a_tensor_is_in_it(holds_tensor: bool) -> None:
    """FA4 passes an `AuxData`, a named tuple, with every call."""
    cache, entry = LaunchCache(), Entry()
    entry.compile_cache["scale"] = lambda x, to, scale, _: to.copy_(x * scale)
    entry.compile_cache["add"] = lambda *arguments: Entry._add(*arguments[:4], 3.0)
    x, y, out = torch.randn(2, 8), torch.randn(2, 8), torch.empty(2, 8)
    with cache.recording((entry,), "key", (x, y, out)):
        product, total = torch.empty(2, 8), torch.zeros(2, 8)
        entry.compile_cache["scale"](x, product, 3.0, AuxData())
        nested = AuxData([torch.ones(1)]) if holds_tensor else AuxData()
        entry.compile_cache["add"](product, y, total, out, nested)
    assert cache.repeat("key", (x, y, out)) is not holds_tensor
    torch.testing.assert_close(out, 3 * (x + y))


def test_calls_of_another_thread_are_not_noted() -> None:
    cache, entry = LaunchCache(), Entry()
    x, y, out = torch.randn(2, 8), torch.randn(2, 8), torch.empty(2, 8)
    others = [torch.randn(2, 8), torch.randn(2, 8), torch.empty(2, 8)]
    with cache.recording((entry,), "key", (x, y, out)):
        other = threading.Thread(target=entry, args=(*others, 5.0))
        other.start()
        other.join()
        entry(x, y, out, 3.0)
    torch.testing.assert_close(others[2], 5 * (others[0] + others[1]))
    torch.testing.assert_close(run(cache, entry, y, x), 3 * (x + y))
    assert cache.repeated == 1


def test_a_failing_entry_leaves_nothing_behind() -> None:
    cache, entry = LaunchCache(), Entry()
    x, y, out = torch.randn(2, 8), torch.randn(2, 8), torch.empty(2, 8)

    def failing() -> None:
        with cache.recording((entry,), "key", (x, y, out)):
            entry(x, y, out, 3.0)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        failing()
    assert isinstance(entry.compile_cache, dict)
    assert not cache.repeat("key", (x, y, out))


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4_launch, "_CAPACITY", 3)
    cache, entry = LaunchCache(), Entry()
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    for key in range(6):
        run(cache, entry, x, y, key)
    assert len(cache._sequences) == 3
    for key in (5, 0):  # the newest is there, the oldest is made again, right
        torch.testing.assert_close(run(cache, entry, x, y, key), 3 * (x + y))
    assert (entry.entered, cache.repeated) == (7, 1)
