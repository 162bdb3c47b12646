"""`warm`: compile all kernels that specs, a model or a recorded run need, for any target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OptionError
from ..report import Report
from ..spec import AttentionSpec
from ..target import Target
from . import jobs as jobs_module
from .compiling import KERNELS
from .jobs import Job
from .targets import variables
from .tracing import Made, jobs_of

if TYPE_CHECKING:
    from rich.console import RenderableType

Progress = Callable[[str, str], None]  # (target, job), after each job


@dataclass
class Warmed:
    """What came of warming one target.

    compiled, found: kernels made now, and there already. seconds: compiling, all processes
    together; wall: from start to end. failed: jobs without a kernel, with the reason.
    refused: lengths of other jobs that have none. skipped: jobs of kernels that only a GPU can make
    ready.
    """

    target: str
    jobs: int = 0
    compiled: int = 0
    found: int = 0
    seconds: float = 0.0
    wall: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


@dataclass
class Summary:
    """What came of warming, for each target."""

    targets: list[Warmed]

    @property
    def compiled(self) -> int:
        return sum(each.compiled for each in self.targets)

    @property
    def failed(self) -> int:
        return sum(len(each.failed) for each in self.targets)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title="kernels made ready", title_justify="left")
        for heading in ("target", "calls", "compiled", "found", "failed", "s a kernel", "total s"):
            table.add_column(heading, justify="right")
        notes = []
        for each in self.targets:
            rate = f"{each.seconds / each.compiled:.1f}" if each.compiled else "-"
            counts = map(str, (each.jobs, each.compiled, each.found, len(each.failed)))
            table.add_row(each.target, *counts, rate, f"{each.wall:.1f}")
            notes += [Text(f"{each.target}: {job}: {why}") for job, why in each.failed.items()]
            for job, lengths in each.refused.items():
                count, first = len(lengths), lengths[0]
                notes.append(Text(f"{each.target}: {job}: not at {count} other lengths: {first}"))
            notes += [Text(f"{each.target}: only on the GPU: {job}") for job in each.skipped]
        return Group(table, *notes)


def warm(
    what: Report | str | Path | Iterable[AttentionSpec | Job] | Callable[[], Made],
    target: str | Sequence[str],
    jobs: int | None = None,
    *,
    options: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Compile every kernel for all lengths into the directory of `fa-inductor cache`.

    what: specs; a `Report`; a file of JSON lines, specs or what `FA_INDUCTOR_RECORD` wrote; or a
        function that returns (fn, args, kwargs), which is traced on fake CPU tensors.
    target: names ("sm_90a"), present or not. Each is compiled for by processes of its own.
    jobs: processes at a time; None for the number of CPUs.
    options: `fa.` options for tracing a model. progress: called after each call of a kernel.

    Kernels that are there already are found; run it again after an interruption to go on.
    Raises `UnknownTargetError`, `OptionError`.
    """
    names = [target] if isinstance(target, str) else list(target)
    return warm_jobs({name: collected(what, name, options) for name in names}, jobs, progress)


def warm_jobs(
    wanted: Mapping[str, Sequence[Job]], jobs: int | None = None, progress: Progress | None = None
) -> Summary:
    """`warm` for the jobs of each target, by its name."""
    targets = [Target.of_name(name) for name in wanted]
    todos = [list({job.dumps(): job for job in todo}.values()) for todo in wanted.values()]
    at_once = jobs or os.cpu_count() or 1
    parts = max(1, at_once // max(1, len(targets)))
    summary = Summary([_skipping(t.arch, todo) for t, todo in zip(targets, todos, strict=True)])
    with ThreadPoolExecutor(at_once) as pool:
        waiting = []
        for planned, warmed, todo in zip(targets, summary.targets, todos, strict=True):
            able = [job for job in todo if job.kernel in KERNELS]
            for part in range(parts):
                if mine := able[part::parts]:
                    waiting.append(pool.submit(_work, planned, mine, warmed, progress))
        for each in waiting:
            each.result()
    return summary


def collected(what: Any, target: str, options: dict[str, Any] | None = None) -> list[Job]:
    """The jobs in any of what `warm` takes."""
    if isinstance(what, (str, Path)):
        return jobs_module.read(Path(what).read_text().splitlines())
    if isinstance(what, Report):
        what = [s.spec for s in what.sites if s.spec is not None and s.kernel in KERNELS]
    elif callable(what):
        return jobs_of(what, target, options)
    jobs: dict[str, Job] = {}
    for each in what:
        made = jobs_module.of_spec(each) if isinstance(each, AttentionSpec) else [each]
        jobs.update({job.dumps(): job for job in made})
    return list(jobs.values())


def _skipping(target: str, jobs: Sequence[Job]) -> Warmed:
    skipped = [str(job) for job in jobs if job.kernel not in KERNELS]
    return Warmed(target, len(jobs) - len(skipped), skipped=skipped)


def _work(target: Target, jobs: Sequence[Job], warmed: Warmed, progress: Progress | None) -> None:
    """Have one process compile the jobs."""
    started = time.perf_counter()
    text = "\n".join((target.arch, *(job.dumps() for job in jobs))) + "\n"
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as given:
        given.write(text)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "fa_inductor.warming.worker"],
            env={**os.environ, **variables(target), "CUDA_VISIBLE_DEVICES": ""},
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                answer = json.loads(line)
                warmed.compiled += answer["compiled"]
                warmed.found += answer["found"]
                warmed.seconds += answer["seconds"]
                if answer["failed"]:
                    warmed.failed[answer["job"]] = answer["failed"]
                if answer["refused"]:
                    warmed.refused[answer["job"]] = answer["refused"]
                if progress is not None:
                    progress(target.arch, answer["job"])
        if process.returncode:
            said.seek(0)
            end = said.read()[-2000:]
            raise OptionError(f"warming {target.arch} ended with {process.returncode}: {end}")
    warmed.wall = max(warmed.wall, time.perf_counter() - started)
