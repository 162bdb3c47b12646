"""Kernels of attention with a mask as text, by the name of the kernel that they belong to.

Such a kernel is a module with

- `check(problem, inputs, visible)`: raise for what the kernel cannot take;
- `forward(problem, inputs, visible, out, lse)`: fill `out` and `lse`;
- `backward(problem, inputs, visible, out, lse, grad_out, grad_lse, grads)`: fill the gradients in
  `grads`, of which there are none of a bias.

`visible` is a `fa_inductor.masked_problem.Visible`; the rest is as in `fa_inductor.kernels`, also
what the two functions return. The tensors of a repeated call come in the order (q, k, v, sink,
*mask tensors, *blocks, out, lse) and (..., lse, grad_out, grad_lse, *grads but bias), where blocks
are the four of `by_query` in the forward and those of `by_key` in the backward.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ..errors import UnknownKernelError
from . import check_known, recorded

MODULES = {
    "fa4": "fa_inductor.kernels.fa4_masked",
    "reference": "fa_inductor.kernels.reference_masked",
}


def check_masked(name: str) -> None:
    """Raise `UnknownKernelError` unless `name` is a kernel that takes masks as text."""
    check_known(name)
    if name not in MODULES:
        raise UnknownKernelError(
            f"Kernel {name!r} takes no masks as text; kernels that do: {', '.join(MODULES)}."
        )


@functools.cache
def load(name: str) -> Any:
    """The module for the kernel called `name`. Raises `UnknownKernelError`."""
    check_masked(name)
    return recorded(name, importlib.import_module(MODULES[name]), "masked")
