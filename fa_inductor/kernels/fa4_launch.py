"""Repeating the launches of an FA4 entry without its Python.

`_flash_attn_fwd` and `_flash_attn_bwd` check their arguments, choose tiles, build cache keys, make
temporaries and then call compiled kernels with positional arguments. For the same shapes, strides,
dtype, device and flags they do so again with the same kernels, constants and sizes of temporaries:
that sequence of calls is kept, and made directly from then on.

Everything that the entries look at must be in the caller's key, but the pointers' alignment,
which is checked on each call. A sequence in which FA4 copied an input is never kept. Nothing is
noted while two inputs share their memory, as it could not be told which of them is meant.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CAPACITY = 1024
_ALIGNMENT = 16  # bytes, `maybe_contiguous` in flash_attn/cute/cute_dsl_utils.py


@dataclass(frozen=True)
class _Slot:
    """A tensor argument: one of the caller's (`index` counts them), or a temporary after those."""

    index: int


@dataclass(frozen=True)
class _Temporary:
    """Memory between two kernels. One that the first kernel does not see must start as zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zero: bool


@dataclass(frozen=True)
class _Sequence:
    calls: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]
    temporaries: tuple[_Temporary, ...]

    def run(self, tensors: Sequence[Tensor]) -> None:
        memory = list(tensors)
        device = tensors[0].device
        for each in self.temporaries:
            make = torch.zeros if each.zero else torch.empty
            memory.append(make(each.shape, dtype=each.dtype, device=device))
        for kernel, template in self.calls:
            kernel(*[memory[a.index] if type(a) is _Slot else a for a in template])


class LaunchCache:
    """Sequences of launches by the caller's key, the least recently made dropped first.

    None stands for a key whose sequence cannot be repeated.
    """

    def __init__(self) -> None:
        self._sequences: OrderedDict[Hashable, _Sequence | None] = OrderedDict()
        self._lock = threading.Lock()
        self.repeated = 0

    def repeat(self, key: Hashable, tensors: Sequence[Tensor]) -> bool:
        """Launch as before; False when there is no such sequence or a pointer is not aligned."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return False
        if not _aligned(tensors):
            return False
        sequence.run(tensors)
        self.repeated += 1
        return True

    @contextmanager
    def recording(
        self, entries: Sequence[Any], key: Hashable, tensors: Sequence[Tensor]
    ) -> Iterator[None]:
        """Note the launches made inside through the compile caches of `entries`."""
        distinct = len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
        if key in self._sequences or not distinct or not _aligned(tensors):
            yield  # known, or it would say nothing about other tensors of the same metadata
            return
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        with self._lock, ExitStack() as stack:
            for entry in entries:
                stack.callback(setattr, entry, "compile_cache", entry.compile_cache)
                entry.compile_cache = _Recorder(entry.compile_cache, calls)
            yield
            self._sequences[key] = _repeatable(calls, tensors)
            while len(self._sequences) > _CAPACITY:
                self._sequences.popitem(last=False)


class _Recorder:
    """Stands in for one of FA4's compile caches, and notes the calls that one thread makes."""

    def __init__(self, cache: Any, calls: list[Any]) -> None:
        self.cache, self.calls = cache, calls
        self.thread = threading.get_ident()

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel

    def __getitem__(self, key: Any) -> Any:
        kernel = self.cache[key]
        if threading.get_ident() != self.thread:
            return kernel

        def call(*arguments: Any) -> Any:
            self.calls.append((kernel, arguments))
            return kernel(*arguments)

        return call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def _aligned(tensors: Sequence[Tensor]) -> bool:
    pointers = 0
    for tensor in tensors:
        pointers |= tensor.data_ptr()
    return pointers % _ALIGNMENT == 0


def _holds_tensor(argument: Any) -> bool:
    """Whether a tuple or list of arguments, FA4's `AuxData` among them, has a tensor in it."""
    if isinstance(argument, (tuple, list)):
        return any(map(_holds_tensor, argument))
    return isinstance(argument, Tensor)


def _repeatable(
    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], tensors: Sequence[Tensor]
) -> _Sequence | None:
    """The calls as a sequence, if each of `tensors` is used in them as it is."""
    slots = {tensor.data_ptr(): _Slot(index) for index, tensor in enumerate(tensors)}
    temporaries: list[_Temporary] = []
    used: set[int] = set()
    templates = []
    for number, (kernel, arguments) in enumerate(calls):
        template: list[Any] = []
        for argument in arguments:
            if not isinstance(argument, Tensor):
                if _holds_tensor(argument):
                    return None
                template.append(argument)
                continue
            slot = slots.get(argument.data_ptr())
            if slot is None:
                if not argument.is_contiguous():
                    return None
                slot = slots[argument.data_ptr()] = _Slot(len(tensors) + len(temporaries))
                made = _Temporary(tuple(argument.shape), argument.dtype, zero=number > 0)
                temporaries.append(made)
            elif slot.index < len(tensors):
                own = tensors[slot.index]
                if (own.shape, own.stride()) != (argument.shape, argument.stride()):
                    return None
            used.add(slot.index)
            template.append(slot)
        templates.append((kernel, tuple(template)))
    if not used.issuperset(range(len(tensors))):
        return None
    return _Sequence(tuple(templates), tuple(temporaries))
