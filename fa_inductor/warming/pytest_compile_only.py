"""A pytest plugin: `pytest --compile-only` compiles the kernels of GPU tests and runs none.

Tests that take the fixture `fa_device` make their tensors there. With `--compile-only` they run
inside `compile_only()`, where nothing has a value: comparisons by `torch.testing.assert_close` are
skipped, and a test ends, as skipped, at the first other assertion that does not hold. Tests without
the fixture are not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    if not config.getoption("--compile-only"):
        return
    left = [item for item in items if "fa_device" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture
def fa_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a test makes its tensors: the GPU; with `--compile-only` fake tensors, on the CPU
    where there is no GPU."""
    on_gpu = torch.cuda.is_available()
    if not request.config.getoption("--compile-only"):
        yield torch.device("cuda" if on_gpu else "cpu")
        return
    from .compile_only import compile_only

    target = None if on_gpu else request.config.getoption("--compile-only-target")
    with (
        compile_only(target),
        mock.patch.object(torch.testing, "assert_close"),
    ):
        yield torch.device("cuda" if on_gpu else "cpu")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    if not item.config.getoption("--compile-only") or outcome.excinfo is None:
        return
    if issubclass(outcome.excinfo[0], AssertionError):
        outcome.force_exception(pytest.skip.Exception("compiled only: nothing has a value"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--compile-only"):
        from ..jit_monitor import stats

        counts = stats()
        terminalreporter.write_line(
            f"compiled only: {counts.compiles} kernels in {counts.compile_seconds:.0f} s, "
            f"{counts.loads} found"
        )
