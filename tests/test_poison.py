"""The poison itself: fresh memory is NaN in every test, so a launch that is missing shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_inductor import op_memory
from helpers import compile_reference

TESTS = Path(__file__).parent
# One of those that compare a compiled attention with eager.
COMPARING = "test_training.py"


def test_what_the_ops_allocate_is_poisoned() -> None:
    assert op_memory.fresh(torch.zeros(3), (2, 5)).isnan().all()
    out, lse = op_memory.outputs(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), "BSHD", True)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_what_inductor_allocates_is_poisoned() -> None:
    """Also right after eager has left the right result in memory of that very size."""

    @torch.library.custom_op("fa_inductor_tests::launches_nothing", mutates_args=())
    def launches_nothing(q: Tensor) -> Tensor:
        return op_memory.fresh(q, q.shape)

    launches_nothing.register_fake(lambda q: torch.empty_like(q))
    q = torch.randn(1, 2, 64, 64)
    right = F.scaled_dot_product_attention(q, q, q)
    del right
    made = compile_reference(lambda q: launches_nothing(q) + 0.0)(q)
    assert made.isnan().all()


def test_a_deleted_launch_makes_the_suite_fail() -> None:
    """With nothing launched no value is right, though every graph and shape is."""
    command = [sys.executable, "-m", "pytest", str(TESTS / COMPARING), "-p", "deleted_launch"]
    options = ["-q", "--maxfail=2", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line"]
    run = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        check=False,
    )
    assert run.returncode == 1, run.stdout
    assert "2 failed" in run.stdout
    assert "passed" not in run.stdout
    assert "AssertionError" in run.stdout  # of values: nothing else is amiss
