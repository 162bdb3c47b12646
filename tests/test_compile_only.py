"""`compile_only()`: where it is active, what it answers, and that it compiles without launching."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

import fa_inductor
from fa_inductor import compile_pass
from fa_inductor.errors import CompileOnlyError, UnknownTargetError
from fa_inductor.warming import compile_only as module
from fa_inductor.warming.jobs import Job
from fa_inductor.warming.no_gpu import without_gpu

compile_only = module.compile_only
TARGET = "sm_90a"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    """What would be compiled; FA4 is not asked."""
    seen: list[Job] = []
    monkeypatch.setattr(module, "compile_job", seen.append)
    monkeypatch.setattr(module, "planned_for", lambda target: contextlib.nullcontext())
    yield seen
    assert compile_only.depth == 0


def where() -> tuple[bool, bool, int]:
    return fa_inductor.is_compile_only(), compile_only.active, compile_only.depth


def test_it_nests_and_counts(jobs: list[Job]) -> None:
    assert where() == (False, False, 0)
    with compile_only(TARGET):
        assert where() == (True, True, 1)
        with compile_only():
            assert where() == (True, True, 2)
        assert where() == (True, True, 1)
        assert isinstance(torch.empty(1), FakeTensor)
    assert where() == (False, False, 0)
    assert not isinstance(torch.empty(1), FakeTensor)


def test_an_exception_restores_the_exact_depth(jobs: list[Job]) -> None:
    with compile_only(TARGET):
        with pytest.raises(ZeroDivisionError), compile_only(), compile_only():
            raise ZeroDivisionError
        assert compile_only.depth == 1
    with pytest.raises(ZeroDivisionError), compile_only(TARGET):
        raise ZeroDivisionError
    with pytest.raises(UnknownTargetError), compile_only("sm_42"):
        pass
    assert where() == (False, False, 0)
    assert not isinstance(torch.empty(1), FakeTensor)


def test_other_threads_are_not_inside(jobs: list[Job]) -> None:
    seen = []
    with compile_only(TARGET):
        thread = threading.Thread(target=lambda: seen.append((where(), type(torch.empty(1)))))
        thread.start()
        thread.join()
    assert seen == [((False, False, 0), torch.Tensor)]


def test_tasks_count_for_themselves(jobs: list[Job]) -> None:
    seen = {}

    async def inside() -> None:
        with compile_only(TARGET):
            with compile_only():
                await asyncio.sleep(0)
                seen["inside"] = compile_only.depth
            seen["after"] = compile_only.depth

    async def outside() -> None:
        await asyncio.sleep(0)
        seen["outside"] = compile_only.depth

    async def both() -> None:
        await asyncio.gather(inside(), outside())

    asyncio.run(both())
    assert seen == {"inside": 2, "outside": 0, "after": 1}


@pytest.mark.parametrize("name", ["active", "depth", "anything"])
def test_its_state_cannot_be_assigned(name: str) -> None:
    with pytest.raises(CompileOnlyError, match="follows `with compile_only"):
        setattr(compile_only, name, 1)


def test_a_target_must_be_named_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CompileOnlyError, match="must be named"), compile_only():
        pass


def test_values_are_one(jobs: list[Job]) -> None:
    with compile_only(TARGET):
        assert torch.zeros(3).sum().item() == 1.0
        assert (float(torch.zeros(())), int(torch.zeros((), dtype=torch.int32))) == (1.0, 1)
        assert torch.zeros((), dtype=torch.bool).item() is True
        assert isinstance(torch.zeros((), dtype=torch.int64).item(), int)
        assert torch.zeros(2, 2, dtype=torch.int64).tolist() == [[1, 1], [1, 1]]


def test_the_fake_mode_can_be_the_callers(jobs: list[Job]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode, compile_only(TARGET, fake=False):
        assert torch.empty(1).fake_mode is mode  # type: ignore[attr-defined]
    with compile_only(TARGET, allow_non_fake_inputs=False):
        assert not torch.empty(1).fake_mode.allow_non_fake_inputs  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_op_is_compiled_for_forward_and_backward(jobs: list[Job], device: str) -> None:
    with compile_only(TARGET):
        q = torch.empty(2, 8, 100, 64, dtype=torch.bfloat16, device=device)
        arguments = (q, q, q, None, "none", "BSHD", False, "fa4")
        out, lse = torch.ops.fa_inductor.attention(*arguments)
        if device == "cpu":  # autograd does not run on CUDA in a CPU build of PyTorch
            q.requires_grad_()
            out, lse = torch.ops.fa_inductor.attention(*arguments)
            (out.sum() + lse.sum()).backward()
    assert (out.shape, lse.shape) == ((2, 8, 100, 64), (2, 8, 100))
    # The gradient of a sum is expanded: it is compiled as it is, and as `torch.compile` has it.
    backwards = [(True, True)] * 2 if device == "cpu" else []
    assert [(job.backward, job.lse_grad) for job in jobs[-3:]][-1 - len(backwards) :] == [
        (False, False),
        *backwards,
    ]


def test_code_for_a_gpu_makes_its_tensors_on_the_cpu(jobs: list[Job]) -> None:
    with compile_only(TARGET), without_gpu():
        layer = torch.nn.Linear(2, 3, device="cuda").to(torch.device("cuda", 0), torch.bfloat16)
        out = layer.cuda()(torch.ones(4, 2, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
    assert (out.device.type, out.shape, out.dtype) == ("cpu", (4, 3), torch.bfloat16)


def test_dynamo_traces_what_is_made_on_the_cpu(jobs: list[Job]) -> None:
    """`unflatten` of a tensor, too, which asks `super()`."""

    @torch.compile(backend="fa_inductor", options={"fa.kernels": ("fa4",)}, fullgraph=True)
    def attend(x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (4, 64)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)

    with compile_only(TARGET), without_gpu():
        attend(torch.empty(1, 128, 256, dtype=torch.bfloat16, device="cuda"))
    assert [job.lengths for job in jobs] == [(128, 128)]


def test_all_lengths_are_compiled_where_asked(jobs: list[Job]) -> None:
    with compile_only(TARGET, all_lengths=True):
        q = torch.empty(2, 8, 100, 64, dtype=torch.bfloat16)
        torch.ops.fa_inductor.attention(q, q, q, None, "none", "BSHD", False, "fa4")
    assert {(100, 100), (1, 1), (128, 128), (8192, 8192)} <= {job.lengths for job in jobs}


def test_a_compiled_function_is_rewritten_inside(jobs: list[Job]) -> None:
    options = {"fa.kernels": ("fa4",)}

    @torch.compile(backend="fa_inductor", options=options, fullgraph=True)
    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    with compile_only(TARGET):
        q = torch.empty(1, 4, 256, 64, dtype=torch.bfloat16, requires_grad=True)
        out = attend(q)
        out.backward(torch.empty_like(out))
    assert [job.backward for job in jobs] == [False, True]
    assert compile_pass.rewritten_only.get() is None


def test_what_is_compiled_inside_is_made_anew_outside(jobs: list[Job]) -> None:
    """Tensors that are not fake are the same inside and outside: no guard would tell."""
    real = torch.randn(1, 4, 256, 64, dtype=torch.bfloat16)

    @torch.compile(backend="fa_inductor", options={"fa.kernels": ("fa4",)}, fullgraph=True)
    def attend(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    with compile_only(TARGET):
        attend(real)
    assert len(jobs) == 1
    expected = F.scaled_dot_product_attention(real, real, real, is_causal=True)
    torch.testing.assert_close(attend(real), expected)
