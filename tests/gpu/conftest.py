"""The GPU tests: run with `make test-gpu`, on a machine with a Hopper or Blackwell GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fa_inductor
from poison import poison_cuda_free_memory
from pytest_fa_inductor import fa_device

__all__ = ["fa_device"]  # here too, for a checkout that is not installed

_compiled: dict[str, int] = {}  # how many kernels tests had to compile


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def poisoned_gpu(request: pytest.FixtureRequest, fa_device: torch.device) -> Iterator[None]:
    """Each test starts with the allocator's free memory full of NaN, far more than it needs."""
    if request.config.getoption("compile_only", default=False):
        yield
        return
    assert torch.cuda.is_available(), "the GPU tests need a CUDA GPU"
    poison_cuda_free_memory(0.15)
    before = fa_inductor.stats().compiles
    yield
    if count := fa_inductor.stats().compiles - before:
        _compiled[request.node.nodeid] = count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call" and "/gpu/" in report.nodeid
    ]
    if ran and torch.cuda.is_available():
        terminalreporter.write_line(
            f"{len(ran)} GPU tests ran on {torch.cuda.get_device_name()}, torch {torch.__version__}"
        )
        counts = fa_inductor.stats()
        terminalreporter.write_line(
            f"in this process {counts.compiles} kernels were compiled and {counts.loads} found, "
            f"{counts.plan_builds} cuDNN plans built and {counts.plan_loads} found"
        )
        for test, count in _compiled.items():
            terminalreporter.write_line(f"  {count} in {test}")
