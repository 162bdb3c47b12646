"""Host time of one attention call and of its backward: our ops, PyTorch's, FA4's entry.

    python benchmarks/host_cost.py --json host.json

The shape is so small that the GPU keeps up; what is timed is what the CPU does. The aten ops and
ours are called as a compiled graph calls them: below autograd, the backward on its own. All are
measured in one run, in turn; each figure is the median over rounds. Compare the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flash_attn.cute import flash_attn_func
from rich.console import Console
from rich.table import Table
from timing import host_us
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_inductor import ops

SIZE, ROUNDS, CALLS = (1, 8, 128, 64), 9, 100
SCALE = SIZE[3] ** -0.5
CORE, ATEN = "core cuDNN", "core cuDNN, aten op"
# Columns, and the row that each is held against.
COLUMNS = {"forward": CORE, "forward with lse": ATEN, "backward": ATEN}

Inputs = tuple[Tensor, Tensor, Tensor]
Run = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """One call. gradients: whether autograd records it."""

    row: str
    column: str
    run: Run
    gradients: bool = False
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def _eager(
    name: str,
    call: Callable[..., Tensor],
    given: tuple[Inputs, Tensor],
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[Timed]:
    """What a user calls; its backward is what `torch.autograd.grad` takes, engine and all."""
    inputs, grad_out = given
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with context():
        out = call(*leaves)

    def backward() -> object:
        return torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    yield Timed(name, "forward", lambda: call(*inputs), context=context)
    yield Timed(name, "forward with lse", lambda: call(*leaves), True, context)
    yield Timed(name, "backward", backward, True, context)


def _aten(name: str, given: tuple[Inputs, Tensor]) -> Iterator[Timed]:
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_cudnn_attention.default
    gradients = aten._scaled_dot_product_cudnn_attention_backward.default
    (q, k, v), grad_out = given

    def run(with_lse: bool) -> Any:
        return forward(q, k, v, None, with_lse, 0.0, False, False, scale=SCALE)

    out, lse, sum_q, sum_k, max_q, max_k, seed, offset, _ = run(True)
    saved = (grad_out, q, k, v, out, lse, seed, offset, None, sum_q, sum_k, max_q, max_k)
    yield Timed(name, "forward", lambda: run(False))
    yield Timed(name, "forward with lse", lambda: run(True))
    yield Timed(name, "backward", lambda: gradients(*saved, 0.0, False, scale=SCALE))


def _ours(kernel: str, given: tuple[Inputs, Tensor]) -> Iterator[Timed]:
    name = f"fa_inductor's ops on {kernel}"
    inputs, grad_out = given
    arguments = (SCALE, "none", "BSHD", False, kernel)
    bshd = [tensor.transpose(1, 2) for tensor in inputs]  # in a compiled graph that is free
    out, lse = ops.attention_forward(*inputs, *arguments)

    def backward() -> object:
        saved = (grad_out, None, *inputs, out, lse)
        return ops.attention_gradients(*saved, SCALE, "none", False, kernel)

    inference = (SCALE, "none", "BSHD", kernel)
    yield Timed(name, "forward", lambda: ops.attention_inference(*bshd, *inference))
    yield Timed(name, "forward with lse", lambda: ops.attention_forward(*inputs, *arguments))
    yield Timed(name, "backward", backward)


def _all() -> Iterator[Timed]:
    def bshd() -> Tensor:
        batch, heads, length, dim = SIZE
        made = torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2)

    def fa4(*tensors: Tensor) -> Tensor:
        return flash_attn_func(*(tensor.transpose(1, 2) for tensor in tensors))[0].transpose(1, 2)

    def core(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors)

    # grad_out has memory of its own, as in a model.
    given = ((bshd(), bshd(), bshd()), bshd())
    yield from _eager(CORE, core, given, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    yield from _eager("core flash", core, given, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    yield from _eager("FA4's flash_attn_func", fa4, given)
    yield from _aten(ATEN, given)
    for kernel in ("fa4", "cudnn"):
        yield from _ours(kernel, given)


def _measured() -> dict[str, dict[str, float]]:
    """Median microseconds, by row and column."""
    everything = list(_all())
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS + 1):
        for each in everything:
            with each.context(), torch.set_grad_enabled(each.gradients):
                taken = host_us(each.run, CALLS)
            times.setdefault((each.row, each.column), []).append(taken)
    medians: dict[str, dict[str, float]] = {}
    for (row, column), taken in times.items():
        # The first round warms up.
        medians.setdefault(row, {})[column] = sorted(taken[1:])[ROUNDS // 2]
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    medians = _measured()
    table = Table("call", title=f"Host µs a call; {machine}, {SIZE} bfloat16")
    for column, base in COLUMNS.items():
        table.add_column(column, justify="right")
        table.add_column(f"/ {base}", justify="right")
    for row, times in medians.items():
        cells = []
        for column, base in COLUMNS.items():
            ratio = times[column] / medians[base][column]
            cells += [f"{times[column]:.1f}", f"{ratio:.2f}x"]
        table.add_row(row, *cells)
    Console(width=150).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "us": medians}, indent=1))


if __name__ == "__main__":
    main()
