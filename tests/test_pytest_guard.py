"""What `fa.guard` finds fails a test run: as a second source of `--fa-fail-on=nan`."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_readers import check_report
from test_pytest_plugin import Project, Run

GUARDED = """
    import torch
    from models import Attention


    def attend(fa_compile, x, **options):
        options = {"fa.kernels": ("reference",), **options}
        fa_compile(Attention(), options=options, finite=False)(x)


    def with_nan():
        x = torch.randn(1, 2, 64, 64)
        x[0, 1] = float("nan")
        return x


    def test_first(fa_compile):
        attend(fa_compile, with_nan(), **{"fa.guard": "finite"})


    def test_again(fa_compile):
        attend(fa_compile, with_nan(), **{"fa.guard": "finite"})


    def test_good(fa_compile):
        attend(fa_compile, torch.randn(1, 2, 64, 64), **{"fa.guard": "finite"})


    def test_error(fa_compile):
        attend(fa_compile, with_nan(), **{"fa.guard": "finite", "fa.on_guard": "error"})
"""
WRONG = """
    import torch
    from fa_inductor.kernels import spot_check
    from test_guarded import attend


    def test_wrong(fa_compile, monkeypatch):
        monkeypatch.setattr(spot_check, "forward", lambda *_: torch.tensor(0.5))
        attend(fa_compile, torch.randn(1, 2, 64, 64), **{"fa.guard": "oracle"})
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(tmp_path_factory.mktemp("guarded"))
    (made.folder / "test_models.py").unlink()
    made.write("test_guarded.py", GUARDED)
    made.write("test_wrong.py", WRONG)
    return made


@pytest.fixture(scope="module")
def judged(project: Project) -> Run:
    return project.run("--fa-fail-on=nan", "--fa-report=out", "-k", "not error")


def _failed(run: Run) -> list[str]:
    return [line for line in run.output.splitlines() if line.startswith("FAILED")]


def test_each_test_that_meets_it_is_named_with_site_and_text(judged: Run) -> None:
    assert judged.status == 1, judged.output
    assert "4 passed" in judged.output
    nan, _ = _failed(judged)
    assert "nan models.py:8: the forward of attention sdpa on reference: " in nan
    assert "the output is not finite (nan)" in nan
    assert "[test_guarded.py::test_again, test_guarded.py::test_first]" in nan


def test_wrong_numbers_count(judged: Run) -> None:
    _, wrong = _failed(judged)
    assert "the output is wrong by 5.0e-01 at sampled places" in wrong
    assert "[test_wrong.py::test_wrong]" in wrong


def test_the_text_is_in_the_report(project: Project, judged: Run) -> None:
    data = project.json("out/report.json")
    check_report(data)
    texts = {each["test"]: each["text"] for each in data["not_finite"]}
    assert set(texts) == {
        "test_guarded.py::test_again",
        "test_guarded.py::test_first",
        "test_wrong.py::test_wrong",
    }
    assert str(project.folder) not in "".join(texts.values())
    assert "is wrong by" in (project.folder / "out/report.md").read_text()


def test_a_test_that_ends_with_it_fails_where_errors_are_asked_for(project: Project) -> None:
    """... without any option of the run."""
    run = project.run("-k", "error")
    assert run.status == 1
    assert "NumericsError" in run.output


def test_a_run_that_compiles_nothing_fails(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("test_models.py", "def test_nothing(): pass")
    run = project.run("--fa-fail-on=nan")
    assert run.status == 1, run.output
    assert "1 passed" in run.output
    assert "FAILED: tests ran, and none has compiled anything" in run.output
    assert project.run().status == 0
    nothing = project.run("--fa-fail-on=nan", "-k", "no_such_test")
    assert nothing.status == pytest.ExitCode.NO_TESTS_COLLECTED
