"""The installed package: patterns live in a folder of their own and must still come along."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads: building writes into the source tree."""
    copy = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("fa_inductor", "patterns"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "pytest_fa_inductor.py"):
        shutil.copy(ROOT / file, copy)
    return copy


def _run(*command: str, cwd: Path, **environment: str) -> str:
    """What the command prints; run from `cwd`, so that the checkout is not on the path."""
    process = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    _run(*PIP, "wheel", *OFFLINE, "--wheel-dir", str(out), str(sources), cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_source(sources: Path, wheel: Path) -> None:
    """And measured times, schema and template, which are no sources to setuptools."""
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if name.endswith((".py", ".json", ".j2"))}
    expected = {str(path.relative_to(sources)) for path in sources.glob("fa_inductor/**/*.py")}
    expected |= {str(path.relative_to(sources)) for path in sources.glob("fa_inductor/data/*.json")}
    expected |= {str(path.relative_to(sources)) for path in sources.glob("fa_inductor/**/*.j2")}
    expected |= {"pytest_fa_inductor.py"}
    expected |= {
        f"fa_inductor/{path.relative_to(sources)}" for path in sources.glob("patterns/*.py")
    }
    assert {"fa_inductor/patterns/sdpa.py", "fa_inductor/data/times_sm_90a.json"} <= expected
    assert {"fa_inductor/data/report.schema.json", "fa_inductor/reporting/page.html.j2"} <= expected
    assert packed == expected


def test_wheel_names_the_backend_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
    points = ConfigParser()
    points.read_string(archive.read(name).decode())
    assert dict(points["torch_dynamo_backends"]) == {
        "fa_inductor": "fa_inductor.backend:fa_inductor"
    }
    assert dict(points["pytest11"]) == {"pytest_fa_inductor": "pytest_fa_inductor"}
    assert dict(points["console_scripts"]) == {"fa-inductor": "fa_inductor.cli:main"}
    metadata = Parser().parsestr(
        archive.read(name.replace("entry_points.txt", "METADATA")).decode()
    )
    required = metadata.get_all("Requires-Dist") or []
    assert "flash-attn-4==4.0.0b36" in required
    assert any(r.startswith("torch>=2.11") for r in required)
    assert any(r.startswith("nvidia-cudnn-frontend>=1.32") for r in required)


_PROGRAM = """
import fa_inductor.patterns.sdpa, fa_inductor.backend
from importlib.metadata import entry_points
(point,) = entry_points(group="torch_dynamo_backends", name="fa_inductor")
assert point.load() is fa_inductor.backend.fa_inductor
(plugin,) = entry_points(group="pytest11", name="pytest_fa_inductor")
assert plugin.load().fa_compile
assert fa_inductor.Report().render("html").startswith("<!doctype html>")
print(fa_inductor.patterns.sdpa.__file__)
"""


def test_unpacked_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    """The same as a regular install, which only unpacks."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    found = _run(sys.executable, "-c", _PROGRAM, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert Path(found.strip()) == tmp_path / "fa_inductor" / "patterns" / "sdpa.py"


def test_editable_install_finds_the_patterns(sources: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows torch and the build tools from ours."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # Behind its own packages: both environments have a fa_inductor.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    python = str(environment / "bin" / "python")
    _run(*PIP, "--python", python, "install", *OFFLINE, "--editable", str(sources), cwd=tmp_path)
    found = _run(python, "-c", _PROGRAM, cwd=tmp_path, PYTHONPATH="")
    assert Path(found.strip()) == sources / "patterns" / "sdpa.py"
    assert (environment / "bin" / "fa-inductor").exists()
