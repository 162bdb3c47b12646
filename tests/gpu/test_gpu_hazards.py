"""What has gone wrong in other people's attention: layouts, stale plans, captures, streams."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from allocator import poison
from configurations import BF16, FP16, KINDS, Configuration, Size
from judging import Call, judge, measure, objections, problem_of, results, sizes_of
from torch import Tensor

from fa_inductor import ops
from fa_inductor.errors import CaptureError, PlanError
from fa_inductor.kernels import cudnn
from fa_inductor.problem import Inputs

KERNELS = ("fa4", "cudnn")
NONE = KINDS[0]


def _randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _wrong(call: Call, kernel: str) -> list[str]:
    """What is wrong with the kernel's results for a call, poisoned memory or not."""
    return judge(call, kernel, runs=1)


# --- Packed views ---------------------------------------------------------------------------------

S, B, H, D = 200, 2, 4, 64


def _key_and_value_packed(memory: Tensor) -> tuple[Tensor, ...]:
    """q, and k and v packed behind it."""
    k, v = memory[:, :, H:].unflatten(2, (2, H)).unbind(2)
    return tuple(tensor.transpose(1, 2) for tensor in (memory[:, :, :H], k, v))


PACKED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "bs3hd": ((B, S, 3, H, D), lambda p: tuple(t.transpose(1, 2) for t in p.unbind(2))),
    "sb3hd": ((S, B, 3, H, D), lambda p: tuple(t.permute(1, 2, 0, 3) for t in p.unbind(2))),
    "bsh3d": ((B, S, H, 3, D), lambda p: tuple(t.transpose(1, 2) for t in p.unbind(3))),
    "sbh3d": ((S, B, H, 3, D), lambda p: tuple(t.permute(1, 2, 0, 3) for t in p.unbind(3))),
    "bs2hd": ((B, S, 3 * H, D), _key_and_value_packed),
    "split": (
        (S, B, H + 2, D),
        lambda p: tuple(t.permute(1, 2, 0, 3) for t in p.split([H, 1, 1], 2)),
    ),
}


@pytest.mark.parametrize("layout", list(PACKED))
@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_views_are_bitwise_their_clones(kernel: str, layout: str) -> None:
    """Forward and all gradients, those of the packed tensor included."""
    for causal in ("none", "top_left"):
        _compare_with_clones(kernel, layout, causal)


def _compare_with_clones(kernel: str, layout: str, causal: str) -> None:
    shape, unpack = PACKED[layout]
    packed = _randn(*shape).requires_grad_()
    views = unpack(packed)
    clones = [view.detach().clone(memory_format=torch.contiguous_format) for view in views]
    assert not any(view.is_contiguous() for view in views)
    for clone in clones:
        clone.requires_grad_()
    arguments = (None, causal, "BSHD", True, kernel)
    made = []
    for tensors in (views, clones):
        poison([S * B * H * D * 2] * 4)
        out, lse = ops.attention(*tensors, *arguments)
        made.append((out, lse))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    grad_out = torch.randn_like(made[0][0])
    (of_packed,) = torch.autograd.grad(made[0][0], packed, grad_out)
    of_clones = torch.autograd.grad(made[1][0], clones, grad_out)
    for name, ours, theirs in zip("qkv", unpack(of_packed), of_clones, strict=True):
        assert torch.equal(ours, theirs), name
    call = Call(
        problem_of(D, causal=causal, deterministic=True), Inputs(*clones), grad_out=grad_out
    )
    assert _wrong(call, kernel) == []


# --- Plans and launches of one layout for another -------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_is_only_used_for_its_layout(kernel: str) -> None:
    """The same shapes: contiguous, packed, another dtype, contiguous again."""
    size = Size(BF16, 2, 4, 4, 211, 211, 64, 64)  # of no other test: no plan is there yet
    half = dataclasses.replace(size, dtype=FP16)
    built = []
    for number, (each, layout) in enumerate(
        [
            (size, "bshd_bshd_bshd"),
            (size, "bs3hd"),
            (size, "bhsd_bhsd_bhsd"),
            (half, "bshd_bshd_bshd"),
            (size, "bshd_bshd_bshd"),
            (size, "bs3hd"),
        ]
    ):
        configuration = Configuration(each, NONE, layout, "bhsd", "normal", number)
        before = cudnn.statistics.built
        assert judge(configuration.call("cuda"), kernel) == [], (number, layout)
        built.append(cudnn.statistics.built - before)
    assert built == ([2, 2, 2, 2, 0, 0] if kernel == "cudnn" else [0] * 6)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_wrong_declaration_is_never_executed(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN itself would not notice: heads and tokens swapped in one operand's strides."""
    length = 213 + 2 * "qkv".index(name) + (direction == "backward")  # not known to the op yet
    size = Size(BF16, 2, 4, 4, length, length, 64, 64)
    call = Configuration(size, NONE, "bshd_bshd_bshd", "as out", "normal").call("cuda")
    out, lse = call.forward("cudnn")
    right = cudnn._operands

    def wrong(*args: Any) -> dict[str, Any]:
        layouts = right(*args)
        b, h, s, d = layouts[name].stride
        layouts[name] = dataclasses.replace(layouts[name], stride=(b, s, h, d))
        return layouts

    launched = []
    execute = cudnn.Plan.execute
    monkeypatch.setattr(
        cudnn.Plan, "execute", lambda *args: (launched.append(1), execute(*args))[1]
    )
    monkeypatch.setattr(cudnn, "_operands", wrong)
    fresh = Configuration(size, NONE, "bhsd_bhsd_bhsd", "as out", "normal").call("cuda")
    runs = {
        "forward": lambda: fresh.forward("cudnn"),
        "backward": lambda: fresh.backward("cudnn", out, lse),
    }
    with pytest.raises(PlanError, match=f"declares {name} as"):
        runs[direction]()
    assert launched == []
    monkeypatch.setattr(cudnn, "_operands", right)
    assert _wrong(fresh, "cudnn") == []


# --- CUDA graphs ----------------------------------------------------------------------------------


def test_capture_without_a_plan_is_refused() -> None:
    size = Size(BF16, 2, 3, 3, 77, 77, 64, 64)
    call = Configuration(size, NONE, "bshd_bshd_bshd", "none", "normal").call("cuda")
    other = dataclasses.replace(size, sq=78, sk=78)
    Configuration(other, NONE, "bshd_bshd_bshd", "none", "normal").call("cuda").forward("cudnn")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="no plan yet"), torch.cuda.graph(graph):
        call.forward("cudnn")
    del graph
    torch.cuda.synchronize()
    assert _wrong(call, "cudnn") == []


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "bs3hd"])
def test_captured_with_inputs_changed_between_replays(kernel: str, layout: str) -> None:
    size = Size(BF16, 2, 4, 4, 200, 200, 64, 64)
    call = Configuration(size, NONE, layout, "as out", "normal").call("cuda")
    for _ in range(2):
        call.backward(kernel, *call.forward(kernel))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call.forward(kernel)
        made = {"out": out, "lse": lse, **call.backward(kernel, out, lse)}
    for _ in range(3):
        for tensor in (*call.inputs[:3], call.grad_out):
            assert tensor is not None
            tensor.normal_()
        for tensor in made.values():
            tensor.fill_(float("nan"))
        graph.replay()
        exact, plain = results(call, exact=True), results(call, exact=False)
        elements = {name: tensor.numel() for name, tensor in made.items()}
        assert objections(call, measure(call, made, exact, plain), elements) == []


# --- Streams and threads --------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_callers_stream(kernel: str) -> None:
    """CG-02 (b): heavy producer, attention, consumer on a side stream without a sync between them;
    then on the default stream, and on the side stream again."""
    size = Size(BF16, 2, 4, 4, 512, 512, 64, 64)
    call = Configuration(size, NONE, "bshd_bshd_bshd", "as out", "normal").call("cuda")
    call.backward(kernel, *call.forward(kernel))
    weight = _randn(8192, 8192) / 90
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for stream in (side, torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            poison(sizes_of(call))
            big = weight
            for _ in range(6):
                big = big @ weight
            late = [tensor + big[0, 0] * 0 + 0.5 for tensor in call.inputs[:3]]
            assert call.grad_out is not None
            grad_out = call.grad_out * (1 + big[0, 1] * 0)
            of_late = dataclasses.replace(call, inputs=Inputs(*late), grad_out=grad_out)
            out, lse = of_late.forward(kernel)
            grads = of_late.backward(kernel, out, lse)
            made = {"out": out * 1, "lse": lse * 1, **{n: grad * 1 for n, grad in grads.items()}}
        stream.synchronize()
        exact, plain = results(of_late, exact=True), results(of_late, exact=False)
        elements = {name: tensor.numel() for name, tensor in made.items()}
        assert objections(of_late, measure(of_late, made, exact, plain), elements) == []
        torch.cuda.synchronize()


def _calls() -> Iterator[Call]:
    for number, length in enumerate((130, 200, 256, 333)):
        size = Size(BF16, 2, 4, 4, length, length, 64, 64)
        layout = ("bshd_bshd_bshd", "bs3hd")[number % 2]
        yield Configuration(size, KINDS[number % 2], layout, "as out", "normal").call("cuda")


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_on_streams_of_their_own(kernel: str) -> None:
    """Forward and backward; at last all threads run the same problem."""
    calls = list(_calls())
    for call in calls:  # FA4 compiles here, not under a thread's feet
        call.backward(kernel, *call.forward(kernel))
    expected = [(results(call, exact=True), results(call, exact=False)) for call in calls]
    torch.cuda.synchronize()
    failures: list[Any] = []
    together = threading.Barrier(len(calls))

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                together.wait(60)
                for number in (*[index] * 10, *range(len(calls))):
                    call, (exact, plain) = calls[number], expected[number]
                    poison(sizes_of(call))
                    out, lse = call.forward(kernel)
                    made = {"out": out, "lse": lse, **call.backward(kernel, out, lse)}
                    elements = {name: tensor.numel() for name, tensor in made.items()}
                    numbers = measure(call, made, exact, plain)
                    failures.extend(objections(call, numbers, elements))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
