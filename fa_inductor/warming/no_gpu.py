"""Code that is written for a GPU, on fake CPU tensors where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from ..torch_compat import fake_modules

_NOTHING = ("synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed_all")


class _OnCpu(TorchFunctionMode):
    """Where a call names a CUDA device, it is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        # Dynamo traces this: nothing but plain Python.
        moved = {name: _moved(value) for name, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") == "unflatten":
            # Of those that ask `super()`, the one people call: Dynamo cannot trace into it.
            return args[0].unflatten(*args[1:], **moved)
        return func(*[_moved(value) for value in args], **moved)


def _moved(value: Any) -> Any:
    """Where a call names a CUDA device, the CPU."""
    if isinstance(value, torch.device):  # `torch.device("cuda", 0)` has become "cpu:0"
        return torch.device("cpu") if value.type in ("cuda", "cpu") else value
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


@contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, tensors asked for on CUDA are made on the CPU, and waiting for the GPU is nothing."""
    with ExitStack() as stack:
        for name in _NOTHING:
            stack.enter_context(mock.patch.object(torch.cuda, name))
        stack.enter_context(mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 0)))
        stack.enter_context(fake_modules())
        stack.enter_context(_OnCpu())
        yield
