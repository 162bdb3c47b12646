"""`fa.guard` on the GPU: it names the site in a later step, waits for nothing, and right calls are
never said to be wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_inductor import demo, numerics
from fa_inductor.kernels import fa4


@pytest.fixture
def findings() -> Iterator[list[numerics.Finding]]:
    found: list[numerics.Finding] = []
    numerics.forget()
    listen = found.append
    numerics.listeners.append(listen)
    yield found
    numerics.listeners.remove(listen)
    numerics.forget()


def compiled_demo(**options: Any) -> tuple[Any, Any, Tensor]:
    """(model, compiled, tokens) of 2 x 2048 tokens."""
    torch._dynamo.reset()
    model, _, _ = demo.make()
    named = {f"fa.{name}": value for name, value in options.items()}
    compiled = torch.compile(
        model, backend="fa_inductor", fullgraph=True, options={"fa.kernels": ("fa4",), **named}
    )
    return model, compiled, torch.randint(1024, (2, 2048), device="cuda")


def seen_numbers() -> int:
    """How many numbers watched calls have left in the table."""
    table = numerics.table_of(torch.device("cuda", torch.cuda.current_device()))
    return int((table.memory[: len(table.rows), 0] > 0).sum())


def step(model: Any, compiled: Any, tokens: Tensor) -> None:
    """As in training, but for the update: gradients that stay would be added to CUDA graphs' own
    memory."""
    torch.compiler.cudagraph_mark_step_begin()
    torch.autograd.grad(compiled(tokens), list(model.parameters()))


def break_values_of_one_head(model: Any, layer: int) -> None:
    weight = model.layers[layer].key_value.weight
    size = model.layers[layer].head_dim
    with torch.no_grad():
        weight[len(weight) // 2 + size : len(weight) // 2 + 2 * size] = math.nan


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("guard", ["finite", "oracle"])
def test_names_the_first_bad_layer(findings: list[numerics.Finding], guard: str, mode: str) -> None:
    model, compiled, tokens = compiled_demo(guard=guard, mode=mode)
    for _ in range(4):
        step(model, compiled, tokens)
    numerics.check()
    assert not findings
    break_values_of_one_head(model, 2)
    for _ in range(2):
        step(model, compiled, tokens)
        # What a step has left is asked for by the next, and heard by the one after, if the GPU has
        # come so far: here it is waited for, as a host with CUDA graphs is far ahead.
        torch.cuda.synchronize()
    compiled(tokens)
    assert findings[0].names[0].startswith("layers.2 ")
    assert findings[0].names[1:] == ("fa4", "forward")
    assert "the output is not finite (nan)" in findings[0].text


@pytest.mark.parametrize("guard", ["finite", "oracle"])
def test_waits_for_nothing(guard: str) -> None:
    _, compiled, tokens = compiled_demo(guard=guard, guard_every=1)
    for _ in range(3):
        compiled(tokens).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            compiled(tokens).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen_numbers() > 0


def test_oracle_passes_what_is_right_and_finds_what_is_not(
    findings: list[numerics.Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, compiled, tokens = compiled_demo(guard="oracle", guard_every=1)
    for _ in range(5):
        compiled(tokens).backward()
    numerics.check()
    assert not findings
    right = fa4.backward

    def wrong(*args: Any) -> Any:
        right(*args)
        args[-1].k[:, :, 1024:] *= 0.5

    monkeypatch.setattr(fa4, "backward", wrong)
    # Under another name no call is known that could be repeated without FA4's backward.
    _, compiled, _ = compiled_demo(guard="oracle", guard_every=2)
    compiled(tokens).backward()
    numerics.check()
    assert "the gradient of k is wrong by" in findings[0].text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [2, 77, 1088, 4097])
def test_no_false_alarm(findings: list[numerics.Finding], length: int, dtype: torch.dtype) -> None:
    """Many draws of usual and awkward data through both kernels."""
    torch._dynamo.reset()
    for kernel in ("fa4", "cudnn"):
        name = f"{kernel}@oracle,warn,1@here"
        for scale in (0.1, 1.0, 8.0):
            for _ in range(4):
                q, k, v = (
                    (scale * torch.randn(2, length, heads, 64, device="cuda"))
                    .to(dtype)
                    .transpose(1, 2)
                    .requires_grad_()
                    for heads in (8, 2, 2)
                )
                op = torch.ops.fa_inductor.attention
                out, _ = op(q, k, v, None, "top_left", "BSHD", False, name)
                out.backward(torch.randn_like(out))
    numerics.check()
    assert [finding.text for finding in findings] == []
    assert seen_numbers() >= 3 * 2 * 2  # of an output and its error, in both directions and kernels
