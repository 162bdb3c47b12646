"""The pytest plugin inside this process: its options, and how it judges a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


class _Terminal:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(title)

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def _said(reports: Reports) -> str:
    """The section of the terminal's summary."""
    terminal = _Terminal()
    reports.pytest_terminal_summary(terminal)
    return "\n".join(terminal.lines)


def _judged(
    folder: Path,
    tests: dict[str, Any],
    words: tuple[str, ...],
    known: Path | None,
    *,
    writes: bool = False,
    status: int = 0,
    ran: int = 0,
) -> Any:
    """`Reports` at the end of a run whose tests have these reports, and `ran` more none; and the
    run's session."""
    file = str(known) if known else None
    reports = Reports(_Config(folder), str(folder / "out"), file, writes, words)  # type: ignore[arg-type]
    for name, data in tests.items():
        result = pytest.TestReport(name, ("", 0, ""), {}, "passed", None, "teardown")
        result.fa_inductor = json.dumps(data)  # type: ignore[attr-defined]
        reports.pytest_runtest_logreport(result)
    for number in range(ran):
        result = pytest.TestReport(f"more {number}", ("", 0, ""), {}, "passed", None, "call")
        reports.pytest_runtest_logreport(result)
    session = _Session()
    session.exitstatus = status
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


@pytest.mark.parametrize("word", FAIL_ON)
def test_each_word_fails_the_run_alone(word: str, tmp_path: Path) -> None:
    data = reported_data.report(tmp_path)
    reports, session = _judged(tmp_path, {"a": data}, (word,), None)
    assert (session.exitstatus, {each.rule for each in reports.failing}) == (1, {word})
    assert f"FAILED {word} " in _said(reports)
    gone = {
        "graph-break": {"graph_breaks": []},
        "fallback": {"sites": data["sites"][2:]},
        "recompile": {"graphs": data["graphs"][:1]},
        "copy": {"sites": data["sites"][:2]},
        "nan": {"not_finite": []},
    }[word]
    _, session = _judged(tmp_path, {"a": {**data, **gone}}, (word,), None)
    assert session.exitstatus == 0


def test_a_run_that_failed_otherwise_keeps_its_status(tmp_path: Path) -> None:
    data = reported_data.report(tmp_path)
    for status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR):
        _, session = _judged(tmp_path, {"a": data}, FAIL_ON, None, status=status)
        assert session.exitstatus == status


def test_a_run_that_was_broken_off_writes_no_baseline(tmp_path: Path) -> None:
    """What it has not met is not gone."""
    known, data = tmp_path / "known.json", reported_data.report(tmp_path)
    _judged(tmp_path, {"a": data}, (), known, writes=True)
    before = known.read_text()
    broken_off = {"writes": True, "status": pytest.ExitCode.INTERRUPTED}
    reports, _ = _judged(tmp_path, {}, (), known, **broken_off)
    assert known.read_text() == before
    assert "is left as it was" in _said(reports)


def test_what_a_baseline_holds_in_vain_is_said(tmp_path: Path) -> None:
    known, data = tmp_path / "known.json", reported_data.report(tmp_path)
    _judged(tmp_path, {"a": data}, (), known, writes=True)
    reports, session = _judged(tmp_path, {"a": {**data, "not_finite": []}}, FAIL_ON, known)
    assert session.exitstatus == 0
    assert "1 finding(s) of" in _said(reports)


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

    for words, ran, status in ((("fallback",), 3, 1), (("fallback",), 0, 0), ((), 3, 0)):
        reports, session = _judged(tmp_path, {}, words, None, ran=ran)
        assert "no test has compiled anything" in _said(reports)
        assert ("FAILED: tests ran, and none has compiled" in _said(reports)) == bool(status)
        assert "nothing was compiled" in (tmp_path / "out/report.md").read_text()
        assert session.exitstatus == status
        assert json.loads((tmp_path / "out/report.json").read_text())["sites"] == []


def test_a_run_that_writes_a_baseline_or_skips_is_not_empty(tmp_path: Path) -> None:
    writing = {"writes": True, "ran": 1}
    _, session = _judged(tmp_path, {}, FAIL_ON, tmp_path / "known.json", **writing)
    assert session.exitstatus == 0
    reports = Reports(_Config(tmp_path), None, None, False, FAIL_ON)  # type: ignore[arg-type]
    skipped = pytest.TestReport("a", ("", 0, ""), {}, "skipped", "no GPU", "call")
    for report in (skipped, pytest.TestReport("b", ("", 0, ""), {}, "passed", None, "setup")):
        reports.pytest_runtest_logreport(report)
    assert reports.ran == 0


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
