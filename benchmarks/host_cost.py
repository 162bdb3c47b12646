"""Host time of one attention call: our op beside PyTorch's kernels and FA4's own entry.

    python benchmarks/host_cost.py

The shape is so small that the GPU keeps up; what is timed is what the CPU does. All are measured
in one run, in turn; each figure is the median over rounds. Compare the ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from flash_attn.cute import flash_attn_func
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_inductor import ops

ROUNDS, CALLS = 15, 300


def pinned(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], object]:
    def run() -> object:
        return F.scaled_dot_product_attention(q, k, v)

    run.context = lambda: sdpa_kernel(backend)  # type: ignore[attr-defined]
    return run


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
    bshd = [t.transpose(1, 2) for t in (q, k, v)]
    arguments = (0.125, "none", [0, 2, 1, 3], False, "fa4")
    runs = {
        "core cuDNN": pinned(SDPBackend.CUDNN_ATTENTION, q, k, v),
        "core flash": pinned(SDPBackend.FLASH_ATTENTION, q, k, v),
        "FA4's flash_attn_func": lambda: flash_attn_func(*bshd),
        "fa_inductor.attention on fa4": lambda: ops.attention(q, k, v, *arguments),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, run in runs.items():
                context = getattr(run, "context", None)
                if context is None:
                    times[name].append(microseconds(run))
                else:
                    with context():
                        times[name].append(microseconds(run))
    table = Table("call", "host time, µs", "against core cuDNN", title=torch.cuda.get_device_name())
    medians = {name: sorted(each)[ROUNDS // 2] for name, each in times.items()}
    for name, median in medians.items():
        table.add_row(name, f"{median:.1f}", f"{median / medians['core cuDNN']:.2f}x")
    Console().print(table)


if __name__ == "__main__":
    main()
