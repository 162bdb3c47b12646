"""Host time of one attention call and of its backward: our op, PyTorch's kernels, FA4's entry.

    python benchmarks/host_cost.py

The shape is so small that the GPU keeps up; what is timed is what the CPU does. All are measured
in one run, in turn; each figure is the median over rounds. Compare the ratios.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from flash_attn.cute import flash_attn_func
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_inductor import ops

ROUNDS, CALLS = 9, 200


def microseconds(run: Callable[[], object]) -> float:
    """Host time a call, the queue drained before and after."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        run()
    elapsed = time.perf_counter() - started
    torch.cuda.synchronize()
    return elapsed / CALLS * 1e6


def main() -> None:
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    arguments = (0.125, "none", [0, 2, 1, 3], False, "fa4")

    def sdpa(*tensors: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*tensors)

    def fa4_eager(*tensors: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(*(tensor.transpose(1, 2) for tensor in tensors))[0]

    def ours(*tensors: torch.Tensor) -> torch.Tensor:
        return ops.attention(*tensors, *arguments)[0]

    calls = {
        "core cuDNN": (sdpa, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
        "core flash": (sdpa, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
        "FA4's flash_attn_func": (fa4_eager, contextlib.nullcontext),
        "fa_inductor.attention on fa4": (ours, contextlib.nullcontext),
    }
    forward: dict[str, list[float]] = {name: [] for name in calls}
    both: dict[str, list[float]] = {name: [] for name in calls}
    grad_out = torch.randn_like(q)  # memory of its own, as in a model
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    for _ in range(ROUNDS):
        for name, (call, context) in calls.items():
            with context():
                with torch.no_grad():
                    forward[name].append(microseconds(lambda call=call: call(q, k, v)))
                    in_graph = microseconds(lambda: ops.attention_forward(q, k, v, *arguments))

                def step(call: Callable[..., torch.Tensor] = call) -> object:
                    out = call(*leaves)
                    return torch.autograd.grad(out, leaves, grad_out)

                both[name].append(microseconds(step))
    table = Table("call", "forward, µs", "ratio", "forward + backward, µs", "ratio")
    table.title = f"{torch.cuda.get_device_name()}, (1, 8, 128, 64) bfloat16; ratio to core cuDNN"
    medians = [{n: sorted(t)[ROUNDS // 2] for n, t in times.items()} for times in (forward, both)]
    for name in calls:
        cells = [(m[name], m[name] / m["core cuDNN"]) for m in medians]
        table.add_row(
            name, *(text for time, ratio in cells for text in (f"{time:.1f}", f"{ratio:.2f}x"))
        )
    Console(width=120).print(table)
    print(f"the op as a compiled graph calls it, forward: {in_graph:.1f} µs")


if __name__ == "__main__":
    main()
