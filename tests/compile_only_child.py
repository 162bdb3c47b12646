"""What is tried in a process of its own, as FA4 is imported for one target.

Arguments: the target, and a directory of tests to run with `--compile-only`. Reads jobs, to be
compiled, from standard input.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch

import fa_inductor
from fa_inductor.errors import CompileOnlyError
from fa_inductor.warming.jobs import read
from fa_inductor.warming.worker import compiled


def attend(length: int, device: str = "cpu") -> None:
    q = torch.empty(1, length, 4, 64, dtype=torch.bfloat16, device=device).transpose(1, 2)
    k = torch.empty(1, length, 2, 64, dtype=torch.bfloat16, device=device).transpose(1, 2)
    out, _ = torch.ops.fa_inductor.attention(q, k, k, None, "none", "BSHD", False, "fa4")
    assert out.shape == q.shape


def main() -> None:
    with fa_inductor.compile_only(target=sys.argv[1]):
        attend(256)
        first = fa_inductor.stats()
        attend(8000)
        attend(256, "cuda")
        again = fa_inductor.stats()
        jobs = [compiled(job) for job in read(sys.stdin.readlines())]
        second = [sum(job[count] for job in jobs) for count in ("compiled", "found")]
        tensor = torch.zeros(3)
        answers = [torch.ones(2, dtype=torch.int64).sum().item(), float(tensor[1]), int(tensor[0])]
        answers += [torch.zeros(1, dtype=torch.bool).item(), tensor.tolist()]
    try:
        with fa_inductor.compile_only(target="sm_120a"):
            pass
    except CompileOnlyError as error:
        refused = str(error)
    counts = [[each.compiles, each.loads] for each in (first, again)]
    print(json.dumps([*counts, second, answers, refused]), flush=True)
    plugin = ("-p", "pytest_fa_inductor")
    sys.exit(pytest.main([*plugin, "--compile-only", sys.argv[2]]))


if __name__ == "__main__":
    main()
