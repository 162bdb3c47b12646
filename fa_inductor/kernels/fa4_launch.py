"""Repeating the launches of an FA4 entry without its Python.

`_flash_attn_fwd` and `_flash_attn_bwd` check their arguments, choose tiles, build cache keys, make
temporaries and then call compiled kernels with positional arguments. For the same shapes, strides,
dtype, device and flags they do so again with the same kernels, constants and sizes of temporaries:
that sequence of calls is noted, and made directly from then on.

The caller repeats a sequence only for tensors of the same metadata with aligned pointers. Calls in
which FA4 copied an input are not repeatable, nor are those in which two inputs share their memory,
as it could not be told which of them is meant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..torch_compat import empty_on_current_gpu, view_as


@dataclass(frozen=True)
class _Slot:
    """A tensor argument: one of the caller's (`index` counts them), or a temporary after those."""

    index: int


@dataclass(frozen=True)
class _Temporary:
    """Memory between two kernels. One that the first kernel does not see must start as zero."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zero: bool

    def allocate(self, device: torch.device) -> Tensor:
        """On the current GPU, which a repeated call's is."""
        if device.type == "cuda":
            made = empty_on_current_gpu(self.shape, self.stride, self.dtype)
        else:
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.zero_() if self.zero else made


_Calls = Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]


class Repeat:
    """A sequence of launches; called with the op's tensors, (B, H, S, D) where they have rank 4.

    views: (index, size, strides) of each of them that FA4 takes, size None where it takes it as
        it is.
    """

    def __init__(
        self,
        calls: _Calls,
        temporaries: Sequence[_Temporary],
        views: Sequence[tuple[int, tuple[int, ...] | None, tuple[int, ...]]],
        device: torch.device,
    ) -> None:
        self.calls = [(kernel, list(template), *_slots(template)) for kernel, template in calls]
        self.temporaries, self.views, self.device = temporaries, views, device
        self.indices = [index for index, _, _ in views]

    def __call__(self, tensors: Sequence[Any]) -> None:
        self._launch(
            [
                _without_history(tensors[index])
                if size is None
                else view_as(tensors[index], size, stride, 0)
                for index, size, stride in self.views
            ]
        )

    def on_bshd(self, tensors: Sequence[Any]) -> None:
        """The same for (B, S, H, D) tensors, which FA4 takes as they are."""
        memory = []
        for index in self.indices:
            tensor = tensors[index]
            memory.append(tensor.detach() if tensor.requires_grad else tensor)
        self._launch(memory)

    def _launch(self, memory: list[Tensor]) -> None:
        for each in self.temporaries:
            memory.append(each.allocate(self.device))
        for kernel, template, slots, filled in self.calls:
            arguments = template.copy()
            for place, index in slots:
                arguments[place] = memory[index]
            for place, argument in filled:
                arguments[place] = argument.filled(memory)
            kernel(*arguments)


def _slots(template: Sequence[Any]) -> tuple[list[tuple[int, int]], list[tuple[int, _Filled]]]:
    """Where a template is to be filled in: with which tensor, or with which tuple of them."""
    slots = [(place, each.index) for place, each in enumerate(template) if type(each) is _Slot]
    filled = [(place, each) for place, each in enumerate(template) if type(each) is _Filled]
    return slots, filled


def _without_history(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


@dataclass(frozen=True)
class _Filled:
    """A list or tuple of arguments, some of them tensors. make: it, of its elements."""

    make: Callable[[list[Any]], Any]
    template: tuple[Any, ...]

    def filled(self, memory: Sequence[Tensor]) -> Any:
        return self.make([_given_again(argument, memory) for argument in self.template])


def _given_again(argument: Any, memory: Sequence[Tensor]) -> Any:
    if type(argument) is _Slot:
        return memory[argument.index]
    return argument.filled(memory) if type(argument) is _Filled else argument


@dataclass
class Recording:
    """The launches seen so far: (kernel, positional arguments)."""

    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)

    def repeat(
        self, given: Sequence[Tensor | None], made_by_fa4: Mapping[int, Tensor] | None = None
    ) -> Repeat | None:
        """The launches again, if each tensor in `given` was used in them as it is.

        given: what FA4 was called with, in the order of the op's tensors; None for one that FA4
            does not take.
        made_by_fa4: results that FA4 allocates itself, by their place in that order.
        """
        if not self.calls:  # fake tensors: compiled only
            return None
        tensors_given = {i: tensor for i, tensor in enumerate(given) if tensor is not None}
        tensors_given.update(made_by_fa4 or {})
        tensors = list(tensors_given.values())
        if len({tensor.data_ptr() for tensor in tensors}) < len(tensors):
            return None
        templates = _templates(self.calls, tensors)
        if templates is None:
            return None
        views = [
            (i, tuple(t.shape) if t.dim() == 4 or 0 in t.stride() else None, t.stride())
            for i, t in tensors_given.items()
        ]
        return Repeat(*templates, views, tensors[0].device)


_lock = threading.Lock()


@contextmanager
def recording(entries: Sequence[Any]) -> Iterator[Recording]:
    """Note the launches that this thread makes inside through the compile caches of `entries`."""
    noted = Recording()
    with _lock, ExitStack() as stack:
        for entry in entries:
            stack.callback(setattr, entry, "compile_cache", entry.compile_cache)
            entry.compile_cache = _Recorder(entry.compile_cache, noted.calls)
        yield noted


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


def _templates(
    calls: _Calls, tensors: Sequence[Tensor]
) -> tuple[list[Any], list[_Temporary]] | None:
    """The calls with slots in place of tensors, and the temporaries among those.

    None if a call cannot be repeated: not every tensor was used, or one not as it is, or one
    piece of temporary memory as two different tensors.
    """
    slots = _TensorSlots(tensors)
    try:
        templates = [
            (kernel, tuple(slots.in_place_of(argument, number) for argument in arguments))
            for number, (kernel, arguments) in enumerate(calls)
        ]
    except _NotRepeatable:
        return None
    is_complete = slots.used.issuperset(range(len(tensors)))
    return (templates, slots.temporaries) if is_complete else None


class _TensorSlots:
    """Slots in place of tensors.

    No function that calls itself and sees tensors as a closure: that is a cycle, which keeps them
    until they are collected, and CUDA graphs then find memory in use that nobody has told them of.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.known = list(tensors)  # by the slot's index, temporaries too
        self.by_pointer = {tensor.data_ptr(): _Slot(i) for i, tensor in enumerate(tensors)}
        self.temporaries: list[_Temporary] = []
        self.used: set[int] = set()

    def in_place_of(self, argument: Any, number: int) -> Any:
        """number: which of the calls it is an argument of."""
        if isinstance(argument, Tensor):
            return self._slot_of(argument, number)
        if isinstance(argument, (tuple, list)):
            inside = tuple(self.in_place_of(each, number) for each in argument)
            if any(isinstance(each, (_Slot, _Filled)) for each in inside):
                return _Filled(getattr(argument, "_make", type(argument)), inside)
        return argument

    def _slot_of(self, tensor: Tensor, number: int) -> _Slot:
        slot = self.by_pointer.get(tensor.data_ptr())
        if slot is None:
            if not tensor.is_contiguous():
                raise _NotRepeatable
            slot = self.by_pointer[tensor.data_ptr()] = _Slot(len(self.known))
            self.known.append(tensor)
            layout = tuple(tensor.shape), tensor.stride()
            self.temporaries.append(_Temporary(*layout, tensor.dtype, zero=number > 0))
        elif _metadata(tensor) != _metadata(self.known[slot.index]):
            raise _NotRepeatable
        self.used.add(slot.index)
        return slot


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


class _NotRepeatable(Exception):
    """An argument that could not be given again from the caller's tensors alone."""
