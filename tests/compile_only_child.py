"""What is tried in a process of its own, as FA4 is imported for one target: its argument."""

from __future__ import annotations

import json
import sys

import torch

import fa_inductor
from fa_inductor.errors import CompileOnlyError


def attend(length: int, device: str = "cpu", grad: bool = False) -> None:
    q = torch.empty(1, length, 4, 64, dtype=torch.bfloat16, device=device).transpose(1, 2)
    k = torch.empty(1, length, 1, 64, dtype=torch.bfloat16, device=device).transpose(1, 2)
    out, _ = torch.ops.fa_inductor.attention(
        *(q.requires_grad_(grad), k, k, None, "bottom_right", "BSHD", False, "fa4")
    )
    assert out.shape == q.shape
    if grad:
        out.sum().backward()
        assert q.grad is not None


def main() -> None:
    with fa_inductor.compile_only(target=sys.argv[1]):
        attend(256)
        first = fa_inductor.stats()
        attend(8000)
        attend(256, "cuda")
        again = fa_inductor.stats()
        tensor = torch.zeros(3)
        answers = [torch.ones(2, dtype=torch.int64).sum().item(), float(tensor[1]), int(tensor[0])]
        answers += [torch.zeros(1, dtype=torch.bool).item(), tensor.tolist()]
    try:
        with fa_inductor.compile_only(target="sm_120a"):
            pass
    except CompileOnlyError as error:
        refused = str(error)
    print(
        json.dumps([first.compiles + first.loads, first.compiles, again.compiles, answers, refused])
    )


if __name__ == "__main__":
    main()
