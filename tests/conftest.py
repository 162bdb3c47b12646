from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# `zoo`, the models that the README's table is made of. Last: benchmarks have names like `timing`.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

# Inductor's compile workers cost more than they save on the small graphs of these tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No compiled code, seed or flag of one test reaches another."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
