"""What the GPU tests draw and judge by: large enough, covering, and right on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fa_inductor.kernels import reference
from fa_inductor.target import Target

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

import configurations
import judging
import random_cases
from configurations import KERNELS, KINDS, LAYOUTS, Configuration, sample

HOPPER = Target.of_name("sm_90a")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors here are too small for more, and other tests run beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_sample_is_large_and_covers(kernel: str) -> None:
    taken = sample(kernel, HOPPER)
    print("\n".join(configurations.summary(kernel, taken, 0)))
    assert len(set(taken.runnable)) >= 600
    assert taken.backward >= 350
    assert {each.layout for each in taken.runnable} == set(LAYOUTS)
    assert len(LAYOUTS) == 15
    factors = [configurations.SIZES, KINDS, LAYOUTS, configurations.GRADS, configurations.DATA]
    covered = set().union(*(configurations.pairs(each.values) for each in taken.runnable))
    missed = set()
    for values in itertools.product(*factors):
        if missed >= (pairs := configurations.pairs(values) - covered):
            continue
        size, kind, _, grad, _ = values
        needs_grad = not grad.startswith("none")
        if not configurations.allowed(kernel, values):
            continue
        if not configurations.refusal(kernel, HOPPER, size, kind, needs_grad):
            missed |= pairs
    assert missed == set()


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_row_refuses_what_is_in_the_sample(kernel: str) -> None:
    """With the tensors' own layouts: those that the sample was drawn with are all one."""
    from fa_inductor.support import reasons_against

    for each in sample(kernel, HOPPER).runnable[::5]:
        assert reasons_against(kernel, each.call("meta").spec(), HOPPER) == [], str(each)


def small(configuration: Configuration) -> Configuration:
    size = configuration.size
    lengths = {"sq": max(1, size.sq // 8), "sk": size.sk // 8}
    return dataclasses.replace(configuration, size=dataclasses.replace(size, **lengths))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_yardsticks_agree_with_the_reference_kernel(kernel: str) -> None:
    runnable = sample(kernel, HOPPER).runnable
    step = len(runnable) // 55
    assert {each.kind.group for each in runnable[::step]} >= {"plain", "window", "lengths", "sink"}
    for each in runnable[::step]:
        assert judging.judge(small(each).call("cpu"), "reference", runs=1) == [], str(each)


def test_random_layouts_agree_with_the_reference_kernel() -> None:
    numbers = range(0, random_cases.CASES, 83)
    outcomes = random_cases.run_all(numbers, "cpu", "reference")
    assert [outcome.described for outcome in outcomes if outcome.wrong] == []
    assert len(outcomes) == len(numbers) > 25
    assert 0 < sum(bool(outcome.refused) for outcome in outcomes) < len(outcomes) // 4
    assert sum(bool(outcome.planned) for outcome in outcomes) > len(outcomes) // 3
    kernels = [random_cases.kernel_of(number) for number in range(random_cases.CASES)]
    assert kernels.count("cudnn") == random_cases.CASES // 4
    assert random_cases.CASES >= 2000


WRONG = {
    "a key too many": lambda problem: dataclasses.replace(problem, window_left=9),
    "another diagonal": lambda problem: dataclasses.replace(problem, causal="top_left"),
    "another scale": lambda problem: dataclasses.replace(problem, scale=problem.scale * 1.1),
    "a softcap": lambda problem: dataclasses.replace(problem, softcap=5.0),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_slightly_wrong_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.forward

    def wrong(problem: Any, *rest: Any) -> None:
        right(WRONG[name](problem), *rest)

    size = configurations.Size(torch.bfloat16, 2, 4, 2, 30, 40, 64, 64)
    kind = configurations.Kind("window", "window", "bottom_right", left=True)
    call = Configuration(size, kind, LAYOUTS[0], "none", "normal").call("cpu")
    assert call.problem.window_left == 8
    assert judging.judge(call, "reference", runs=1) == []
    monkeypatch.setattr(reference, "forward", wrong)
    found = judging.judge(call, "reference", runs=1)
    assert any(text.startswith("run 1: out: error") for text in found)
    assert any(text.startswith("run 1: lse") for text in found)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_wrong_element_of_a_gradient_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference.backward

    def wrong(*args: Any) -> None:
        right(*args)
        getattr(args[-1], name)[1, 1, 3, 5] += 0.25

    size = configurations.Size(torch.bfloat16, 2, 4, 2, 30, 40, 64, 64)
    call = Configuration(size, KINDS[0], LAYOUTS[0], "as out", "normal").call("cpu")
    monkeypatch.setattr(reference, "backward", wrong)
    (found,) = judging.judge(call, "reference", runs=1)
    assert found.startswith(f"run 1: d{name}: error")
