"""Every example and counterexample that a pattern family brings along."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from comparison import Outcome, compare_forward, compare_with_eager, gradients, leaves
from fa_inductor.patterns import FAMILIES, Example, Family
from fa_inductor.patterns import eager as eager_family
from fa_inductor.patterns import mha as mha_family
from fa_inductor.patterns import sdpa as sdpa_family
from helpers import compile_quick, compile_reference


def cases(kind: str) -> list[Any]:
    return [
        pytest.param(example, id=f"{family.NAME}: {example.name}")
        for family in FAMILIES
        for example in getattr(family, kind)()
    ]


def parameters_of(fn: Callable[..., Any]) -> list[nn.Parameter]:
    """The parameters of every module that `fn` refers to."""
    names = inspect.getclosurevars(fn)
    values = [*names.nonlocals.values(), *names.globals.values()]
    modules = [value for value in values if isinstance(value, nn.Module)]
    return [parameter for module in modules for parameter in module.parameters()]


def compare(example: Example, compiled: Callable[..., Any]) -> Outcome:
    """Forward, and gradients of inputs and of module parameters."""
    inputs = example.make_inputs()
    return compare_with_eager(example.fn, compiled, inputs, parameters_of(example.fn))


def refuses_gradients(fn: Callable[..., Any], example: Example) -> bool:
    """Whether autograd finds that something it needs was written over."""
    inputs = leaves(example.make_inputs())
    try:
        gradients(fn(*inputs), inputs)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return True
    return False


# --- What a family has to bring along -----------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.NAME)
def test_a_family_shows_what_it_takes_and_what_it_leaves(family: Family) -> None:
    """A pattern without counterexamples is not finished; one may have nothing to rewrite."""
    examples, counterexamples = family.examples(), family.counterexamples()
    assert counterexamples
    assert all(example.sites > 0 for example in examples)
    assert all(example.sites == 0 for example in counterexamples)
    names = [example.name for example in (*examples, *counterexamples)]
    assert len(set(names)) == len(names)


def test_families_have_names_of_their_own() -> None:
    assert len({family.NAME for family in FAMILIES}) == len(FAMILIES)


def test_the_weights_of_modules_are_compared_too() -> None:
    """What `compare` differentiates by includes each module's projections."""
    found = [parameters_of(example.fn) for example in mha_family.examples()]
    assert min(map(len, found)) >= 2


# --- Examples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("example", cases("examples"))
def test_an_example_is_rewritten_and_equals_eager(example: Example) -> None:
    """Forward and gradients; where eager refuses to differentiate, so does the compiled one."""
    if refuses_gradients(example.fn, example):
        assert refuses_gradients(compile_quick(example.fn), example)
        return
    outcome = compare(example, compile_quick(example.fn))
    assert outcome.rewritten_sites == example.sites
    assert len(outcome.report.sites) == example.sites
    assert outcome.kernel_calls == example.sites


@pytest.mark.parametrize("example", cases("examples"))
def test_an_example_without_gradients(example: Example) -> None:
    """Inference takes another graph; nothing in it asks for a backward."""
    outcome = compare_forward(example.fn, compile_quick(example.fn), example.make_inputs())
    assert outcome.kernel_calls == example.sites
    specs = [site.spec for site in outcome.report.sites]
    assert [spec.needs_grad for spec in specs if spec] == [False] * example.sites


@pytest.mark.parametrize("example", cases("counterexamples"))
def test_a_counterexample_is_left_as_it_is(example: Example) -> None:
    """Left alone, equal to eager, and every attention that was seen has a reason."""
    outcome = compare(example, compile_quick(example.fn))
    assert outcome.rewritten_sites == 0
    assert outcome.kernel_calls == 0
    assert all(site.reason_texts for site in outcome.report.sites)
    assert bool(outcome.report.sites) != example.name.startswith("no attention")


# --- The same through the real backend, Inductor included ---------------------------------------


def named(family: Family, kind: str, *names: str) -> list[Any]:
    found = {example.name: example for example in getattr(family, kind)()}
    return [pytest.param(found[name], id=f"{family.NAME}: {name}") for name in names]


@pytest.mark.parametrize(
    "example",
    [
        *named(sdpa_family, "examples", "GQA", "causal, Sq < Sk"),
        *named(sdpa_family, "examples", "float mask"),
        *named(sdpa_family, "counterexamples", "mask of another dtype"),
        *named(mha_family, "examples", "both masks"),
        *named(mha_family, "counterexamples", "weights returned"),
        *named(eager_family, "examples", "as in Hugging Face's models", "sink"),
        *named(eager_family, "examples", "operations in place"),
        *named(eager_family, "counterexamples", "key written to"),
    ],
)
def test_inductor_compiles_what_the_pass_leaves(example: Example) -> None:
    outcome = compare(example, compile_reference(example.fn))
    assert outcome.rewritten_sites == example.sites
    assert outcome.kernel_calls == example.sites
