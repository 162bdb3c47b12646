"""Run in Triton's interpreter (TRITON_INTERPRET=1): what the scan finds, as JSON lines."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from fa_inductor import numerics
from fa_inductor.kernels import scan


def found(*tensors: Tensor, positive: bool = False) -> list[str]:
    numerics.forget()
    table = numerics.table_of(torch.device("cpu"))
    names = numerics.Names("here", "reference", "forward")
    row = table.row(0, names, [numerics.Number("{}")] * 3, "warn")
    scan.look(row, tensors, positive)
    scan.look(row, [tensor * 0.5 for tensor in tensors], positive)  # less does not count
    return [f"{value:.4g}" for value in row.seen.tolist()]


def with_value(size: int, place: int, value: float, dtype: Any = torch.float32) -> Tensor:
    tensor = torch.linspace(-2, 1, size, dtype=dtype)
    tensor[place] = value
    return tensor


CASES = {
    "numbers": [with_value(40000, 17, -7.0), with_value(5, 0, 0.5), with_value(16385, 16384, 3.5)],
    "NaN": [with_value(40000, 39999, math.nan), with_value(3, 1, -math.inf)],
    "bfloat16": [with_value(20000, 16384, math.nan, torch.bfloat16)],
    "float16": [with_value(20000, 1, math.inf, torch.float16), with_value(9, 8, -5, torch.float16)],
}
for name, tensors in CASES.items():
    print(json.dumps([name, found(*tensors)]))
for value in (-math.inf, math.inf, math.nan, -math.nan, -3.0, 1.5):
    lse = torch.full((100,), -4.0)
    lse[3] = value
    print(json.dumps([f"lse {value}", found(torch.ones(9), lse, positive=True)]))
