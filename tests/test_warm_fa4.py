"""Warming with the real FA4 for GPUs that are not there; tests use what one run has compiled."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from click.testing import CliRunner
from warm_specs import spec

from fa_inductor import cli, object_cache
from fa_inductor.errors import BundleError, FaInductorError
from fa_inductor.warming import bundle
from fa_inductor.warming.jobs import Job, Layout, of_spec
from fa_inductor.warming.warm import Warmed as Outcome
from fa_inductor.warming.warm import warm

pytestmark = pytest.mark.skipif(
    not any((Path(p) / "flash_attn" / "cute").exists() for p in sys.path), reason="needs FA4"
)

DENSE = of_spec(spec(needs_grad=True))[0]
MASKED = Job(
    *("masked", "fa4", False, DENSE.problem),
    {
        **DENSE.tensors,
        "t0": Layout((2, 100), "uint8", (), (100, 1)),
        "rows": Layout((2, 1), "int32"),
    },
    text="(i - j >= 0) and (t0[b, j] != 0)",
)
VARIABLE = Job(
    *("varlen", "fa4", False, DENSE.problem),
    {name: Layout((200, 4, 64), "bfloat16") for name in "qkv"}
    | {f"cu_seqlens_{name}": Layout((3,), "int32") for name in "qk"},
    bounds=(100, 100),
)
JOBS = (DENSE, MASKED, VARIABLE)
OTHER = "sm_120a"  # it has one class where sm_100a has two


class Warmed(NamedTuple):
    """said: by the command for sm_90a. other: what came of warming another target."""

    root: Path
    said: str
    other: Outcome


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    root = tmp_path_factory.mktemp("root")
    shapes = {name: {"shape": [1, 2, 8, 20], "dtype": "bfloat16"} for name in "qkv"}
    impossible = json.dumps({**shapes, "needs_grad": False})
    file = root / "calls.jsonl"
    file.write_text("\n".join((*(job.dumps() for job in JOBS), impossible)))
    command = ["warm", str(file), "--target", "sm_90a", "--jobs", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(object_cache.DIRECTORY, str(root))
        ran = CliRunner().invoke(cli.main, command)
        assert ran.exit_code == 1
        return Warmed(root, ran.output, warm([DENSE], OTHER).targets[0])


@pytest.fixture
def root(warmed: Warmed, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(object_cache.DIRECTORY, str(warmed.root))
    return warmed.root


def test_each_kind_of_call_is_compiled_for_its_classes_of_lengths(warmed: Warmed) -> None:
    (counts,) = (line for line in warmed.said.splitlines() if line.startswith("│"))
    assert counts.split()[1:10:2] == ["sm_90a", "4", "4", "0", "1"], warmed.said
    assert "head dims 8, 16" in " ".join(warmed.said.split())
    assert (warmed.other.compiled, warmed.other.failed) == (1, {})


def test_two_targets_in_one_directory_share_nothing(root: Path) -> None:
    hopper, blackwell = (
        {hashlib.sha256(path.read_bytes()).digest() for path in root.glob(f"fa4-{arch}-*/*/*.o")}
        for arch in ("sm_90a", OTHER)
    )
    assert hopper
    assert blackwell
    assert not hopper & blackwell


def test_the_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(object_cache.DIRECTORY, str(tmp_path))
    run = CliRunner().invoke
    ran = run(cli.main, ["warm", "json:dumps", "--target", "sm_42"])
    assert "Unknown target 'sm_42'" in ran.output
    assert run(cli.main, ["cache", "list"]).output.strip() == str(tmp_path)
    assert "0 intact" in run(cli.main, ["cache", "verify"]).output
    ran = run(cli.main, ["bundle", "save", str(tmp_path / "none.zip")])
    assert "there are no kernels" in ran.output


def test_a_bundle_is_unpacked_elsewhere_and_refused_where_it_does_not_fit(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "all.zip"
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"artifacts", None))
    ran = CliRunner().invoke(cli.main, ["bundle", "save", str(file)])
    assert ran.output.startswith("5 kernels and plans for fa4-sm_120a-170sms-"), ran.output
    environment = next(s for s in object_cache.stores() if "sm_90a" in s.folder.name).environment
    monkeypatch.setenv(object_cache.DIRECTORY, str(tmp_path / "elsewhere"))
    handed: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", handed.append)
    assert bundle.load(file, dict(environment)).objects == 5
    assert handed == [b"artifacts"]
    intact, damaged = object_cache.verify()
    assert (len(intact), damaged) == (5, [])
    for name, value in (("arch", "sm_103a"), ("flash-attn-4", "4.0.0b37"), ("sms", "144")):
        with pytest.raises(BundleError, match=rf"{name} \S+ \(here {value}\)"):
            bundle.load(file, {**environment, name: value})
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert not bundle.load(file).has_artifacts
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    (tmp_path / "damaged.zip").write_bytes(data)
    with pytest.raises(FaInductorError):
        bundle.load(tmp_path / "damaged.zip")


_GPU_TEST = """
import fa_inductor, pytest, torch
def test_compiles(fa_device):
    q = torch.randn(1, 100, 4, 64, device=fa_device, dtype=torch.bfloat16).transpose(1, 2)
    k = q[:, :2]
    out, _ = torch.ops.fa_inductor.attention(q, k, k, None, "none", "BSHD", False, "fa4")
    torch.testing.assert_close(out, torch.zeros(3))
    assert out.sum().item() == 12345
    raise ValueError("never reached")
def test_refuses(fa_device):
    with pytest.raises(RuntimeError):
        torch.ones(3, device=fa_device)
def test_without_the_fixture():
    raise ValueError
"""


def test_a_second_process_compiles_and_launches_nothing(root: Path, tmp_path: Path) -> None:
    """In a process of its own, as FA4 is imported for one target; then tests with the plugin."""
    (tmp_path / "test_on_gpu.py").write_text(_GPU_TEST)
    child = Path(__file__).with_name("compile_only_child.py")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        [sys.executable, str(child), "sm_90a", str(tmp_path)],
        input="".join(job.dumps() + "\n" for job in JOBS),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said, *of_pytest = ran.stdout.splitlines()
    first, again, second, answers, refused = json.loads(said)
    assert (first, again) == ([0, 1], [0, 1])
    assert second == [0, 3]  # beside the one that is in memory by now
    assert answers == [1, 1.0, 1, True, [1.0, 1.0, 1.0]]
    assert "cannot compile for sm_120a in this process" in refused
    assert "compiled only: 0 kernels in 0 s, 4 found" in of_pytest
    assert "2 skipped, 1 deselected" in of_pytest[-1]
