"""Profiler ranges: sites and kernels by name, and nothing at all where no profiler runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fa_inductor
from fa_inductor import backend
from fa_inductor.ranges import in_range, range_name
from helpers import compile_reference


class _Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Attention() for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.scaled_dot_product_attention(x, x, x, mask)


NAME = "fa_inductor: layers.0 … layers.2 (3) on reference, test_ranges.py:"


def _inputs() -> tuple[Tensor, Tensor]:
    """With a mask of another dtype than the query, which no kernel takes."""
    return torch.randn(1, 2, 4, 8, dtype=torch.bfloat16), torch.zeros(4, 4)


def _profiled(compiled: Any, *args: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(*args)
    return [event.name for event in profile.events() if event.name.startswith("fa_inductor: ")]


def test_a_profiler_shows_sites_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _Model(), _inputs()
    compiled = compile_reference(model)
    result = compiled(*inputs)
    with monkeypatch.context() as patch:  # nobody looks: no range
        patch.setattr(torch.profiler, "record_function", lambda name: pytest.fail("a range"))
        compiled(*inputs)
    names = _profiled(compiled, *inputs)
    report = fa_inductor.explain(model, {"fa.kernels": ("reference",)})(*inputs)
    assert names == [range_name(report.sites)]
    torch.testing.assert_close(compiled(*inputs), result)


def test_names_join_layers_that_are_alike() -> None:
    report = fa_inductor.explain(_Model(), {"fa.kernels": ("reference",)})(*_inputs())
    name = range_name(report.sites)
    line = report.sites[-1].source.rpartition(":")[2]
    assert report.sites[-1].module == ""
    assert name == f"{NAME}{line} on fallback"


def test_a_graph_without_attention_is_left_as_it_is() -> None:
    def compiled() -> None: ...

    assert in_range(compiled, ()) is compiled


def test_the_range_keeps_what_pytorch_reads_off_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """How to store it, for one; Dynamo would take off the range by what it is not to keep."""
    seen: list[tuple[Any, Any]] = []

    def recorded(compiled: Any, sites: Any) -> Any:
        seen.append((compiled, in_range(compiled, sites)))
        return seen[-1][1]

    monkeypatch.setattr(backend, "in_range", recorded)
    compile_reference(_Attention())(_inputs()[0])
    ((inner, outer),) = seen
    kept = {name for name in vars(inner) if not name.startswith(("_torchdynamo", "__"))}
    assert kept
    assert kept <= set(vars(outer))
    assert not [name for name in vars(outer) if name.startswith("_torchdynamo")]
