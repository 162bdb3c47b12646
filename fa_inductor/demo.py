"""The demo: a small transformer with grouped queries, compiled, explained and checked.

`python -m fa_inductor.demo` (or `make demo`) prints the site table, the error of loss and
gradients against eager, what the pass costs at compile time and, on a GPU, the time of a
training step against plain Inductor. `fa_inductor.demo:make` is its model, for the CLI.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import inductor_compat, report
from .explaining import explain


class Block(nn.Module):
    """Pre-norm causal self-attention with grouped queries, then a gated MLP; (B, S, width)."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 8 * width // 3 // 64 * 128, bias=False)
        self.down = nn.Linear(8 * width // 3 // 64 * 64, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q = self.query(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = self.key_value(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).chunk(2, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class DemoModel(nn.Module):
    """Tokens (B, S) in, next-token loss out."""

    def __init__(self, width: int, heads: int, kv_heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x[:, :-1]), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def make() -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    """(model, args, kwargs) in bfloat16: sized for a GPU where there is one, small on a CPU."""
    if torch.cuda.is_available():
        device, width, heads, kv_heads, batch, length = "cuda", 1024, 16, 4, 2, 8192
    else:
        device, width, heads, kv_heads, batch, length = "cpu", 256, 4, 2, 2, 256
    generator = torch.Generator().manual_seed(0)
    model = DemoModel(width, heads, kv_heads, layers=4, vocabulary=1024)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    tokens = torch.randint(1024, (batch, length), generator=generator)
    return model.to(device, torch.bfloat16), (tokens.to(device),), {}


def _step(model: Callable[..., Tensor], parameters: list[nn.Parameter], args: Any) -> list[Tensor]:
    """Loss and gradients of one training step."""
    loss = model(*args)
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def _error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest relative error (norm of the difference over norm) among loss and gradients."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a.float() - e).norm() / e.norm()) for a, e in pairs)


def _milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a call on the GPU."""
    for _ in range(3):
        run()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main() -> int:
    """Run the demo; returns the exit status."""
    from rich.console import Console

    console = Console()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and inductor_compat.cpp_compiler() is None:
        console.print(
            "Inductor needs a C++ compiler on the CPU and found none: install g++ or clang++, "
            "or name one in CXX."
        )
        return 2
    kernels = ("fa4", "cudnn") if on_gpu else ("reference",)
    options: dict[str, Any] = {"fa.kernels": kernels}
    model, args, kwargs = make()
    parameters = list(model.parameters())
    console.print(explain(model, options)(*args, **kwargs))

    with (
        torch.compiler.config.patch(force_disable_caches=True),  # type: ignore[attr-defined]
        report.collecting() as compiled_report,
    ):
        compiled = torch.compile(model, backend="fa_inductor", fullgraph=True, options=options)
        started = time.perf_counter()
        ours = _step(compiled, parameters, args)
        compile_seconds = time.perf_counter() - started
    precise = copy.deepcopy(model).float()
    expected = _step(precise, list(precise.parameters()), args)
    ours_error, eager_error = (
        _error(ours, expected),
        _error(_step(model, parameters, args), expected),
    )
    right = ours_error < 2 * eager_error
    console.print(
        f"loss and {len(parameters)} gradients, largest relative error against float32 eager: "
        f"fa_inductor {ours_error:.2e}, bfloat16 eager {eager_error:.2e}: "
        + ("right" if right else "WRONG")
    )
    share = compiled_report.pass_seconds / compile_seconds
    console.print(
        f"cold compile of the training step {compile_seconds:.1f} s, of which the pass "
        f"{compiled_report.pass_seconds * 1e3:.0f} ms ({share:.1%})"
    )
    if on_gpu:
        plain = torch.compile(model, backend="inductor", fullgraph=True)
        ours_ms = _milliseconds(lambda: _step(compiled, parameters, args))
        plain_ms = _milliseconds(lambda: _step(plain, parameters, args))
        console.print(
            f"training step on {torch.cuda.get_device_name()}: fa_inductor {ours_ms:.1f} ms, "
            f"inductor {plain_ms:.1f} ms ({plain_ms / ours_ms:.2f}x)"
        )
    compiled_report.assert_coverage(1.0)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
