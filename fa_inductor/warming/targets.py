"""Let FA4 compile for a GPU that is only named.

FA4 and CuTe read the architecture from variables when they are first imported, and FA4's schedulers
ask the driver for the number of SMs: it is answered here. So a process compiles for one target.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from ..errors import CompileOnlyError
from ..target import Target


def variables(target: Target) -> Mapping[str, str]:
    """What a process that compiles for `target` must have in its environment from the start."""
    return {
        "FLASH_ATTENTION_ARCH": target.arch,
        "CUTE_DSL_ARCH": target.arch,
        "FLASH_ATTENTION_NUM_SMS": str(target.sm_count),
    }


class _HardwareInfo:
    """CUTLASS's `HardwareInfo` of the named GPU, without a driver."""

    def __init__(self, device_id: int = 0) -> None:
        self.sm_count = int(os.environ["FLASH_ATTENTION_NUM_SMS"])

    def get_max_active_clusters(self, cluster_size: int, stream: Any = None) -> int:
        return self.sm_count // cluster_size

    def get_device_multiprocessor_count(self) -> int:
        return self.sm_count


@contextmanager
def planned_for(target: Target | None) -> Iterator[None]:
    """Inside, FA4 compiles for `target`; None is the GPU that is present.

    Raises `CompileOnlyError` where there is none, or FA4 is already in use for another target.
    """
    if target is None:
        if not torch.cuda.is_available():
            raise CompileOnlyError(
                "Without a GPU the target must be named: compile_only(target='sm_90a')."
            )
        yield
        return
    wanted = variables(target)
    if "cutlass" in sys.modules:
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                raise CompileOnlyError(
                    f"FA4 was imported with {name}={os.environ.get(name)} and cannot compile for "
                    f"{target.arch} in this process: use fa_inductor.warm, or set {name}={value}."
                )
    os.environ.update(wanted)
    import cutlass.utils
    import flash_attn.cute.tile_scheduler as scheduler

    if torch.cuda.is_available():
        yield
        return
    with (
        mock.patch.object(cutlass.utils, "HardwareInfo", _HardwareInfo),
        mock.patch.object(scheduler, "HardwareInfo", _HardwareInfo),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield
