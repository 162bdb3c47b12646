"""Fresh memory full of NaN, so that an element which nobody wrote shows.

A compiled result that equals eager proves nothing without this: the caching allocator likes
to hand out the very block that the eager call has just filled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    return tensor


@contextlib.contextmanager
def poisoned(deterministic_fill: bool = True) -> Iterator[None]:
    """Compile and run inside: memory that Inductor and the ops allocate starts as NaN.

    Two mechanisms, as neither reaches all: Inductor's buffers come from `_empty_strided_*`,
    which is patched; `torch.empty` inside ops is filled by PyTorch's deterministic mode. That
    mode can choose other kernels, so `deterministic_fill=False` leaves it out.
    """
    guards = torch._C._dynamo.guards
    with contextlib.ExitStack() as stack:
        for name in ("_empty_strided_cpu", "_empty_strided_cuda"):
            original = getattr(guards, name)

            def poisoned_empty(*args: Any, original: Any = original) -> torch.Tensor:
                return _filled(original(*args))

            stack.enter_context(mock.patch.object(guards, name, poisoned_empty))
        if deterministic_fill:
            before = torch.are_deterministic_algorithms_enabled()
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(True, warn_only=True)
            stack.callback(torch.use_deterministic_algorithms, before, warn_only=warn_only)
            fill = torch.utils.deterministic.fill_uninitialized_memory
            torch.utils.deterministic.fill_uninitialized_memory = True
            stack.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", fill)
        if torch.cuda.is_available():
            poison_cuda_free_memory()
        yield


def poison_cuda_free_memory(fraction: float = 0.8, most: int = 8 << 30) -> None:
    """Fill the CUDA caching allocator's free blocks, small and large, with NaN.

    fraction: of the free memory. most: bytes, so that processes beside each other all have room.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    # All bits set is NaN in every float dtype; NaN in one dtype need not be in another.
    words = {"fill_value": -1, "dtype": torch.int32, "device": "cuda"}
    small = [torch.full((size // 4,), **words) for size in _SMALL_BLOCKS * 8]
    large = torch.full((min(int(free * fraction), most) // 4,), **words)
    torch.cuda.synchronize()
    del small, large


_SMALL_BLOCKS = tuple(1 << power for power in range(9, 21))
