from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Each of several test processes would else have a thread for every core, and wait for the others'.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch._inductor.config
from torch._subclasses.fake_tensor import FakeTensor

from fa_inductor import op_memory, varlen_checks
from fa_inductor.probing.poison import poisoned

# `zoo`, the models that the README's table is made of. Last: benchmarks have names like `timing`.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

# Inductor's compile workers cost more than they save on the small graphs of these tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


# Compiling Inductor's C++ is most of what the tests take, and its vector code a third of that.
torch._inductor.config.cpp.simdlen = 1


def pytest_collection_finish() -> None:
    """What is imported by now stays: no use in looking through it for garbage again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries say at exit what was not freed


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No compiled code, seed or flag of one test reaches another."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Whatever Inductor or an op of ours allocates is full of NaN until it is written.

    Without PyTorch's deterministic mode, under which kernels are chosen by other rules.
    """
    fresh = op_memory.fresh
    with poisoned(deterministic_fill=False) as poison:

        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = fresh(*args, **kwargs)
            return made if isinstance(made, FakeTensor) else poison.filled(made)

        with pytest.MonkeyPatch.context() as patch:
            for module in (op_memory, varlen_checks):
                patch.setattr(module, "fresh", filled)
            yield
