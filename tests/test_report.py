"""What a `Report` holds, in which order, and how it is shown, checked and written out."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
from typing import Any

import pytest
import torch
from explained_model import Attention, Model, make_mask, make_x
from torch import nn

import fa_inductor
from fa_inductor import Report
from fa_inductor.errors import CoverageError
from fa_inductor.report import fallback_line
from fa_inductor.rewrite import rewrite

BOTH = {"fa.kernels": ("fa4", "reference")}
REFERENCE = {"fa.kernels": ("reference",)}


def _line(owner: Any, code: str) -> str:
    """`file:line` of the first line of `owner` that holds `code`."""
    lines, start = inspect.getsourcelines(owner)
    number = next(i for i, text in enumerate(lines, start) if code in text)
    return f"{inspect.getsourcefile(owner)}:{number}"


@pytest.fixture
def report() -> Report:
    return fa_inductor.explain(Model(), options=BOTH)(make_x(), make_mask())


def test_sites_are_in_program_order_with_their_place(report: Report) -> None:
    causal = _line(Attention.forward, "is_causal=True")
    masked = _line(Attention.forward, "# masked")
    assert [site.source for site in report.sites] == [causal, causal, masked]
    assert [site.module for site in report.sites] == ["blocks.0", "blocks.1", "last"]
    assert {site.family for site in report.sites} == {"sdpa"}


def test_sites_tell_spec_kernel_and_every_reason(report: Report) -> None:
    checkpointed, plain, masked = report.sites
    for site in (checkpointed, plain):
        assert (site.kernel, site.copied) == ("reference", {})
        assert [text.split(" (")[0] for text in site.reasons["fa4"]] == [
            "device cpu",
            "dtype float32",
        ]
        assert list(site.reasons) == ["fa4"]
        assert site.spec is not None
        assert (site.spec.causal, site.spec.mask, site.spec.needs_grad) == ("top_left", None, True)
        assert site.spec.q.shape == site.spec.k.shape == site.spec.v.shape == (2, 2, 6, 16)
        assert site.spec.q.stride == (576, 16, 96, 1)
    assert masked.kernel is None
    assert list(masked.reasons) == ["fa4", "reference"]
    assert masked.spec is not None
    assert masked.spec.mask == "attn_mask float32 (6, 6)"
    # Each reason has the value, the limit and the source; FA4 has one for each row it breaks.
    assert [text.split(" (")[0] for text in masked.reasons["fa4"]] == [
        "device cpu",
        "attn_mask float32",
    ]
    assert masked.reason_texts[0].startswith("fa4: device cpu (CUDA only; flash-attn-4")
    assert masked.reason_texts[-1].startswith(
        "reference: attn_mask float32 (6, 6) beside a bfloat16 query ("
    )


def test_graph_breaks_have_a_reason_and_the_users_line(report: Report) -> None:
    (found,) = report.graph_breaks
    assert found.source == _line(Model.forward, "graph_break()")
    assert "graph_break()" in found.reason
    assert [graph.sites for graph in report.graphs] == [2, 1]
    assert all(graph.nodes > graph.sites for graph in report.graphs)
    with pytest.raises(CoverageError) as error:
        report.assert_no_graph_breaks()
    assert str(error.value).startswith("1 graph break(s):\n")
    assert f"{found.source}: {found.reason}" in str(error.value)


def test_identical_blocks_are_one_graph() -> None:
    """GB-03: nothing that the pass asks breaks the graph, and each block is a site."""
    model = nn.Sequential(*(Attention() for _ in range(6)))
    report = fa_inductor.explain(model, options=REFERENCE)(make_x())
    report.assert_no_graph_breaks()
    report.assert_coverage(1.0)
    assert len(report.graphs) == 1
    assert [site.module.split(".")[-1] for site in report.sites] == [str(i) for i in range(6)]


def test_module_paths_are_the_users() -> None:
    """Dynamo runs PyTorch's own modules through a wrapper, whose variable is not in the path."""
    report = fa_inductor.explain(nn.Sequential(Attention()), options=REFERENCE)(make_x())
    assert [site.module for site in report.sites] == ["0"]


def test_coverage_error_lists_each_fallback(report: Report) -> None:
    assert report.coverage == pytest.approx(2 / 3)
    report.assert_coverage(2 / 3)
    with pytest.raises(CoverageError) as error:
        report.assert_coverage(0.9)
    heading, *lines = str(error.value).splitlines()
    assert heading.startswith("67% of 3 attention sites")
    assert "90% were asked for" in heading
    assert lines == [f"  {report.sites[2].source}: {' · '.join(report.sites[2].reason_texts)}"]
    assert isinstance(error.value, AssertionError)


def test_a_model_without_attention_is_covered() -> None:
    report = fa_inductor.explain(nn.Linear(32, 4))(make_x())
    assert (report.sites, report.coverage, report.graph_breaks) == ([], 1.0, [])
    assert report.summary() == "1 graph(s), 0 break(s), 0 attention site(s)"


def test_json_is_read_back_as_it_was_written(report: Report) -> None:
    data = report.to_json()
    assert json.loads(report.dumps()) == json.loads(json.dumps(data)) == data
    assert data["schema_version"] == 2
    site = data["sites"][2]
    assert site["source"] == report.sites[2].source
    assert "F.scaled_dot_product_attention(q, k, v, mask)" in site["code"]
    assert (site["module"], site["kernel"], site["copied"]) == ("last", None, {})
    assert site["notes"] == []
    assert site["reasons"]["reference"] == list(report.sites[2].reasons["reference"])
    assert site["spec"]["q"] == {
        "shape": [2, 2, 6, 16],
        "stride": [192, 16, 32, 1],
        "dtype": "bfloat16",
        "device": "cpu",
    }
    assert [graph["sites"] for graph in data["graphs"]] == [2, 1]
    assert data["graph_breaks"][0]["source"] == report.graph_breaks[0].source


def test_symbolic_sizes_are_text_in_json() -> None:
    x = make_x()
    torch._dynamo.mark_dynamic(x, 1)
    report = fa_inductor.explain(Attention(), options=REFERENCE)(x)
    batch, heads, length, head_dim = report.to_json()["sites"][0]["spec"]["q"]["shape"]
    assert (batch, heads, head_dim) == (2, 2, 16)
    assert isinstance(length, str)
    assert json.loads(report.dumps()) == report.to_json()


def test_symbolic_numbers_are_text_in_json() -> None:
    """A scale that Dynamo makes a symbol of, before it knows better."""
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        config = fa_inductor.Config(kernels=("reference",))
        found.extend(site.spec for site in rewrite(gm, config, apply=False))
        return gm.forward

    def attend(q: torch.Tensor, scale: float) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, scale=scale)

    torch.compile(attend, backend=backend, dynamic=True)(torch.randn(1, 2, 4, 8), 0.3)
    assert isinstance(found[0].scale, torch.SymFloat)
    assert isinstance(json.loads(json.dumps(found[0].to_json()))["scale"], str)


def test_report_renders(report: Report) -> None:
    from rich.console import Console

    for width in (40, 200):  # narrow columns fold, they do not swallow
        text = io.StringIO()
        Console(file=text, width=width).print(report)
        joined = "".join(character for character in text.getvalue() if character.isalnum())
        for word in ("last", "reference", "fallback", "graphbreakat", "attnmaskfloat3266"):
            assert word in joined or width == 40
        assert "fallback" in text.getvalue()
    assert report.summary() in text.getvalue()


def test_brackets_in_a_reason_are_not_markup() -> None:
    """A reason may hold anything: `[bold]` must be shown, not obeyed."""
    from rich.console import Console

    report = Report()
    (site,) = fa_inductor.explain(Attention(), options=REFERENCE)(make_x()).sites
    report.add(1, [dataclasses.replace(site, reasons={"all": ("[bold]odd[/bold]",)})], None)
    text = io.StringIO()
    Console(file=text, width=300).print(report)
    assert "[bold]odd[/bold]" in text.getvalue()


def test_fallback_line_has_each_reason_once(report: Report) -> None:
    masked = report.sites[2]
    line = fallback_line([*report.sites, masked])
    assert line is not None
    assert line.startswith(f"2 of 4 attention sites left to PyTorch (first at {masked.source}): ")
    assert [line.count(text) for text in masked.reason_texts] == [1] * len(masked.reason_texts)
    assert fallback_line(report.sites[:2]) is None
    assert fallback_line([]) is None
