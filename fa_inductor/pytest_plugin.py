"""What the pytest plugin does once it is asked for something: collect, judge, write, sum up.

`pytest_fa_inductor.py`, beside the package, has the options and the fixture.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from . import numerics, torch_compat
from .errors import NumericsError, OptionError
from .explaining import planning_backend
from .report import NotFinite, Report, collecting, settled
from .reporting import baseline, paths, render
from .reporting.data import PARTS, Data, merged, summary
from .reporting.findings import Finding, findings
from .reporting.junit import properties
from .reporting.markdown import markdown
from .reporting.page import page
from .reporting.sarif import sarif
from .watch import split_site

_REPORT = pytest.StashKey[Report]()


# --- The fixture ----------------------------------------------------------------------------------


class Compiler:
    """What the fixture `fa_compile` is: a way to compile, and the report of the test so far."""

    def __init__(self, report: Report) -> None:
        self._report = report

    @property
    def report(self) -> Report:
        """What was compiled in this test so far."""
        settled()
        return self._report

    def __call__(
        self,
        fn: Callable[..., Any],
        *,
        options: Mapping[str, Any] | None = None,
        target: str | None = None,
        finite: bool = True,
        **compile_options: Any,
    ) -> Callable[..., Any]:
        """`torch.compile(fn, backend="fa_inductor", options=options, **compile_options)`.

        target: plan for this GPU, which need not be present, and run the captured code as it was
            written: CI without a GPU. As for `fa_inductor.explain`. A `mode` says nothing then.
        finite: look for NaN and infinity in what each call returns.
        Raises `UnknownTargetError`, `OptionError`.
        """
        if target is not None:
            compile_options.pop("mode", None)  # Inductor's
            compile_options["backend"] = planning_backend(options, target)
        elif options:  # PyTorch takes them or a mode
            compile_options |= {"backend": "fa_inductor", "options": dict(options)}
        else:
            compile_options["backend"] = "fa_inductor"
        compiled = torch.compile(fn, **compile_options)
        if not finite:
            return compiled
        function, source = _place_of(fn)

        def look(result: Any) -> None:
            for path, tensor in torch_compat.tensors_in(result):
                if not bool(torch.isfinite(tensor).all()):
                    self._report.not_finite.append(NotFinite(function, source, f"output{path}"))

        if isinstance(compiled, nn.Module):
            compiled.register_forward_hook(lambda module, args, result: look(result))
            return compiled

        @functools.wraps(fn)
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            result = compiled(*args, **kwargs)
            look(result)
            return result

        return looked_at


@contextmanager
def compiling(item: pytest.Item) -> Iterator[Compiler]:
    """The fixture for one test.

    It starts from a Dynamo that has compiled nothing: what a test reports would otherwise depend
    on the tests before it, whose code is not compiled again.
    """
    torch._dynamo.reset()
    with collecting(item.stash.setdefault(_REPORT, Report())) as report:
        yield Compiler(report)
        numerics.check()  # under `fa.on_guard="error"` what the last call did fails the test


@contextmanager
def _guarded(report: Report) -> Iterator[None]:
    """What `fa.guard` finds inside is in the report."""

    def listen(finding: numerics.Finding) -> None:
        site, kernel, direction = finding.names
        name, source = split_site(site)
        text = f"the {finding.text.replace(site, name)}"  # the same on every machine
        place = f"attention {name} on {kernel}"
        output = f"the numbers of the {direction}" if finding.is_finite else f"the {direction}"
        report.not_finite.append(NotFinite(place, source, output, text))

    numerics.listeners.append(listen)
    try:
        yield
    finally:
        numerics.listeners.remove(listen)


def _place_of(fn: Any) -> tuple[str, str]:
    """The name of a function or module, and `file:line` of its code."""
    name = type(fn).__name__ if isinstance(fn, nn.Module) else getattr(fn, "__qualname__", str(fn))
    code = inspect.unwrap(type(fn).forward if isinstance(fn, nn.Module) else fn)
    code = getattr(code, "__code__", None)
    return name, f"{code.co_filename}:{code.co_firstlineno}" if code else "unknown"


# --- The run --------------------------------------------------------------------------------------


class Reports:
    """Collects what every test compiles, whichever way, and judges it when the run ends.

    With pytest-xdist each test's report travels with its result, from the workers to where the
    files are written.
    """

    def __init__(
        self,
        config: pytest.Config,
        folder: str | None,
        baseline_file: str | None,
        writes_baseline: bool,
        fail_on: tuple[str, ...],
    ) -> None:
        self.root = config.rootpath
        self.folder = Path(folder) if folder else None
        self.baseline = Path(baseline_file) if baseline_file else None
        self.writes_baseline = writes_baseline
        self.fail_on = fail_on
        self.by_test: dict[str, Data] = {}
        self.known: set[str] | None = None
        if self.baseline is not None and not writes_baseline:
            try:
                self.known = baseline.read(self.baseline)
            except OptionError as error:
                raise pytest.UsageError(f"--fa-baseline: {error}") from error
        self.is_worker = hasattr(config, "workerinput")
        self.data: Data = merged([])
        self.found: list[Finding] = []
        self.failing: list[Finding] = []
        self.ran = 0  # tests, here or in workers
        self.is_empty = False
        self.wrote = False

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        report = item.stash.setdefault(_REPORT, Report())
        with collecting(report), _guarded(report):
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        outcome: Any = yield
        if call.when != "teardown":
            return
        settled()
        with suppress(NumericsError):  # a listener has heard it
            numerics.check()
        numerics.clear()  # the next test that meets it is to be told of it, too
        data = item.stash[_REPORT].to_json()
        if any(data[part] for part in PARTS):
            result = outcome.get_result()
            result.fa_inductor = json.dumps(data)  # text, which pytest-xdist sends as it is
            result.user_properties = [*result.user_properties, *properties(data, self.root)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        skipped = report.skipped and not hasattr(report, "wasxfail")
        self.ran += report.when == "call" and not skipped
        text = getattr(report, "fa_inductor", None)
        if text is not None:
            self.by_test[report.nodeid] = json.loads(text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_worker:
            return
        # Sorted: the order in which workers end is nobody's.
        self.data = merged(sorted(self.by_test.items()))
        self.found = findings(self.data, self.root)
        if self.writes_baseline:
            # What a run that was broken off has not met is not gone.
            self.wrote = session.exitstatus in (0, pytest.ExitCode.TESTS_FAILED)
            if self.wrote and self.baseline is not None:
                baseline.write(self.baseline, self.found, self.root)
        else:
            self.failing = [f for f in self.found if f.rule in self.fail_on and self._is_new(f)]
        if self.folder is not None:
            self._write(self.folder)
        # Tests that ran and compiled nothing have judged nothing.
        judges = bool(self.fail_on) and not self.writes_baseline
        self.is_empty = judges and self.ran > 0 and not self.by_test
        bad = self.failing or self.is_empty
        if bad and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _is_new(self, finding: Finding) -> bool:
        return self.known is None or finding.key(self.root) not in self.known

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        new = None
        if self.known is not None:
            new = [each.key(self.root) for each in self.found if self._is_new(each)]
        texts = {
            "report.json": render(self.data, "json", self.root),
            "report.md": markdown(self.data, self.root, new),
            "report.sarif": sarif(self.data, self.root, self.known),
            "report.html": page(self.data, self.root, new),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        say = terminalreporter.write_line
        terminalreporter.section("attention in compiled graphs")
        say(summary(self.data) if self.by_test else "no test has compiled anything")
        if self.is_empty:
            say("FAILED: tests ran, and none has compiled anything that could be judged")
        counts: dict[str, list[Finding]] = {}
        for each in self.found:
            counts.setdefault(each.rule, []).append(each)
        for rule, alike in counts.items():
            new = sum(map(self._is_new, alike))
            say(f"{rule}: {len(alike)}" + (f", {new} new" if self.known is not None else ""))
        for each in self.failing:
            place = paths.shown(each.source, self.root)
            tests = f" [{', '.join(each.tests)}]" if each.tests else ""
            terminalreporter.write_line(f"FAILED {each.rule} {place}: {each.message}{tests}")
        gone = (self.known or set()) - {each.key(self.root) for each in self.found}
        if gone:
            say(f"{len(gone)} finding(s) of {self.baseline} were not met")
        if self.wrote:
            say(f"{len(self.found)} finding(s) written to {self.baseline}")
        elif self.writes_baseline:
            say(f"{self.baseline} is left as it was: the run did not come to its end")
        if self.folder is not None:
            say(f"reports in {self.folder}")
