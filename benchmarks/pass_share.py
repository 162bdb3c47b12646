"""What the pass costs of a cold compile of a 32-layer Llama with the mask that transformers builds.

    python benchmarks/pass_share.py [--layers 32] [--device cpu]

On a CPU the reference kernel stands in, which the pass does not notice. Caches are off.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from fa_inductor import collecting


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1000,
            use_cache=False,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    options = {"fa.on_fallback": "ignore", "fx_graph_cache": False}
    if arguments.device == "cpu":
        options["fa.kernels"] = ("reference",)
    model = llama(arguments.layers).to(arguments.device, torch.bfloat16).eval()
    for name, padded in (("no padding", False), ("padded", True)):
        ids = torch.randint(0, 1000, (2, 256), device=arguments.device)
        kept = torch.ones_like(ids)
        kept[0, :100] = 0
        given = {"input_ids": ids, "attention_mask": kept} if padded else {"input_ids": ids}
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="fa_inductor", options=options)
        start = time.perf_counter()
        with torch.no_grad(), collecting() as report:
            compiled(**given)
        whole = time.perf_counter() - start
        share = report.pass_seconds / whole
        sites = len(report.sites)
        print(f"{name}: {sites} sites, {report.pass_seconds:.3f} s of {whole:.1f} s, {share:.2%}")


if __name__ == "__main__":
    main()
