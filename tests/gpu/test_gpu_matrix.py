"""The matrix: over 600 attention problems of each kernel, in 15 memory layouts, against float64."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from allocator import poison
from configurations import (
    CONFIGURATIONS,
    KERNELS,
    LAYOUTS,
    WITH_BACKWARD,
    Configuration,
    Sample,
    sample,
    summary,
)
from judging import attempt, judge
from processes import share_out

from fa_inductor.target import Target

Failures = list[tuple[Configuration, list[str]]]

failures: dict[str, Failures] = {kernel: [] for kernel in KERNELS}


@functools.cache
def _sample(kernel: str) -> Sample:
    return sample(kernel, Target.of_device(torch.device("cuda")))


def run(job: tuple[str, Sequence[Configuration]]) -> Failures:
    """The configurations of one job that go wrong, and how."""
    kernel, configurations = job
    found = []
    for each in configurations:
        wrong = attempt(lambda each=each: judge(each.call("cuda"), kernel))
        if wrong:
            found.append((each, wrong))
            if "AcceleratorError" in wrong[0]:  # nothing runs in this process any more
                break
    return found


@functools.cache
def _cudnn_failures() -> Failures:
    """Of all layouts. What shares cuDNN's kernels is one job, so that it builds them once."""
    order = sorted(_sample("cudnn").runnable, key=_kernels)
    jobs = [("cudnn", list(group)) for _, group in itertools.groupby(order, _kernels)]
    jobs.sort(key=lambda job: -len(job[1]))
    return [failure for found in share_out(run, jobs) for failure in found]


def _kernels(configuration: Configuration) -> tuple[str, int, int, str]:
    size, kind = configuration.size, configuration.kind
    return (str(size.dtype), -(-size.d // 64), -(-size.dv // 64), kind.name)


@pytest.fixture(scope="module", autouse=True)
def printed(request: pytest.FixtureRequest) -> Iterator[None]:
    """The counts, whether or not pytest shows what tests print."""
    start = time.monotonic()
    yield
    lines = [f"matrix: {time.monotonic() - start:.0f} s"]
    for kernel in KERNELS:
        lines += summary(kernel, _sample(kernel), len(failures[kernel]))
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *lines, sep="\n")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_matrix(kernel: str, layout: str) -> None:
    if kernel == "cudnn":
        found = [failure for failure in _cudnn_failures() if failure[0].layout == layout]
    else:
        mine = [each for each in _sample(kernel).runnable if each.layout == layout]
        found = run((kernel, mine))
    failures[kernel] += found
    described = [f"{each} | {'; '.join(wrong[:4])}" for each, wrong in found[:10]]
    if found:
        pytest.fail(f"{len(found)} configurations are wrong:\n" + "\n".join(described), False)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_matrix_is_large(kernel: str) -> None:
    taken = _sample(kernel)
    assert len(taken.runnable) >= CONFIGURATIONS
    assert taken.backward >= WITH_BACKWARD
    assert {each.layout for each in taken.runnable} == set(LAYOUTS)


@pytest.mark.parametrize("size", [1 << 12, 1 << 18, 3 << 20, 1 << 24])
def test_the_poison_reaches_new_memory(size: int) -> None:
    """Blocks that were freed with good numbers in them come back as NaN."""
    for _ in range(3):
        good = [torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        del good
        poison([size])
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            made = torch.empty(size // dtype.itemsize, dtype=dtype, device="cuda")
            assert made.isnan().all()
            del made
