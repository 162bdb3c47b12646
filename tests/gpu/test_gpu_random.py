"""Over 2000 random layouts: refused by name, or right, and copied only where the plan says so."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from processes import COUNT, share_out
from random_cases import CASES, Outcome, kernel_of, run_all

CHUNKS = 8

outcomes: list[Outcome] = []


def numbers_of(kernel: str) -> list[int]:
    return [number for number in range(CASES) if kernel_of(number) == kernel]


@pytest.fixture(scope="module", autouse=True)
def printed(request: pytest.FixtureRequest) -> Iterator[None]:
    """The counts, whether or not pytest shows what tests print."""
    start = time.monotonic()
    yield
    lines = [f"random layouts: {time.monotonic() - start:.0f} s"]
    for kernel in ("fa4", "cudnn"):
        mine = [each for each in outcomes if kernel_of(each.number) == kernel]
        ran = [each for each in mine if not each.refused]
        lines.append(
            f"{kernel}: {len(mine)} cases, {len(ran)} run, {sum(each.backward for each in ran)} "
            f"with backward, {sum(bool(each.copied) for each in ran)} with planned copies, "
            f"{sum(bool(each.wrong) for each in ran)} wrong; refused by row:"
        )
        rows = Counter(row for each in mine for row in each.refused)
        lines += [f"  {kernel}, {row[0]}, {count} ({row[1]})" for row, count in rows.most_common()]
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *lines, sep="\n")


def check(found: list[Outcome], wanted: int) -> None:
    outcomes.extend(found)
    wrong = [each for each in found if each.wrong]
    described = [f"{each.described} | {'; '.join(each.wrong[:4])}" for each in wrong[:10]]
    if wrong:
        pytest.fail(f"{len(wrong)} of {wanted} cases are wrong:\n" + "\n".join(described), False)
    assert len(found) == wanted


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_fa4(chunk: int) -> None:
    numbers = numbers_of("fa4")[chunk::CHUNKS]
    check(run_all(numbers), len(numbers))


def test_cudnn() -> None:
    numbers = numbers_of("cudnn")
    jobs = [numbers[first::COUNT] for first in range(COUNT)] if COUNT > 1 else [numbers]
    check([each for found in share_out(run_all, jobs) for each in found], len(numbers))
