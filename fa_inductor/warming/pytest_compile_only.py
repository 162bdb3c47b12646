"""A pytest plugin: `pytest --compile-only` compiles the kernels of GPU tests and runs none.

Tests that take the fixture `fa_device`, or have it through another, run inside `compile_only()`,
where nothing has a value; on a machine without a GPU, what they make on CUDA is made on the CPU.
`torch.testing.assert_close` compares nothing, and a test ends, as skipped, at the first error.
`python -O -m pytest --assert=plain --compile-only` has no assertions, and so gets further (with
PyTorch 2.13: the Dynamo of 2.11 cannot trace conditions under `-O`). Code that calls FA4 itself is
compiled with a GPU only. Tests without the fixture are not run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from ..target import Target
from .targets import variables


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fa_inductor")
    group.addoption(
        "--compile-only",
        action="store_true",
        help="compile the attention kernels of tests that use fa_device, and launch none",
    )
    group.addoption(
        "--compile-only-target",
        default="sm_90a",
        help="the GPU to compile for on a machine without one (default sm_90a)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tests may import FA4 when they are collected, and it then looks for what it compiles for."""
    if is_compile_only(config) and not torch.cuda.is_available():
        os.environ.update(variables(Target.of_name(config.getoption("--compile-only-target"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if not is_compile_only(config):
        return
    left = [item for item in items if "fa_device" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture
def fa_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a test makes its tensors: the GPU; with `--compile-only` fake tensors, on the CPU
    where there is no GPU."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not is_compile_only(request.config):
        yield device
        return
    from .compile_only import compile_only
    from .no_gpu import without_gpu

    target = None if on_gpu else request.config.getoption("--compile-only-target")
    with (
        compile_only(target),
        nullcontext() if on_gpu else without_gpu(),
        mock.patch.object(torch.testing, "assert_close"),
    ):
        yield device


def is_compile_only(config: pytest.Config) -> bool:
    """Whether tests are run with `--compile-only`."""
    return bool(config.getoption("--compile-only", default=False))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    if is_compile_only(item.config) and outcome.excinfo is not None:
        kind, error, _ = outcome.excinfo
        if issubclass(kind, Exception):
            why = f"compiled only, up to {kind.__name__}: {str(error)[:200]}"
            outcome.force_exception(pytest.skip.Exception(why))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if is_compile_only(config):
        from ..jit_monitor import stats

        counts = stats()
        terminalreporter.write_line(
            f"compiled only: {counts.compiles} kernels in {counts.compile_seconds:.0f} s, "
            f"{counts.loads} found"
        )
