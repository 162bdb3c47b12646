"""Jobs from specs, ops and recorded calls; warming with the real FA4 for targets not present."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fa_inductor import cli, demo, kernels, object_cache
from fa_inductor.errors import BundleError, FaInductorError, OptionError
from fa_inductor.spec import AttentionSpec, TensorSpec
from fa_inductor.warming import bundle, record, tracing
from fa_inductor.warming.compile_only import Seeing
from fa_inductor.warming.jobs import Job, Layout, of_spec, read
from fa_inductor.warming.warm import warm

needs_fa4 = pytest.mark.skipif(
    not any((Path(p) / "flash_attn" / "cute").exists() for p in sys.path), reason="needs FA4"
)


def spec(sq: int = 100, sk: int = 100, dim: int = 64, **rest: Any) -> AttentionSpec:
    def tensor(heads: int, length: int) -> TensorSpec:
        stride = (length * heads * dim, dim, heads * dim, 1)
        return TensorSpec((2, heads, length, dim), stride, torch.bfloat16, torch.device("cpu"))

    return AttentionSpec(tensor(4, sq), tensor(2, sk), tensor(2, sk), torch.bfloat16, **rest)


# --- Jobs -----------------------------------------------------------------------------------------


def test_a_spec_is_a_forward_and_a_backward() -> None:
    (forward,) = of_spec(spec(causal="top_left"))
    assert (forward.backward, forward.with_lse, forward.problem.causal) == (
        False,
        False,
        "top_left",
    )
    forward, backward = of_spec(spec(needs_grad=True, has_sink=True, window=(8, None)))
    assert (forward.with_lse, backward.backward, backward.sink_grad) == (True, True, True)
    assert backward.tensors["sink"] == Layout((4,), "bfloat16")
    assert forward.problem.scale == 0.125


def test_equal_lengths_stay_equal_and_others_do_not() -> None:
    (same,) = of_spec(spec())
    assert all(sq == sk for sq, sk in (job.lengths for job in same.all_lengths()))
    (cross,) = of_spec(spec(sk=77))
    assert {(1, 8192), (8192, 1), (100, 77)} <= {job.lengths for job in cross.all_lengths()}


@pytest.mark.parametrize("job", of_spec(spec(needs_grad=True, softcap=5.0, window=(8, 0))))
def test_a_job_survives_its_file(job: Job) -> None:
    assert read([job.dumps(), "", job.dumps()]) == [job]


def test_a_report_s_specs_can_be_read() -> None:
    wanted = spec(needs_grad=True, causal="bottom_right", window=(8, None))
    assert read([json.dumps(wanted.to_json())]) == of_spec(wanted)
    shapes = {name: {"shape": [1, 8, "s0", 64]} for name in "qkv"}
    forward, _ = read([json.dumps(shapes)])
    assert forward.lengths == (1024, 1024)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"form": "dense"}', '{"q": {"shape": 3}}'])
def test_a_line_that_is_no_job_is_named(line: str) -> None:
    with pytest.raises(OptionError, match="line 2 is neither"):
        read(["", line])


def test_a_spec_with_a_mask_is_refused() -> None:
    with pytest.raises(OptionError, match="warm the model instead"):
        of_spec(spec(mask="a tensor"))


# --- From ops -------------------------------------------------------------------------------------


def seen(run: Any) -> list[Job]:
    jobs: list[Job] = []
    with FakeTensorMode(), Seeing(jobs.append):
        run()
    return jobs


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def test_jobs_of_dense_ops() -> None:
    def run() -> None:
        q, k = empty(1, 4, 7, 64, grad=True), empty(1, 2, 9, 64).expand(3, 2, 9, 64)[:1]
        op = torch.ops.fa_inductor
        sink = empty(4, grad=True)
        extras = (None, sink, None, None, None, 0.0, 16, 0, 3.0)
        op.attention(q, k, k, 0.5, "none", "BSHD", True, "fa4", *extras)[0].sum().backward()
        turned = (each.transpose(1, 2) for each in (q, k, k))
        op.attention_inference(*turned, None, "bottom_right", "BSHD", "cudnn")

    forward, backward, inference = seen(run)
    assert forward.tensors["q"] == Layout((1, 4, 7, 64), "bfloat16")
    assert (forward.problem.window_left, forward.problem.softcap) == (16, 3.0)
    assert backward == Job(
        *("dense", "fa4", True, forward.problem, backward.tensors), lse_grad=False, sink_grad=True
    )
    assert backward.problem.deterministic
    assert backward.tensors["grad_out"].expanded == (False, True, True, False)
    assert (inference.kernel, inference.with_lse, inference.lengths) == ("cudnn", False, (7, 9))


def test_jobs_of_packed_variable_and_masked_ops() -> None:
    def run() -> None:
        op = torch.ops.fa_inductor
        packed = empty(2, 8, 3, 4, 64, grad=True)
        views = [[2, 4, 8, 64, 8 * 3 * 256, 64, 3 * 256, 1, n * 256] for n in range(3)]
        op.attention_packed(packed, *views, None, "none", "BSHD", False, "fa4")[0].sum().backward()
        q = empty(20, 4, 64, grad=True)
        starts = empty(3, dtype=torch.int32)
        numbers = (12, 11, None, "bottom_right", False, "fa4")
        op.attention_varlen(q, q, q, starts, starts, *numbers)[0].sum().backward()

    jobs = seen(run)
    assert [(job.form, job.backward) for job in jobs] == [
        *(("dense", False), ("dense", True), ("varlen", False), ("varlen", True))
    ]
    assert jobs[0].tensors["k"] == Layout((2, 4, 8, 64), "bfloat16")
    assert (jobs[2].bounds, jobs[3].tensors["cu_seqlens_q"]) == ((12, 11), Layout((3,), "int32"))


def test_a_model_is_traced_without_weights() -> None:
    def make() -> Any:
        layer = torch.nn.Linear(8192, 8192 * 1024, dtype=torch.float32)  # 256 GiB
        assert layer.weight.numel() == 2**36

        def attend(q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

        return attend, (empty(1, 4, 256, 64, grad=True),), {}

    jobs = tracing.jobs_of(make, "sm_100a", {"fa.kernels": ("fa4",)})
    assert [(job.form, job.backward, job.kernel) for job in jobs] == [
        *(("dense", False, "fa4"), ("dense", True, "fa4"))
    ]


def test_the_demo_has_one_attention() -> None:
    jobs = tracing.jobs_of(demo.make, "sm_90a", {"fa.kernels": ("fa4",)})
    assert [(job.backward, job.problem.band) for job in jobs] == [
        *((False, (None, 0)), (True, (None, 0)))
    ]


# --- Recorded -------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    kernels.load.cache_clear()
    record._written.clear()
    monkeypatch.setenv(kernels.RECORD, str(tmp_path / "run.jsonl"))
    yield tmp_path / "run.jsonl"
    kernels.load.cache_clear()


def test_a_real_run_records_each_class_once(recorded: Path) -> None:
    q = torch.randn(1, 4, 6, 8, requires_grad=True)
    for _ in range(2):
        out, _ = torch.ops.fa_inductor.attention(q, q, q, None, "none", "BSHD", False, "reference")
        out.sum().backward()
    rows = torch.randn(20, 2, 8)
    starts = torch.tensor([0, 12, 20], dtype=torch.int32)
    numbers = (12, 12, None, "none", False, "reference")
    torch.ops.fa_inductor.attention_varlen(rows, rows, rows, starts, starts, *numbers)
    jobs = read(recorded.read_text().splitlines())
    assert [(job.form, job.backward) for job in jobs] == [
        *(("dense", False), ("dense", True), ("varlen", False))
    ]
    assert len(recorded.read_text().splitlines()) == 3
    assert jobs[0].tensors["q"] == Layout((1, 4, 6, 8), "float32")


# --- The real FA4 ---------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(object_cache.DIRECTORY, str(tmp_path / "root"))
    return tmp_path / "root"


@needs_fa4
def test_two_targets_in_one_directory_share_nothing_and_a_second_run_compiles_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job.of_json(json.loads(of_spec(spec())[0].dumps()))
    first = warm([job], ["sm_90a", "sm_100a"], jobs=2)
    assert [each.failed for each in first.targets] == [{}, {}]
    assert [each.compiled for each in first.targets] == [1, 2]
    objects = {arch: list(root.glob(f"fa4-{arch}-*/*/*.o")) for arch in ("sm_90a", "sm_100a")}
    digests = [hashlib.sha256(p.read_bytes()).digest() for ps in objects.values() for p in ps]
    assert len(set(digests)) == len(digests) == 3
    second = warm([job], ["sm_90a", "sm_100a"], jobs=2)
    assert [(each.compiled, each.found) for each in second.targets] == [(0, 1), (0, 2)]

    victim = objects["sm_90a"][0]
    victim.write_bytes(victim.read_bytes()[:-100])
    assert warm([job], "sm_90a").compiled == 1
    _bundles(tmp_path, monkeypatch)


def _bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved, unpacked elsewhere, and refused where they do not fit."""
    saved = bundle.save(tmp_path / "all.zip")
    assert saved.objects == 3
    environment = next(s for s in object_cache.stores() if "sm_90a" in s.folder.name).environment
    monkeypatch.setenv(object_cache.DIRECTORY, str(tmp_path / "elsewhere"))
    assert bundle.load(tmp_path / "all.zip", dict(environment)).objects == 3
    intact, damaged = object_cache.verify()
    assert (len(intact), damaged) == (3, [])
    for name, value in (("arch", "sm_103a"), ("flash-attn-4", "4.0.0b37"), ("sms", "144")):
        with pytest.raises(BundleError, match=rf"{name} \S+ \(here {value}\)"):
            bundle.load(tmp_path / "all.zip", {**environment, name: value})
    data = bytearray((tmp_path / "all.zip").read_bytes())
    data[len(data) // 2] ^= 255
    (tmp_path / "damaged.zip").write_bytes(data)
    with pytest.raises(FaInductorError):
        bundle.load(tmp_path / "damaged.zip")


@needs_fa4
def test_the_command_line(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "specs.jsonl"
    file.write_text(json.dumps(spec(dim=24).to_json() | {"dtype": "float32"}) + "\n")
    shapes = {name: {"shape": [1, 2, 8, 20], "dtype": "bfloat16"} for name in "qkv"}
    file.write_text(json.dumps({**shapes, "needs_grad": False}) + "\n")
    ran = CliRunner().invoke(cli.main, ["warm", str(file), "--target", "sm_90a", "--jobs", "1"])
    assert ran.exit_code == 1
    assert "head dims 8, 16" in " ".join(ran.output.split())
    ran = CliRunner().invoke(cli.main, ["warm", str(file), "--target", "sm_42"])
    assert "Unknown target 'sm_42'" in ran.output
    assert CliRunner().invoke(cli.main, ["cache", "list"]).output.strip() == str(root)
    assert "0 intact" in CliRunner().invoke(cli.main, ["cache", "verify"]).output
    ran = CliRunner().invoke(cli.main, ["bundle", "save", str(tmp_path / "none.zip")])
    assert "there are no kernels" in ran.output


_GPU_TEST = """
import pytest, torch
def test_compiles(fa_device):
    q = torch.randn(1, 100, 2, 64, device=fa_device, dtype=torch.bfloat16).transpose(1, 2)
    out, _ = torch.ops.fa_inductor.attention(q, q, q, None, "none", "BSHD", False, "fa4")
    torch.testing.assert_close(out, torch.zeros(3))
    assert out.sum().item() == 12345
    raise ValueError("never reached")
def test_without_the_fixture():
    raise ValueError
"""


@needs_fa4
def test_pytest_compile_only(root: Path, tmp_path: Path) -> None:
    (tmp_path / "test_on_gpu.py").write_text("import fa_inductor\n" + _GPU_TEST)
    plugin = "fa_inductor.warming.pytest_compile_only"
    command = [sys.executable, "-m", "pytest", "-p", plugin, "--compile-only", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert ran.returncode == 0, ran.stdout
    assert "1 skipped, 1 deselected" in ran.stdout
    assert "compiled only: 1 kernels" in ran.stdout
    assert len(list(root.glob("fa4-sm_90a-*/flash_attn_fwd/*.o"))) == 1
