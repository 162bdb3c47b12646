"""Whole transformers models, compiled: the backend beside plain inductor, in one run.

    python benchmarks/whole_models.py --json models.json

Random weights, bfloat16, inference or a step of training without its optimizer. Time: the median of
events around a call, both in turn. Memory: what a call allocates at its peak, beside the inputs and
weights. Apart: how far the two results, or sets of gradients, are from each other, relative; both
are bfloat16, so neither is the truth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fa_inductor import collecting

ROUNDS, CALLS = 9, 3


@dataclass(frozen=True)
class Measured:
    name: str
    kernels: str
    inductor_ms: float
    ours_ms: float
    inductor_mb: float
    ours_mb: float
    apart: float  # relative distance of both results

    @property
    def ratio(self) -> float:
        return self.inductor_ms / self.ours_ms


def llama(length: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**_DECODER, max_position_embeddings=length)), _ids(1, length)


def mistral(length: int, window: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import MistralConfig, MistralModel

    config = MistralConfig(**_DECODER, sliding_window=window, max_position_embeddings=length)
    return MistralModel(config), _ids(1, length)


def bert(length: int) -> tuple[nn.Module, dict[str, Any]]:
    """BERT-base, the second half of the keys padded."""
    from transformers import BertConfig, BertModel

    given = _ids(4, length)
    given["attention_mask"] = (torch.arange(length) < length // 2).long().expand(4, length)
    return BertModel(BertConfig(max_position_embeddings=length)), given


def gpt2(length: int) -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2's width and heads, hand-written attention, no dropout."""
    from transformers import GPT2Config, GPT2Model

    without = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = GPT2Config(
        n_layer=4, vocab_size=1000, n_positions=length, attn_implementation="eager", **without
    )
    return GPT2Model(config), {**_ids(2, length), "use_cache": False}


_DECODER = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "use_cache": False,
}


def _ids(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(0, 1000, (batch, length))}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "Llama, 4 layers, S 4096": lambda: llama(4096),
    "Llama, 4 layers, S 16384": lambda: llama(16384),
    "Mistral, 4 layers, window 4096, S 32768": lambda: mistral(32768, 4096),
    "BERT-base, half padded, B 4 S 4096": lambda: bert(4096),
    "GPT-2 eager, 4 layers, training, B 2 S 4096": lambda: gpt2(4096),
}


def measured(name: str) -> Measured:
    model, given = MODELS[name]()
    training = "training" in name
    model = model.to("cuda", torch.bfloat16).train(training)
    given = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in given.items()}
    runs: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    kernels = ""
    results: dict[str, Sequence[Tensor]] = {}
    for backend in ("inductor", "fa_inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)

        def run(compiled: Any = compiled) -> tuple[Tensor, ...]:
            out: Tensor = compiled(**given).last_hidden_state
            if not training:
                return (out,)
            # Of a loss that is not constant behind the last normalization.
            return torch.autograd.grad(out.float().sin().mean(), list(model.parameters()))

        with torch.set_grad_enabled(training), collecting() as report:
            results[backend] = run()
        kernels = report.summary()
        runs[backend] = run
    with torch.set_grad_enabled(training):
        times: dict[str, list[float]] = {backend: [] for backend in runs}
        for _ in range(ROUNDS):
            for backend, run in runs.items():
                times[backend].append(_milliseconds(run))
        peaks = {backend: _peak_megabytes(run) for backend, run in runs.items()}
    if "attention_mask" in given:  # outputs at padding mean nothing
        visible = given["attention_mask"].bool()
        results = {backend: [each[visible] for each in made] for backend, made in results.items()}
    medians = {backend: sorted(each)[ROUNDS // 2] for backend, each in times.items()}
    return Measured(
        name,
        kernels,
        *medians.values(),
        *peaks.values(),
        max(map(_apart, results["fa_inductor"], results["inductor"])),
    )


def _apart(ours: Tensor, plain: Tensor) -> float:
    return float((ours.float() - plain.float()).norm() / plain.float().norm())


def _milliseconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def _peak_megabytes(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="only the models whose name has this in it")
    arguments = parser.parse_args()
    rows = []
    table = Table("model", "inductor, ms", "ours, ms", "ratio", "inductor, MB", "ours, MB", "apart")
    table.title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16 inference"
    for name in MODELS:
        if arguments.only not in name:
            continue
        row = measured(name)
        rows.append(row)
        times = (f"{row.inductor_ms:.2f}", f"{row.ours_ms:.2f}", f"{row.ratio:.2f}x")
        memory = (f"{row.inductor_mb:.0f}", f"{row.ours_mb:.0f}", f"{row.apart:.1e}")
        table.add_row(name, *times, *memory)
        print(name, *times, *memory, row.kernels, flush=True)
    Console(width=140).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
