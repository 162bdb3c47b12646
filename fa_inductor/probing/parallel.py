"""Cells in several processes at once, which share the GPU: most of a cell is compiling."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from .cells import Cell, Outcome
from .judging import Setting, judge
from .subjects import Subject

_here: list[tuple[Subject, Setting]] = []  # of a process that judges cells


def judge_all(
    make: Callable[[], Subject],
    tried: Sequence[Cell],
    setting: Setting,
    jobs: int,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """The outcome of each cell, in order; `progress` hears of them as they come.

    make: the subject, made anew in each process, so it can be pickled. A cell that runs out of
    memory beside others runs again, alone. Where a process dies, the cells that are left are an
    "error", which says so.
    """
    longest_first = sorted(range(len(tried)), key=lambda place: -tried[place].length)
    outcomes: dict[int, Outcome] = {}
    crowded: list[int] = []
    begin = (make, setting, max(1, (os.cpu_count() or 1) // jobs))
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, begin) as pool:
        pending = {pool.submit(_judged, tried[place]): place for place in longest_first}
        for future in as_completed(pending):
            place = pending[future]
            try:
                outcome = future.result()
            except BrokenProcessPool as error:
                outcome = Outcome(tried[place], make().name, "error", f"a process died: {error}")
            if jobs > 1 and outcome.detail.startswith("OutOfMemoryError"):
                crowded.append(place)
                continue
            outcomes[place] = outcome
            if progress is not None:
                progress(outcome)
    if crowded:
        alone = judge_all(make, [tried[place] for place in crowded], setting, 1, progress)
        outcomes.update(zip(crowded, alone, strict=True))
    return [outcomes[place] for place in range(len(tried))]


def _begin(make: Callable[[], Subject], setting: Setting, threads: int) -> None:
    # Compilers that each process would start for itself have no cores to run on.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(threads)
    _here.append((make(), setting))


def _judged(cell: Cell) -> Outcome:
    ((subject, setting),) = _here
    outcome = judge(subject, cell, setting)
    if setting.on_gpu:
        torch.cuda.empty_cache()  # for the others
    return outcome
