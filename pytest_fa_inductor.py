"""fa_inductor's part in pytest: its options, and the fixtures `fa_compile` and `fa_device`.

pytest imports this module in every run, wherever fa_inductor is installed. So it stands beside the
package, whose import brings in PyTorch, and imports that only for those who ask for something;
what is done then is in `fa_inductor/pytest_plugin.py` and `fa_inductor/warming/`. Use:
docs/reports.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_COMPILE_ONLY = "fa_inductor_compile_only"
FAIL_ON = ("graph-break", "fallback", "recompile", "copy", "nan")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fa_inductor", "attention in compiled graphs (fa_inductor)")
    group.addoption(
        "--fa-report",
        metavar="DIR",
        help="write report.json, report.md, report.sarif and report.html on all compiles into DIR; "
        "with --junitxml also properties of the test cases there",
    )
    group.addoption(
        "--fa-fail-on",
        metavar="WORDS",
        help=f"fail the run on any of these, separated by commas: {', '.join(FAIL_ON)}",
    )
    group.addoption(
        "--fa-baseline",
        metavar="FILE",
        help="put up with the findings in FILE and fail on new ones only; without --fa-fail-on, "
        "on new ones of any kind",
    )
    group.addoption(
        "--fa-write-baseline",
        action="store_true",
        help="write the findings of this run to the file of --fa-baseline, and fail on none",
    )
    group.addoption(
        "--compile-only",
        action="store_true",
        help="compile the attention kernels of tests that use fa_device, and launch none",
    )
    group.addoption(
        "--compile-only-target",
        metavar="GPU",
        default="sm_90a",
        help="the GPU to compile for on a machine without one (default sm_90a)",
    )


def pytest_configure(config: pytest.Config) -> None:
    option = config.getoption
    if option("compile_only"):
        from fa_inductor.warming.pytest_compile_only import CompileOnly

        config.pluginmanager.register(CompileOnly(option("compile_only_target")), _COMPILE_ONLY)
    report, baseline, writes = (
        option("fa_report"),
        option("fa_baseline"),
        option("fa_write_baseline"),
    )
    words = _words(option("fa_fail_on"))
    if writes and not baseline:
        raise pytest.UsageError("--fa-write-baseline: name the file with --fa-baseline=FILE")
    if baseline and not writes and not Path(baseline).is_file():
        raise pytest.UsageError(
            f"--fa-baseline={baseline}: no such file; --fa-write-baseline makes it"
        )
    if report or baseline or words:
        from fa_inductor.pytest_plugin import Reports

        chosen = words or (FAIL_ON if baseline else ())
        plugin = Reports(config, report, baseline, bool(writes), chosen)
        config.pluginmanager.register(plugin, "fa_inductor_reports")


def _words(given: str | None) -> tuple[str, ...]:
    """The words of `--fa-fail-on`; an unknown one is an error that names the nearest."""
    words = tuple(word.strip() for word in (given or "").split(",") if word.strip())
    for word in words:
        if word not in FAIL_ON:
            import difflib

            close = difflib.get_close_matches(word, FAIL_ON, n=1, cutoff=0.4)
            suggestion = f" Did you mean {close[0]!r}?" if close else ""
            raise pytest.UsageError(
                f"--fa-fail-on: unknown word {word!r}; known are {', '.join(FAIL_ON)}.{suggestion}"
            )
    return words


@pytest.fixture
def fa_compile(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Compiles with the backend `fa_inductor`, and tells what happened: see docs/reports.md.

    `compiled = fa_compile(model, options=..., target=..., **arguments of torch.compile)`;
    `fa_compile.report` is the `fa_inductor.Report` of the test so far.
    """
    from fa_inductor.pytest_plugin import compiling

    with compiling(request.node) as compiler:
        yield compiler


@pytest.fixture
def fa_device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The device to make tensors on, a `torch.device`: the GPU, or the CPU where there is none.

    With `--compile-only` they are fake, and attention compiles its kernels and launches none.
    """
    plugin = request.config.pluginmanager.get_plugin(_COMPILE_ONLY)
    if plugin is not None:
        with plugin.device() as device:
            yield device
        return
    import torch

    yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
