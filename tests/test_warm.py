"""Jobs: the calls that kernels are compiled for, from specs, ops, models and recorded runs."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from warm_specs import spec

from fa_inductor import demo, kernels
from fa_inductor.errors import OptionError, ShapeError
from fa_inductor.warming import record, tracing, worker
from fa_inductor.warming.compile_only import Seeing
from fa_inductor.warming.jobs import Job, Layout, of_spec, read
from fa_inductor.warming.warm import Summary, Warmed

# --- Compiling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [5000, 5])
def test_lengths_without_a_kernel_are_told(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    def compile_job(job: Job) -> None:
        if max(job.lengths) > longest:
            raise ShapeError(f"only up to {longest}\nand so on")

    monkeypatch.setattr(worker, "compile_job", compile_job)
    monkeypatch.setattr(worker, "_refusals", lambda: (ShapeError,))
    answer = worker.compiled(of_spec(spec())[0])
    if longest == 5:  # not even the call itself
        assert (answer["failed"], answer["refused"]) == ("ShapeError: only up to 5", [])
        return
    why = "8192 by 8192: ShapeError: only up to 5000"
    assert (answer["failed"], answer["refused"][0]) == ("", why)
    assert len(answer["refused"]) == 2
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(Summary([Warmed("sm_90a", 1, refused={"a job": answer["refused"]})]))
    assert f"sm_90a: a job: not at 2 other lengths: {why}" in console.export_text()


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


def test_variable_lengths_change_their_bounds_or_where_there_are_none_their_rows() -> None:
    tensors = {name: Layout((20, 4, 64), "bfloat16") for name in "qkv"}
    tensors |= {f"cu_seqlens_{name}": Layout((3,), "int32") for name in "qk"}
    (dense,) = of_spec(spec())
    bounded = Job("varlen", "fa4", False, dense.problem, tensors, bounds=(12, 11))
    assert (bounded.lengths, bounded.with_lengths(7, 9).bounds) == ((12, 11), (7, 9))
    unbounded = Job("varlen", "fa4", False, dense.problem, tensors).with_lengths(7, 9)
    assert (unbounded.bounds, unbounded.lengths) == ((0, 0), (7, 9))
    assert [unbounded.tensors[name].shape[0] for name in "qkv"] == [7, 9, 9]
    assert unbounded.tensors["cu_seqlens_q"] == tensors["cu_seqlens_q"]


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

    forward, backward, as_compiled, inference = seen(run)
    assert "grad_out" not in as_compiled.tensors
    assert dataclasses.replace(backward, tensors=as_compiled.tensors) == as_compiled
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
        out = op.attention_packed(packed, *views, None, "none", "BSHD", False, "fa4")[0]
        out.backward(torch.empty_like(out))
        q = empty(20, 4, 64, grad=True)
        starts = empty(3, dtype=torch.int32)
        numbers = (12, 11, None, "bottom_right", False, "fa4")
        out = op.attention_varlen(q, q, q, starts, starts, *numbers)[0]
        out.backward(torch.empty_like(out))

    jobs = seen(run)
    assert [(job.form, job.backward) for job in jobs] == [
        *(("dense", False), ("dense", True), ("varlen", False), ("varlen", True))
    ]
    assert jobs[0].tensors["k"] == Layout((2, 4, 8, 64), "bfloat16")
    assert (jobs[2].bounds, jobs[3].tensors["cu_seqlens_q"]) == ((12, 11), Layout((3,), "int32"))


def test_jobs_of_a_mask_keep_what_it_reads_as_it_is() -> None:
    def make() -> Any:
        q, kept = empty(2, 4, 256, 64, grad=True), torch.empty(256, 2, dtype=torch.bool)

        def attend(q: Tensor, kept: Tensor) -> Tensor:
            places = torch.arange(q.shape[2])
            mask = (places <= places[:, None]) & kept.t()[:, None, None]
            return F.scaled_dot_product_attention(q, q, q, mask)

        return attend, (q, kept), {}

    jobs = tracing.jobs_of(make, "sm_90a", {"fa.kernels": ("fa4",)})
    assert [(job.form, job.backward) for job in jobs] == [("masked", False), ("masked", True)]
    for job in map(read, [[job.dumps()] for job in jobs]):
        assert job[0].text
        assert job[0].tensors["rows"].shape == (2, 1)
        longer = list(job[0].all_lengths())[-1]
        assert longer.lengths == (65536, 65536)
        assert longer.tensors["t0"] == Layout((256, 2), "uint8", strides=(2, 1))


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
    """... of which the kernel is compiled, watched or not."""
    jobs = tracing.jobs_of(demo.make, "sm_90a", {"fa.kernels": ("fa4",), "fa.guard": "finite"})
    assert [(job.kernel, job.backward, job.problem.band) for job in jobs] == [
        *(("fa4", False, (None, 0)), ("fa4", True, (None, 0)))
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
