"""The zoo behind the README's table of models: entries plan as it says there, and a few are run.

Dynamo takes two seconds for each, so not all are planned here: `benchmarks/models.py --check` does
that. Those that run do so in float32 on the reference kernel with poisoned memory, against
eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import compile_quick, kernels_of, run_reported
from poison import poisoned
from zoo import ENTRIES, Case, Entry
from zoo.judging import Judgement, error_of, judge, output_of
from zoo.planning import Row, plan, row_of, row_of_missing
from zoo.table import END, START, expanded, markdown, versions_line, written

README = (Path(__file__).parents[1] / "README.md").read_text()
TARGET = "sm_90a"
MAKE = f"run: python benchmarks/models.py --target {TARGET} --write README.md"
BY_NAME = {entry.name: entry for entry in ENTRIES}

# Their attention is Llama's or BERT's, word for word.
_COPIES = ("Qwen3", "Phi-3", "Mixtral", "RoBERTa", "DistilBERT")
# Of all others the last entry, of Llama one for each input.
_LAST = {entry.model: entry for entry in ENTRIES if entry.model not in _COPIES}
_LAST |= {entry.given: entry for entry in ENTRIES if entry.model == "Llama"}
_PLANNED = [entry for entry in ENTRIES if entry in _LAST.values()]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for more, and the threads of several workers only wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- The table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", _PLANNED, ids=lambda entry: entry.name)
def test_entry_is_planned_as_the_readme_says(entry: Entry) -> None:
    if entry.missing:
        pytest.skip(entry.missing)
    report = plan(entry, TARGET)
    # Fewer would mean that a pattern misses a spelling, or that `sites` is wrong.
    assert len(report.sites) == entry.sites
    if versions_line(TARGET) not in README:
        pytest.skip(f"the README's table is not of {versions_line(TARGET)}")
    row = row_of(entry, report)
    assert row.cells == expanded(README)[row.key], MAKE


def test_readme_has_every_entry_and_no_other() -> None:
    assert set(expanded(README)) == {row_of_missing(entry).key for entry in ENTRIES}, MAKE


def _row(model: str, attention: str, given: str, *cells: str) -> Row:
    return Row(Entry(model, attention, given, 2, lambda: Case(nn.Identity(), {})), cells)


def test_rows_that_say_the_same_are_one_line() -> None:
    cells, others = ("2 of 2", "2", "mask | bias", "cudnn", ""), ("0 of 2", "0", "", "", "why")
    rows = [
        _row("A", "sdpa", "plain", *cells),
        _row("A", "sdpa", "padded", *cells),
        _row("A", "eager", "plain", *cells),
        _row("A", "eager", "padded", *cells),
        _row("B", "sdpa", "plain", *cells),
        _row("B", "sdpa", "padded", *others),
    ]
    table = markdown(rows, TARGET)
    assert table.splitlines()[4:] == [
        "| A | sdpa, eager | plain, padded | 2 of 2 | 2 | mask \\| bias | cudnn |  |",
        "| B | sdpa | plain | 2 of 2 | 2 | mask \\| bias | cudnn |  |",
        "| B | sdpa | padded | 0 of 2 | 0 |  |  | why |",
    ]
    text = written(f"before\n{START}old\n{END}\nafter", table)
    assert text == f"before\n{START}{table}\n{END}\nafter"
    assert written(text, table) == text
    assert set(expanded(text)) == {row.key for row in rows}
    assert expanded(text)["B", "sdpa", "padded"] == others


def test_text_without_the_markers_is_not_written() -> None:
    with pytest.raises(ValueError, match="generated: models"):
        written("no markers", "table")


def test_missing_package_is_named_in_the_row() -> None:
    entry = Entry("A", "x", "plain", 2, lambda: Case(nn.Identity(), {}), requires="not_a_package")
    assert entry.missing == "not_a_package is not installed"
    assert "not_a_package is not installed" in markdown([row_of_missing(entry)], TARGET)


# --- Running --------------------------------------------------------------------------------------


def _quick(model: nn.Module) -> Callable[..., Any]:
    return compile_quick(model, fullgraph=False)


def _judge(name: str, compile: Callable[[nn.Module], Callable[..., Any]] = _quick) -> Judgement:
    return judge(BY_NAME[name], compile, poisoned, device="cpu", dtype=torch.float32)


_RUN = (
    "Gemma2-eager-padded",
    "GPT-OSS-eager-padded",
    "Llama-eager-packed",
    "GPT-2-eager-padded",
    "DeepSeek-V3-sdpa-padded",
    "SAM vision-sdpa-plain",
    "T5-eager-plain",
    "T5-sdpa-plain",
)


@pytest.mark.parametrize("name", _RUN)
def test_model_equals_eager(name: str) -> None:
    judged = _judge(name)
    assert judged.right, judged
    judged.report.assert_no_graph_breaks()
    assert kernels_of(judged.report) == ["reference"] * BY_NAME[name].sites


def test_lost_mask_is_judged_wrong() -> None:
    """The weights are such that a mask matters, and the judge sees that it does."""

    def without_mask(model: nn.Module) -> Callable[..., Any]:
        return lambda attention_mask, **inputs: model(**inputs)

    judged = _judge("BERT-sdpa-padded", without_mask)
    assert not judged.right
    assert judged.error > 0.05


def test_nan_is_judged_wrong() -> None:
    def with_nan(model: nn.Module) -> Callable[..., Any]:
        def run(**inputs: Any) -> tuple[torch.Tensor]:
            out = model(**inputs)[0]
            out[0, 0, 0] = float("nan")
            return (out,)

        return run

    assert not _judge("ViT-sdpa-plain", with_nan).right


# Through a softcap, and of relative positions.
_TRAINED = ("Llama-sdpa-packed", "Gemma2-eager-plain", "T5-eager-plain")


@pytest.mark.parametrize("name", _TRAINED)
def test_gradients_equal_eager(name: str) -> None:
    case = BY_NAME[name].build()
    parameters = list(case.model.parameters())
    with poisoned():
        expected = output_of(case, case.model)
        weight = torch.randn_like(expected)
        expected_grads = torch.autograd.grad(expected, parameters, weight, allow_unused=True)
        compiled = _quick(case.model)
        result, report = run_reported(lambda: output_of(case, compiled))
        grads = torch.autograd.grad(result, parameters, weight, allow_unused=True)
    assert error_of(result, expected) < 1e-5
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert (grad is None) == (wanted is None)
        assert grad is None or error_of(grad, wanted) < 1e-4
    assert kernels_of(report) == ["reference"] * BY_NAME[name].sites
    assert all(site.spec and site.spec.needs_grad for site in report.sites)
