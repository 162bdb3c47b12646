"""What `pytest --compile-only` does: it compiles the kernels of GPU tests and runs none.

`pytest_fa_inductor.py`, beside the package, has the options and the fixture.

Tests that take the fixture `fa_device`, or have it through another, run inside `compile_only()`,
where nothing has a value; on a machine without a GPU, what they make on CUDA is made on the CPU.
`torch.testing.assert_close` compares nothing, and a test ends, as skipped, at the first error.
`python -O -m pytest --assert=plain --compile-only` has no assertions, and so gets further (with
PyTorch 2.13: the Dynamo of 2.11 cannot trace conditions under `-O`); nor what is called in them.
Code that calls FA4 itself is compiled with a GPU only. Tests without the fixture are not run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from ..jit_monitor import stats
from ..target import Target
from .compile_only import compile_only
from .no_gpu import without_gpu
from .targets import variables


class CompileOnly:
    """The plugin of a run with `--compile-only`. target: the GPU to compile for without one."""

    def __init__(self, target: str) -> None:
        self.target = None if torch.cuda.is_available() else target
        # Tests may import FA4 when they are collected, and it then looks for what it compiles for.
        if self.target is not None:
            os.environ.update(variables(Target.of_name(self.target)))

    @contextmanager
    def device(self) -> Iterator[torch.device]:
        """Where a test makes its tensors, which are fake."""
        with (
            compile_only(self.target),
            nullcontext() if self.target is None else without_gpu(),
            mock.patch.object(torch.testing, "assert_close"),
        ):
            yield torch.device("cuda" if self.target is None else "cpu")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        left = [item for item in items if "fa_device" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        outcome: Any = yield
        if outcome.excinfo is None:
            return
        kind, error, _ = outcome.excinfo
        # A `pytest.fail`, of `pytest.raises` above all, is an assertion on what happened, too.
        if issubclass(kind, (Exception, pytest.fail.Exception)):
            why = f"compiled only, up to {kind.__name__}: {str(error)[:200]}"
            outcome.force_exception(pytest.skip.Exception(why))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        counts = stats()
        terminalreporter.write_line(
            f"compiled only: {counts.compiles} kernels in {counts.compile_seconds:.0f} s, "
            f"{counts.loads} found"
        )
