from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Inductor's compile workers cost more than they save on the small graphs of these tests.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No compiled code, seed or flag of one test reaches another."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
