"""Work shared out among processes: cuDNN builds its plans under Python's lock, so threads would
wait for each other, and a kernel class takes most of a second to build."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

Job, Result = TypeVar("Job"), TypeVar("Result")

# 1 runs everything in the process of the tests, as a GPU in exclusive mode needs.
COUNT = int(os.environ.get("FA_INDUCTOR_TEST_PROCESSES", min(6, (os.cpu_count() or 2) // 2)))


def share_out(
    run: Callable[[Job], Result], jobs: Sequence[Job], count: int = COUNT
) -> list[Result]:
    """`run(job)` of each, in order; the children import the module that `run` is in."""
    if count <= 1 or len(jobs) <= 1:
        return [run(job) for job in jobs]
    with ProcessPoolExecutor(
        min(count, len(jobs)), multiprocessing.get_context("spawn"), initializer=_start
    ) as pool:
        return list(pool.map(run, jobs))


def _start(*_: Any) -> None:
    import torch

    torch.set_num_threads(1)
