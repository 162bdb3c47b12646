"""The pytest plugin on a project of two models: one breaks its graph, one falls back.

Runs are shared between tests, and happen in this process where nothing depends on a fresh one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from report_readers import Page, check_report, check_sarif

ROOT = Path(__file__).parents[1]

MODELS = """
    import torch
    import torch.nn.functional as F
    from torch import nn


    class Attention(nn.Module):
        def forward(self, x, mask=None):
            return F.scaled_dot_product_attention(x, x, x, mask)


    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Attention(), Attention()

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()  # planted
            return self.second(x)
"""
TESTS = """
    import torch
    from models import Attention, Breaking

    OPTIONS = {"fa.kernels": ("reference",), "fa.on_fallback": "ignore"}


    def test_breaking(fa_compile):
        x = torch.randn(1, 2, 4, 8)
        compiled = fa_compile(Breaking(), target="sm_90a", options=OPTIONS)
        torch.testing.assert_close(compiled(x), Breaking()(x))
        assert len(fa_compile.report.graph_breaks) == 1


    def test_falling_back(fa_compile):
        x, mask = torch.randn(1, 2, 4, 8).bfloat16(), torch.zeros(4, 4)
        fa_compile(Attention(), target="sm_90a", options=OPTIONS)(x, mask)
        assert fa_compile.report.coverage == 0
"""
MORE = """
    import torch
    from models import Attention
    from test_models import OPTIONS


    def attend(x):
        return {"out": Attention()(x) / 0}


    def attend_copied(x):
        return Attention()(x)


    class Endless(torch.nn.Module):
        def forward(self, x):
            return x / 0


    class AlsoFallingBack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, x, mask):
            return self.attention(x, mask)


    def test_nan_and_recompile(fa_compile):
        compiled = fa_compile(attend, target="sm_90a", dynamic=False)
        for length in (64, 128):
            compiled(torch.randn(1, 2, length, 64).bfloat16())


    def test_module(fa_compile):
        fa_compile(Endless(), target="sm_90a", mode="max-autotune")(torch.ones(2))


    def test_other_caller(fa_compile):
        x, mask = torch.randn(1, 2, 4, 8).bfloat16(), torch.zeros(4, 4)
        compiled = fa_compile(AlsoFallingBack(), target="sm_90a", options=OPTIONS)
        compiled(x, mask)


    def test_without_the_fixture():
        import fa_inductor
        from fa_inductor.explaining import planning_backend

        x = torch.randn(2 * 64 * 64 + 1).bfloat16()[1:].view(1, 2, 64, 64)
        torch.compile(attend_copied, backend=planning_backend({}, "sm_90a"))(x)


    def test_guarded(fa_compile):
        x = torch.randn(1, 2, 64, 64)
        x[0, 1] = float("nan")
        options = {**OPTIONS, "fa.guard": "finite", "fa.on_guard": "error"}
        fa_compile(Attention(), options=options, finite=False)(x)


    def test_not_looked_at(fa_compile):
        fa_compile(attend, target="sm_90a", finite=False)(torch.randn(1, 2, 64, 64).bfloat16())
"""


@dataclass(frozen=True)
class Run:
    status: int
    output: str


class Project:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("models.py", MODELS)
        self.write("test_models.py", TESTS)
        (folder / "pytest.ini").write_text("[pytest]\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text).lstrip())

    def run(self, *arguments: str) -> Run:
        """pytest in this process, with modules that are gone afterwards."""
        names = [path.stem for path in self.folder.glob("*.py")]
        output = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            patch.chdir(self.folder)
            patch.setattr(sys, "path", sys.path.copy())
            for name in names:  # also of another project
                sys.modules.pop(name, None)
            status = pytest.main([*self._arguments(*arguments), "-s", "-p", "no:faulthandler"])
            for name in names:
                sys.modules.pop(name, None)
        return Run(int(status), output.getvalue())

    def run_alone(self, *arguments: str) -> Run:
        """pytest in a process of its own."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        environment.pop("PYTEST_XDIST_WORKER", None)
        command = [sys.executable, "-m", "pytest", *self._arguments(*arguments)]
        process = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        return Run(process.returncode, process.stdout + process.stderr)

    @staticmethod
    def _arguments(*arguments: str) -> list[str]:
        plugin = ("-p", "pytest_fa_inductor")
        return [*plugin, *arguments, "-p", "no:cacheprovider", "-q", "-W", "ignore"]

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def failing(project: Project) -> Run:
    return project.run(
        "--fa-report=out", "--fa-fail-on=graph-break,fallback", "--junitxml=junit.xml"
    )


# --- What it writes -------------------------------------------------------------------------------


def test_planted_faults_fail_the_run_though_all_tests_pass(failing: Run) -> None:
    assert failing.status == 1, failing.output
    assert "2 passed" in failing.output
    assert "3 attention site(s): 2 on reference, 1 on fallback" in failing.output
    lines = [line for line in failing.output.splitlines() if line.startswith("FAILED")]
    assert len(lines) == 2
    assert "FAILED graph-break models.py:18: GB0025" in lines[0]
    assert "[test_models.py::test_breaking]" in lines[0]
    assert "FAILED fallback models.py:8: bfloat16 q(1, 2, 4, 8)" in lines[1]
    assert "beside a bfloat16 query" in lines[1]


def test_the_json_is_of_its_schema(project: Project, failing: Run) -> None:
    data = project.json("out/report.json")
    check_report(data)
    tests = [site["test"] for site in data["sites"]]
    assert tests == ["test_models.py::test_breaking"] * 2 + ["test_models.py::test_falling_back"]
    assert data["graph_breaks"][0]["gb_id"] == "GB0025"


def test_the_sarif_is_of_the_public_schema(project: Project, failing: Run) -> None:
    log = project.json("out/report.sarif")
    check_sarif(log)
    places = {
        result["ruleId"]: (
            result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"],
            result["locations"][0]["physicalLocation"]["region"]["startLine"],
        )
        for result in log["runs"][0]["results"]
    }
    assert places == {"graph-break": ("models.py", 18), "fallback": ("models.py", 8)}


def test_markdown_and_page_are_written(project: Project, failing: Run) -> None:
    text = (project.folder / "out/report.md").read_text()
    assert "| `graph-break` | 1 |" in text
    assert "**GB0025" in text
    page = Page.of((project.folder / "out/report.html").read_text())
    assert "models.py:18" in page.text
    assert "fallback" in page.text


def test_properties_are_in_the_junit_file(project: Project, failing: Run) -> None:
    cases = ElementTree.parse(project.folder / "junit.xml").getroot().iter("testcase")
    found = {
        case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")}
        for case in cases
    }
    assert found["test_falling_back"]["fa.coverage"] == "0.0000"
    assert found["test_breaking"]["fa.finding.graph-break"].startswith("models.py:18: GB0025")


def test_workers_reports_are_merged(tmp_path: Path) -> None:
    """... into the very files that one process writes. To save time nothing is compiled: workers
    send text, whatever it is of."""
    project = Project(tmp_path)
    project.write(
        "test_models.py",
        """
        import pytest
        from fa_inductor import report


        @pytest.mark.parametrize("number", range(4))
        def test_one(number):
            found = report.NotFinite(f"f{number}", f"{__file__}:7", "output")
            report._collector.get().report.not_finite.append(found)
        """,
    )
    arguments = ("--fa-fail-on=nan", "--junitxml=junit.xml")
    one = project.run(*arguments, "--fa-report=one")
    many = project.run_alone(*arguments, "--fa-report=many", "-n", "2")
    for run in (one, many):
        assert run.status == 1, run.output
        assert "4 passed" in run.output
        assert "nan: 4" in run.output
    for name in ("report.json", "report.sarif", "report.md", "report.html"):
        texts = {(tmp_path / folder / name).read_text() for folder in ("one", "many")}
        assert len(texts) == 1, name
    assert (tmp_path / "junit.xml").read_text().count("fa.finding.nan") == 4


# --- Baseline -------------------------------------------------------------------------------------


def test_a_baseline_silences_what_is_old_only(project: Project, tmp_path: Path) -> None:
    writing = project.run("--fa-baseline=known.json", "--fa-write-baseline")
    assert writing.status == 0, writing.output
    assert "2 finding(s) written to known.json" in writing.output
    rules = [each["rule"] for each in project.json("known.json")["findings"]]
    assert rules == ["fallback", "graph-break"]

    changed = Project(tmp_path)  # and the same on another machine
    shutil.copy(project.folder / "known.json", tmp_path)
    # Lines move, and faults come in: only these are new, of whichever kind.
    changed.write("models.py", "    # A line more.\n" + MODELS)
    changed.write("test_more.py", MORE)
    new = changed.run("--fa-baseline=known.json", "--fa-report=out")
    assert new.status == 1, new.output
    failed = [line.split()[1] for line in new.output.splitlines() if line.startswith("FAILED")]
    # The fallback is another model's, at the very line of the one that is known.
    assert Counter(failed) == {"copy": 3, "fallback": 1, "nan": 3, "recompile": 1}
    assert "graph-break: 1, 0 new" in new.output
    assert "fallback: 2, 1 new" in new.output
    assert "[test_more.py::test_other_caller]" in new.output
    assert "nan: 3, 3 new" in new.output
    assert "the forward of attention " in new.output  # which only the guard has looked at
    assert "output['out'] of attend" in new.output
    assert "output of Endless" in new.output
    results = changed.json("out/report.sarif")["runs"][0]["results"]
    old = [each["ruleId"] for each in results if each["baselineState"] == "unchanged"]
    assert (sorted(old), len(results)) == (["fallback", "graph-break"], 10)
    assert "| `recompile` | 1 | 1 |" in (tmp_path / "out/report.md").read_text()


# --- What it costs unasked ------------------------------------------------------------------------


def test_an_unknown_word_ends_the_run_before_it_starts(project: Project) -> None:
    run = project.run("--fa-fail-on=fallbak")
    assert run.status == pytest.ExitCode.USAGE_ERROR
    assert "Did you mean 'fallback'?" in run.output
    assert "passed" not in run.output


def test_unasked_it_imports_and_says_nothing(tmp_path: Path) -> None:
    """It is part of every run of pytest wherever fa_inductor is installed."""
    project = Project(tmp_path)
    project.write("models.py", "")
    project.write(
        "test_models.py",
        """
        import sys


        def test_modules(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("pytest_fa_inductor")
            assert not pytestconfig.pluginmanager.hasplugin("fa_inductor_reports")
            heavy = {"torch", "fa_inductor", "rich", "jinja2", "numpy"}
            assert not heavy & set(sys.modules)
        """,
    )
    run = project.run_alone()
    assert run.status == 0, run.output
    assert "attention" not in run.output
