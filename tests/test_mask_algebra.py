"""Masks understood: thousands of random programs, element by element, and what models build."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from mask_programs import Program, program
from torch import Tensor

from fa_inductor import mask_text
from fa_inductor.masks import spaces, terms
from fa_inductor.masks.graphs import Interpreter
from fa_inductor.masks.spaces import Space
from fa_inductor.masks.terms import Mask

PROGRAMS, CHUNKS = 2600, 4


def understood(made: Program) -> Mask | None:
    return terms.understand(made.mask, Interpreter(made.graph, Space.of(made.shape)))


def visible(made: Program) -> Tensor:
    """The mask that the program computes, as bools."""
    value = made.value if made.value.dtype == torch.bool else made.value == 0
    return value.expand(made.shape)


def rendered(made: Program, mask: Mask) -> Tensor:
    formula = terms.formula(mask)
    assert formula is not None
    tensors = [made.tensor(node) for node in formula.tensors]
    return mask_text.rendered(formula.text, tensors, made.shape, "cpu")


def disagreements(seeds: Any) -> tuple[list[int], Counter[str]]:
    wrong, kinds = [], Counter[str]()
    for seed in seeds:
        made = program(seed)
        mask = understood(made)
        kinds["opaque" if mask is None else _kind(mask)] += 1
        if mask is None:
            continue
        if not torch.equal(rendered(made, mask), visible(made)):
            wrong.append(seed)
        if mask.sees_something and not visible(made).any(-1).all():
            wrong.append(seed)
    return wrong, kinds


def _kind(mask: Mask) -> str:
    return "band" if mask.is_band else "dense" if mask.dense_reads else "formula"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs(chunk: int) -> None:
    """Where a mask is understood, its text says what the program computes at every place."""
    wrong, kinds = disagreements(range(chunk, PROGRAMS, CHUNKS))
    assert wrong == []
    # Enough of each, that the test means something.
    assert kinds["band"] > 60
    assert kinds["formula"] > 250
    assert kinds["dense"] > 20


def test_an_error_by_one_in_the_band_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails if a bound is off by one."""
    right = spaces.band_side

    def off_by_one(expr: Any) -> Any:
        side = right(expr)
        return None if side is None else (side[0], side[1] + 1)

    monkeypatch.setattr(terms, "band_side", off_by_one)
    wrong, _ = disagreements(range(200))
    assert len(wrong) > 15


def test_what_is_written_to_is_never_looked_into() -> None:
    def mask(x: Tensor) -> Tensor:
        band = torch.ones(6, 6, dtype=torch.bool).tril()
        band[0, 5] = True
        return band

    def also_through_a_view(x: Tensor) -> Tensor:
        band = torch.ones(6, 6, dtype=torch.bool).tril()
        band[None].logical_and_(x)
        return band

    from torch._dynamo.testing import EagerAndRecordGraphs

    for fn in (mask, also_through_a_view):
        backend = EagerAndRecordGraphs()
        torch.compile(fn, backend=backend, fullgraph=True)(torch.rand(6, 6) > 0.5)
        graph = backend.graphs[0].graph
        node = next(node for node in graph.nodes if node.op == "output").args[0][0]
        interpreter = Interpreter(graph, Space.of((1, 1, 6, 6)))
        assert terms.understand(node, interpreter) is None
