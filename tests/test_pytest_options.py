"""The pytest plugin inside this process: its options, and how it judges a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import reported_data

import pytest_fa_inductor
from fa_inductor.pytest_plugin import Reports
from fa_inductor.reporting import baseline
from pytest_fa_inductor import FAIL_ON

ROOT = Path(__file__).parents[1]


# --- Judging --------------------------------------------------------------------------------------


class _Config:
    """All that `Reports` asks of pytest."""

    def __init__(self, rootpath: Path) -> None:
        self.rootpath = rootpath


class _Session:
    exitstatus = 0


def _judged(folder: Path, tests: dict[str, Any], words: tuple[str, ...], known: Path | None) -> Any:
    """`Reports` at the end of a run whose tests have these reports, and the run's session."""
    file = str(known) if known else None
    reports = Reports(_Config(folder), str(folder / "out"), file, False, words)  # type: ignore[arg-type]
    for name, data in tests.items():
        result = pytest.TestReport(name, ("", 0, ""), {}, "passed", None, "teardown")
        result.fa_inductor = data  # type: ignore[attr-defined]
        reports.pytest_runtest_logreport(result)
    session = _Session()
    reports.pytest_sessionfinish(session)  # type: ignore[arg-type]
    return reports, session


def test_a_run_with_what_is_known_alone_passes(tmp_path: Path) -> None:
    data = reported_data.report(tmp_path)
    known = tmp_path / "known.json"
    reports, session = _judged(tmp_path, {"a": data}, FAIL_ON, None)
    assert session.exitstatus == 1
    assert {each.rule for each in reports.failing} == set(FAIL_ON)
    baseline.write(known, reports.found, tmp_path)
    reports, session = _judged(tmp_path, {"b": data}, FAIL_ON, known)
    assert (session.exitstatus, reports.failing) == (0, [])
    data["sites"].append(reported_data.site(tmp_path, "layers.2"))
    reports, session = _judged(tmp_path, {"b": data}, FAIL_ON, known)
    assert session.exitstatus == 1
    assert [(each.rule, each.where) for each in reports.failing] == [("fallback", "layers.2")]
    reports, session = _judged(tmp_path, {"b": data}, ("nan",), known)
    assert (session.exitstatus, reports.failing) == (0, [])


# --- Options --------------------------------------------------------------------------------------


def test_wrong_options_are_usage_errors_that_help(tmp_path: Path) -> None:
    for arguments, message in {
        ("--fa-fail-on=graph-brake",): "Did you mean 'graph-break'?",
        ("--fa-fail-on=nan,nothing-alike",): "known are graph-break, fallback, recompile, copy",
        ("--fa-baseline=nowhere.json",): "--fa-write-baseline makes it",
        ("--fa-write-baseline",): "name the file with --fa-baseline",
    }.items():
        assert message in _configure(tmp_path, *arguments)


def _configure(folder: Path, *arguments: str) -> str:
    """What pytest's configuration says of these arguments, without a process."""
    parser = pytest.Parser(_ispytest=True)
    pytest_fa_inductor.pytest_addoption(parser)
    options = parser.parse_known_args([*arguments])

    class Config:
        rootpath = folder

        def getoption(self, name: str) -> Any:
            return getattr(options, name)

    with pytest.raises(pytest.UsageError) as error:
        pytest_fa_inductor.pytest_configure(Config())  # type: ignore[arg-type]
    return str(error.value)


def test_asked_without_a_compile_it_says_so(tmp_path: Path) -> None:
    """A run that compiles nothing proves nothing, and must not look as if."""

    class Terminal:
        lines: ClassVar[list[str]] = []

        def section(self, title: str) -> None:
            self.lines.append(title)

        def write_line(self, line: str) -> None:
            self.lines.append(line)

    reports, session = _judged(tmp_path, {}, ("fallback",), None)
    reports.pytest_terminal_summary(Terminal())
    assert "no test has compiled anything" in Terminal.lines
    assert session.exitstatus == 0
    assert json.loads((tmp_path / "out/report.json").read_text())["sites"] == []


def test_the_docs_name_options_that_exist() -> None:
    parser = pytest.Parser(_ispytest=True)
    pytest_fa_inductor.pytest_addoption(parser)
    known = {name for option in parser.getgroup("fa_inductor").options for name in option.names()}
    for name in ("docs/reports.md", "docs/github-actions.yml", "README.md"):
        text = (ROOT / name).read_text()
        used = set(re.findall(r"--fa-[a-z-]+", text))
        assert used, name
        assert used <= known, name
    words = re.search(r"default: (\S*nan\S*)", (ROOT / "docs/github-actions.yml").read_text())
    assert words is not None
    assert pytest_fa_inductor._words(words.group(1)) == pytest_fa_inductor.FAIL_ON
