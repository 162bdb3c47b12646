"""Code that is written for a GPU, on fake CPU tensors where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_NOTHING = ("synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed_all")


class _OnCpu(TorchFunctionMode):
    """Where a call names a CUDA device, it is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        args, kwargs = pytree.tree_map_only((str, torch.device), _moved, (args, kwargs or {}))
        return func(*args, **kwargs)


def _moved(device: Any) -> Any:
    return "cpu" if str(device).startswith("cuda") else device


@contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, tensors asked for on CUDA are made on the CPU, and waiting for the GPU is nothing."""
    with ExitStack() as stack:
        for name in _NOTHING:
            stack.enter_context(mock.patch.object(torch.cuda, name))
        stack.enter_context(mock.patch.object(torch.cuda, "mem_get_info", return_value=(0, 0)))
        stack.enter_context(_OnCpu())
        yield
