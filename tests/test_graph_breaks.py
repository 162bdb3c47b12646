"""Graph breaks: what Dynamo says, those that no backend is told of, and graphs given up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import fa_inductor
from fa_inductor import Report, collecting, dynamo_compat
from fa_inductor.errors import FallbackError
from fa_inductor.explaining import planning_backend
from fa_inductor.graph_breaks import GraphBreak, understand
from fa_inductor.user_code import qualified_function
from helpers import compile_quick

IDS = {"Data-dependent branching": "GB0170", "Call to `f()`": "GB0025"}
MESSAGE = """Call to `f()`
  Explanation: It is written
    over two lines.
  Hint: Do this.
  Hint: Or do
    that.

  Developer debug context: f []

 For more details about this graph break, please visit: https://somewhere/gb0025.html"""
LOOP = (
    MESSAGE
    + """

*** While handling this graph break, another graph break occurred: ***

graph break in loop
  Explanation: The frame is skipped.
  Hint: Another hint.

  Developer debug context: frame skipped"""
)


def _here(code: str) -> str:
    """`file:line` of the only line of this file, outside this function, that ends in `# <code>`."""
    lines = inspect.getsource(inspect.getmodule(_here)).splitlines()  # type: ignore[arg-type]
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {code}"))
    return f"{__file__}:{number}"


# --- What a message says --------------------------------------------------------------------------


def test_a_message_is_taken_apart() -> None:
    broken = understand(MESSAGE, (), IDS)
    assert broken == GraphBreak(
        reason="Call to `f()`",
        source="",
        explanation="It is written over two lines.",
        hints=("Do this.", "Or do that."),
        gb_id="GB0025",
    )


def test_a_skipped_frame_says_what_broke_and_that_it_is_skipped() -> None:
    broken = understand(LOOP, (), IDS, skipped_at="model.py:7")
    assert (broken.reason, broken.gb_id, broken.source) == ("Call to `f()`", "GB0025", "model.py:7")
    assert broken.explanation == "It is written over two lines. The frame is skipped."
    assert broken.hints == ("Do this.", "Or do that.")
    assert broken.skipped


def test_a_word_of_dynamos_is_explained() -> None:
    broken = understand("generic_jump TensorVariable()", (), IDS)
    assert (broken.reason, broken.gb_id) == ("Data-dependent branching", "GB0170")
    assert "depends on the values" in broken.explanation
    unknown = understand("some_new_reason", (), IDS)
    assert (unknown.reason, unknown.gb_id, unknown.explanation) == ("some_new_reason", "", "")


# --- What Dynamo really says ----------------------------------------------------------------------


def _branching(x: Tensor) -> Tensor:
    x = x.sin()
    if x.sum() > 0:  # branching
        x = x + 1
    return x.cos()


def _inner(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()  # inner
    return x.cos()


def _nested(x: Tensor) -> Tensor:
    return _inner(x.sin())  # nested


def _in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        x = x.sin()
        torch._dynamo.graph_break()  # loop
    return x


def _at_once(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()  # at once
    return x.sin()


def _nothing_else(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()  # nothing else
    return x


def _explained(fn: Callable[..., Any]) -> Report:
    return fa_inductor.explain(fn)(torch.ones(3))


def test_a_branch_on_data_has_dynamos_id() -> None:
    (broken,) = _explained(_branching).graph_breaks
    assert (broken.reason, broken.gb_id) == ("Data-dependent branching", "GB0170")
    assert (broken.source, broken.skipped) == (_here("branching"), False)


def test_a_break_has_the_users_stack() -> None:
    """... once, although Dynamo meets it again when it compiles the callee alone."""
    (broken,) = _explained(_nested).graph_breaks
    assert (broken.gb_id, broken.source) == ("GB0025", _here("inner"))
    assert "User-inserted graph break" in broken.explanation
    assert "Remove" in broken.hints[0]
    frames = [(frame.source, frame.function) for frame in broken.stack]
    assert frames == [(_here("nested"), "_nested"), (_here("inner"), "_inner")]


def test_a_frame_left_to_python_is_a_break() -> None:
    """No graph tells of it: without a word, a model that runs in Python would look well."""
    report = _explained(_in_a_loop)
    assert report.graphs == []
    (broken,) = report.graph_breaks
    assert (broken.gb_id, broken.source, broken.skipped) == ("GB0025", _here("loop"), True)
    assert "loop" in broken.explanation
    with pytest.raises(AssertionError, match="graph_break"):
        report.assert_no_graph_breaks()


def test_a_break_before_any_graph_is_told() -> None:
    for fn, place, graphs in ((_at_once, "at once", 1), (_nothing_else, "nothing else", 0)):
        report = _explained(fn)
        assert len(report.graphs) == graphs
        (broken,) = report.graph_breaks
        assert (broken.source, broken.skipped) == (_here(place), False)


def test_a_report_is_told_nothing_of_another() -> None:
    with collecting() as outer:
        _explained(_in_a_loop)
        _explained(_at_once)
    assert (outer.graphs, outer.graph_breaks) == ([], [])


def test_what_was_compiled_before_is_not_told() -> None:
    both = [torch.compile(fn, backend="eager") for fn in (_in_a_loop, _at_once)]
    for compiled in both:
        compiled(torch.ones(3))
    with collecting() as report:
        for compiled in both:
            compiled(torch.ones(3))
    assert report.graph_breaks == []


def test_a_break_is_one_however_often_its_graph_is_made_again() -> None:
    compiled = torch.compile(_branching, backend=planning_backend({}, None), dynamic=False)
    with collecting() as report:
        for length in (3, 4):
            compiled(torch.ones(length))
    assert len(report.graphs) == 4
    assert [each.source for each in report.graph_breaks] == [_here("branching")]


def test_a_frame_that_dynamo_compiles_no_more_is_a_break() -> None:
    """From then on it runs in Python: its graphs so far would tell another story."""
    compiled = torch.compile(_attend, backend=planning_backend({}, None), dynamic=False)
    with collecting() as report, torch._dynamo.config.patch(recompile_limit=1):
        for length in (4, 5):
            compiled(torch.randn(1, 2, length, 8))
    (broken,) = report.graph_breaks
    assert (broken.gb_id, broken.source, broken.skipped) == ("GB0039", _here("attend"), True)


class _One:
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()


class _Two:
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.sin()


def test_functions_are_told_by_their_class() -> None:
    for each in (_One(), _Two()):
        data = _explained(each.forward).to_json()
        name = f"{type(each).__name__}.forward"
        assert [frame["function"] for frame in data["graph_breaks"][0]["stack"]] == [name]
        assert {graph["function"] for graph in data["graphs"]} == {name}
    assert qualified_function(f"{__file__}:1", "forward") == "forward"
    assert qualified_function("<string>:1", "forward") == "forward"
    assert qualified_function("unknown", "forward") == "forward"


# --- Whose graph it is, and what is given up ------------------------------------------------------


def _attend(x: Tensor) -> Tensor:  # attend
    return F.scaled_dot_product_attention(x, x, x)


def test_graphs_have_their_frame_and_why_they_were_made_again() -> None:
    compiled = compile_quick(_attend, dynamic=False)
    with collecting() as report:
        for length in (4, 5):
            compiled(torch.randn(1, 2, length, 8))
    first, second = report.graphs
    for graph in report.graphs:
        assert (graph.function, graph.source) == ("_attend", _here("attend"))
        assert (graph.sites, graph.compile_id.split("/")[0]) == (1, "0")
    assert first.recompiled is None
    assert second.recompiled is not None
    assert "size mismatch at index 2. expected 4, actual 5" in second.recompiled
    assert not second.recompiled.startswith("0/0")


def test_a_graph_that_dynamo_gave_up_is_not_in_the_report() -> None:
    """It compiles with the float as a symbol, sees that it has to be a number, and starts anew."""
    attempts: list[int] = []

    def attend_and_clamp(x: Tensor, most: float) -> Tensor:
        return _attend(x).clamp(max=most)

    compiled = compile_quick(attend_and_clamp, dynamic=True)

    def counted(nodes: int, sites: Sequence[Any], broken: Any) -> None:
        found = dynamo_compat.attempt()
        assert found is not None
        attempts.append(found.number)
        right(nodes, sites, broken)

    right = fa_inductor.report.add_graph
    with pytest.MonkeyPatch.context() as patch, collecting() as report:
        patch.setattr(fa_inductor.report, "add_graph", counted)
        compiled(torch.randn(1, 2, 4, 8), 0.5)
    assert attempts == [0, 1]  # else this test looks at nothing
    assert (len(report.graphs), len(report.sites)) == (1, 1)


def test_two_functions_compiled_alike_are_two() -> None:
    """After a reset Dynamo counts anew: the same number is not the same compile."""
    with collecting() as report:
        for _ in range(2):
            torch._dynamo.reset()
            compile_quick(_attend)(torch.randn(1, 2, 4, 8))
    assert [graph.compile_id for graph in report.graphs] == ["0/0", "0/0"]
    assert len(report.sites) == 2
    assert [graph.recompiled for graph in report.graphs] == [None, None]


def test_a_graph_whose_compile_failed_is_not_in_the_report() -> None:
    def failing(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        fa_inductor.compile_pass.run(gm, fa_inductor.Config(kernels=("reference",)))
        raise ZeroDivisionError

    with (
        torch._dynamo.config.patch(suppress_errors=True),
        collecting() as report,
    ):
        torch.compile(_attend, backend=failing)(torch.randn(1, 2, 4, 8))
    assert (report.graphs, report.sites) == ([], [])


def test_what_the_policy_refused_is_in_the_report() -> None:
    compiled = compile_quick(_attend, kernels=("fa4",), on_fallback="error")
    with collecting() as report, pytest.raises(Exception, match="left to PyTorch") as failed:
        compiled(torch.randn(1, 2, 4, 8))
    assert FallbackError.__name__ in str(failed.value)
    assert [site.kernel for site in report.sites] == [None]
