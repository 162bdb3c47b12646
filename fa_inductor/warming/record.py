"""What a real run needs, for a later warm-up: `FA_INDUCTOR_RECORD=file`.

Each kernel call of a new class of metadata is written to the file as a line of JSON, once; calls
that are only repeated are not looked at. Several processes may write to one file.
"""

from __future__ import annotations

import os
from typing import Any

from ..kernels import RECORD
from .jobs import Job
from .op_jobs import of_call

_written: set[str] = set()


class Recorded:
    """A kernel's module, dense or of a variant, that writes down what it is called for."""

    def __init__(self, kernel: str, module: Any) -> None:
        self._kernel, self._module = kernel, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def forward(self, *args: Any) -> Any:
        with_lse = args[-1] is not None
        write(of_call(self._kernel, False, *args[:2], with_lse=with_lse))
        return self._module.forward(*args)

    def backward(self, *args: Any) -> Any:
        grad_out, grad_lse, grads = args[-3:]
        rest = {"grad_out": grad_out, "lse_grad": grad_lse is not None}
        rest["sink_grad"] = grads.sink is not None
        write(of_call(self._kernel, True, *args[:2], **rest))
        return self._module.backward(*args)


def write(job: Job) -> None:
    """Append a job to the file, unless this process has done so."""
    line = job.dumps()
    if line in _written:
        return
    _written.add(line)
    file = os.open(os.environ[RECORD], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode() + b"\n")  # in one piece: others append too
    finally:
        os.close(file)
