"""Fresh memory that shows what nobody has written.

A compiled result that equals eager proves nothing without this: the caching allocator likes to
hand out the very block that the eager call has just filled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from .. import inductor_compat

NAN = float("nan")
FINITE = -12345.0  # another poison, for telling what was not written from what is NaN by itself
_SMALL_BLOCKS = tuple(1 << power for power in range(9, 21))


class Poison:
    """What fresh memory is filled with; it can be changed between two runs of compiled code."""

    def __init__(self) -> None:
        self.fill = NAN

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(self.fill)
        return tensor

    @contextlib.contextmanager
    def refilled(self, fill: float) -> Iterator[None]:
        """Memory that is allocated inside starts as `fill`."""
        self.fill = fill
        in_ops: Any = torch.utils.deterministic
        before = in_ops.fill_uninitialized_memory
        in_ops.fill_uninitialized_memory = math.isnan(fill)
        try:
            if torch.cuda.is_available():
                fill_cuda_free_memory(fill)
            yield
        finally:
            in_ops.fill_uninitialized_memory = before


@contextlib.contextmanager
def poisoned(deterministic_fill: bool = True) -> Iterator[Poison]:
    """Compile and run inside: memory that Inductor and the ops allocate starts as NaN.

    Two mechanisms, as neither reaches all: Inductor's buffers come from functions of its own,
    which are patched; `torch.empty` inside ops is filled by PyTorch's deterministic mode. That
    mode can choose other kernels, so `deterministic_fill=False` leaves it out; on a GPU the
    allocator's free memory is filled as well.
    """
    poison = Poison()
    with contextlib.ExitStack() as stack:
        owner, names = inductor_compat.inductor_allocators()
        for name in names:
            original = getattr(owner, name)

            def poisoned_empty(*args: Any, original: Any = original) -> torch.Tensor:
                return poison.filled(original(*args))

            stack.enter_context(mock.patch.object(owner, name, poisoned_empty))
        if deterministic_fill:
            stack.enter_context(deterministically_filled())
        stack.enter_context(poison.refilled(NAN))
        yield poison


@contextlib.contextmanager
def deterministically_filled() -> Iterator[None]:
    """PyTorch's deterministic mode, in which `torch.empty` is filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def fill_cuda_free_memory(value: float = NAN, fraction: float = 0.8, most: int = 8 << 30) -> None:
    """Fill the CUDA caching allocator's free blocks, small and large.

    value: NaN in every float dtype at once, or a number, in bfloat16.
    fraction: of the free memory. most: bytes, so that processes beside each other all have room.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    size = min(int(free * fraction), most)
    made = [_block(each, value) for each in _SMALL_BLOCKS * 8]
    while size > _SMALL_BLOCKS[-1]:
        try:
            made.append(_block(size, value))
            break
        except torch.OutOfMemoryError:  # other processes have taken it meanwhile
            size //= 2
    torch.cuda.synchronize()
    del made


def _block(size: int, value: float) -> torch.Tensor:
    if math.isnan(value):  # all bits set is NaN in every float dtype; NaN in one need not be so
        return torch.full((size // 4,), -1, dtype=torch.int32, device="cuda")
    return torch.full((size // 2,), value, dtype=torch.bfloat16, device="cuda")
