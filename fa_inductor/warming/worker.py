"""One process that compiles jobs for one target: `python -m fa_inductor.warming.worker`.

Reads jobs as lines of JSON, the target's name first, and answers each with a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

from .. import jit_monitor
from ..errors import FaInductorError
from ..target import Target
from .compiling import compile_job
from .jobs import Job
from .targets import planned_for


def _refusals() -> tuple[type[Exception], ...]:
    """What FA4, CuTe and we raise for a call that there is no kernel for."""
    from cutlass.base_dsl.common import DSLBaseError

    expected = (AssertionError, ValueError, TypeError, RuntimeError, KeyError, IndexError)
    return (FaInductorError, DSLBaseError, *expected)


def compiled(job: Job) -> dict[str, Any]:
    """Compile a job for all lengths; what came of it: "failed" why there is no kernel for the call
    itself, "refused" which other lengths have none."""
    before, started = jit_monitor.stats(), time.perf_counter()
    failed, refused = "", []
    refusals = _refusals()
    for number, each in enumerate(job.all_lengths()):
        try:
            compile_job(each)
        except refusals as error:
            why = f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0]}"
            if number == 0:
                failed = why
                break
            refused.append("{} by {}: {}".format(*each.lengths, why))
    after = jit_monitor.stats()
    return {
        "job": str(job),
        "compiled": after.compiles - before.compiles,
        "found": after.loads - before.loads,
        "seconds": after.compile_seconds - before.compile_seconds,
        "wall": time.perf_counter() - started,
        "failed": failed,
        "refused": refused,
    }


def main() -> int:
    warnings.filterwarnings("ignore", module="cutlass")
    lines = iter(sys.stdin)
    target = Target.of_name(next(lines).strip())
    answers = sys.stdout
    sys.stdout = sys.stderr  # what FA4 prints is no answer
    with planned_for(target), jit_monitor.allowed():
        for line in lines:
            print(json.dumps(compiled(Job.of_json(json.loads(line)))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
