"""Calls of the attention ops that can be done again without their checks.

A kernel may hand back a function that repeats a call for other tensors of the very same metadata
(see `fa_inductor.kernels`). It is kept under all metadata that the checks look at, and used when
the pointers are aligned and the tensors' device is the current one.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import torch_compat
from .layout import ALIGNMENT

CAPACITY = 256  # classes of calls remembered by each thread, the least recently used dropped


class Call:
    """How to do one class of calls again."""

    __slots__ = ("buffers", "device", "guard", "repeat", "used")

    def __init__(
        self, given: Sequence[Tensor | None], made: Sequence[Tensor], repeat: Callable[..., None]
    ) -> None:
        self.buffers = [(tuple(each.shape), each.stride(), each.dtype) for each in made]
        self.repeat, self.device = repeat, made[0].get_device()
        self.guard = torch_compat.metadata_guard(given)
        self.used = False  # since it was last moved in the order of `Calls.by_key`

    def allocate(self, given: Sequence[Tensor | None]) -> list[Tensor] | None:
        """Memory for the results; None when these tensors need the long way."""
        pointers = 0
        for tensor in given:
            if tensor is not None:
                pointers |= tensor.data_ptr()
        if pointers % ALIGNMENT or torch._C._cuda_getDevice() != self.device:
            return None
        empty = torch_compat.empty_on_current_gpu
        return [empty(*buffer) for buffer in self.buffers]


class Calls(threading.local):
    """This thread's remembered calls; what kernels hand out belongs to one thread."""

    def __init__(self) -> None:
        self.by_key: OrderedDict[tuple[Hashable, Hashable], Call] = OrderedDict()
        self.recent: OrderedDict[Hashable, Call] = OrderedDict()
        self.repeated = 0
        forget_at_exit(self.by_key)
        forget_at_exit(self.recent)

    def ready(
        self, scalars: Hashable, given: Sequence[Tensor | None]
    ) -> tuple[Callable[..., None], list[Tensor]] | None:
        """What does the call for these arguments and tensors of this metadata again, and memory for
        its results.

        None when it needs the long way. It counts as repeated: the caller does it. The last one of
        the same scalars is tried first: PyTorch compares metadata several times faster than a key
        of it can be made.
        """
        call = self.recent.get(scalars)
        if call is not None and call.guard is not None and call.guard(*given):
            call.used = True
        else:
            key = (scalars, metadata(given))
            call = self.by_key.get(key)
            if call is None:
                return None
            self.by_key.move_to_end(key)
            self.recent[scalars] = call
        made = call.allocate(given)
        if made is None:
            return None
        self.repeated += 1
        return call.repeat, made

    def add(self, scalars: Hashable, given: Sequence[Tensor | None], call: Call) -> None:
        key = (scalars, metadata(given))
        if key not in self.by_key and len(self.by_key) >= CAPACITY:
            self._drop_one()
        self.by_key[key] = self.recent[scalars] = call

    def _drop_one(self) -> None:
        """The first that was not used since it was last moved."""
        for key, call in list(self.by_key.items()):
            if not call.used:
                break
            call.used = False
            self.by_key.move_to_end(key)
        else:
            key, call = next(iter(self.by_key.items()))
        del self.by_key[key]
        if self.recent.get(key[0]) is call:
            del self.recent[key[0]]


_held: list[weakref.ref[OrderedDict[Any, Any]]] = []


def forget_at_exit(held: OrderedDict[Any, Any]) -> None:
    """Have `forget` empty `held`, in whichever thread it is, and the program's end: kernel
    libraries want their objects back while they are still loaded."""
    _held[:] = [each for each in _held if each() is not None]
    _held.append(weakref.ref(held))


@atexit.register
def forget() -> None:
    """Nothing has been called yet: the next call of any class, in any thread, goes the long way.

    Not while another thread is in a call.
    """
    for each in _held:
        if (held := each()) is not None:
            held.clear()


def metadata(tensors: Sequence[Any]) -> Hashable:
    """All that checks look at in tensors, but for their pointers."""
    return tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
