"""`fa-inductor explain` and `fa-inductor report` in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from explained_model import Model, make_mask, make_x

from fa_inductor.cli import main
from fa_inductor.reporting import FORMATS


def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return Model(), (make_x(), make_mask()), {}


EXPLAIN = ("explain", "test_cli:make", "--kernels", "reference")
BEGINNINGS = {"json": "{", "markdown": "## Attention", "sarif": "{", "html": "<!doctype html>"}


def _run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "report.json"
    assert _run(*EXPLAIN, "--format", "json", "--output", str(path)) == ""
    return path


def test_explain_shows_a_table_and_writes_json_beside_it(tmp_path: Path) -> None:
    beside = tmp_path / "beside.json"
    output = _run(*EXPLAIN, "--json", str(beside))
    assert "3 attention site(s): 2 on reference, 1 on fallback" in output
    assert json.loads(beside.read_text())["schema_version"] == 2


@pytest.mark.parametrize("form", FORMATS)
def test_a_written_report_is_shown_in_every_format(
    form: str, written: Path, tmp_path: Path
) -> None:
    shown = _run("report", str(written), "--format", form)
    assert shown.lstrip().startswith(BEGINNINGS.get(form, "2 graph(s), 1 break(s)"))
    assert "GB0025" in shown
    out = tmp_path / "out"
    assert _run("report", str(written), "--format", form, "--output", str(out)) == ""
    if form != "rich":  # a terminal's table is as wide as the terminal
        assert out.read_text() == shown


def test_several_reports_are_shown_as_one(written: Path) -> None:
    shown = json.loads(_run("report", str(written), str(written), "--format", "json"))
    assert (len(shown["sites"]), len(shown["graph_breaks"])) == (6, 2)
    assert shown["coverage"] == pytest.approx(2 / 3)


def test_what_is_no_report_is_an_error_that_says_so(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"schema_version": 1}')
    assert "reads 2" in _run("report", str(wrong), status=1)
    assert "not a report" in _run("report", str(tmp_path / "nowhere.json"), status=1)
    assert "'markdown'" in _run("report", str(wrong), "--format", "markdwn", status=2)
