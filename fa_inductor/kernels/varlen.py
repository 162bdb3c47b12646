"""Kernels of attention with variable lengths, by the name of the kernel that they belong to.

Such a kernel is a module with

- `check(problem, inputs)`: raise for what the kernel cannot take;
- `forward(problem, inputs, out, lse)`: fill `out` (Tq, Hq, Dv) and `lse` (Hq, Tq);
- `backward(problem, inputs, out, lse, grad_out, grad_lse, grads)`: fill the gradients in `grads`.

`inputs` is a `fa_inductor.varlen_problem.VarlenInputs`; the rest is as in `fa_inductor.kernels`,
also that sizes are never zero and what the two functions return. A repeated call has the same
metadata and bounds, and other values in `cu_seqlens_q` and `cu_seqlens_k`; those two share their
memory in all calls of a class or in none. The tensors' order is (q, k, v, cu_seqlens_q,
cu_seqlens_k, sink, out, lse) and (..., lse, grad_out, grad_lse, *grads but bias).
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ..errors import UnknownKernelError
from . import check_known, recorded

MODULES = {
    "fa4": "fa_inductor.kernels.fa4_varlen",
    "reference": "fa_inductor.kernels.reference_varlen",
}


def check_varlen(name: str) -> None:
    """Raise `UnknownKernelError` unless `name` is a kernel that takes variable lengths."""
    check_known(name)
    if name not in MODULES:
        raise UnknownKernelError(
            f"Kernel {name!r} takes no variable lengths; kernels that do: {', '.join(MODULES)}."
        )


@functools.cache
def load(name: str) -> Any:
    """The module for the kernel called `name`. Raises `UnknownKernelError`."""
    check_varlen(name)
    return recorded(name, importlib.import_module(MODULES[name]), "varlen")
