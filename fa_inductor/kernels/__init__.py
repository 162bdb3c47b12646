"""Kernels: what can run an attention problem, by name.

A kernel is a module (or any object) with

- `forward(q, k, v, out, lse, *, scale, causal)`: fill `out` and `lse`;
- `backward(grad_out, grad_lse, q, k, v, out, lse, grad_q, grad_k, grad_v, *, scale, causal,
  deterministic)`: fill the three gradients (`grad_lse` is None when lse is not used);
- optionally `ROWS`, a plugin's own rows of the support table.

All tensors are (B, H, S, D) views with real strides; `lse` is (B, Hq, Sq), natural logarithm,
float32 (float64 for float64 inputs), -inf on rows without a key. `scale` is a float, `causal`
one of `fa_inductor.spec.CAUSAL_KINDS`. Sizes are never zero: the op answers those itself.

Nothing here imports a kernel library: a kernel's module does, inside its functions.
Plugins name theirs in the entry point group `fa_inductor.kernels`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Any

from ..errors import UnknownKernelError, nearest
from ..support import Row

BUILT_IN = {"fa4": "fa_inductor.kernels.fa4", "reference": "fa_inductor.kernels.reference"}
PLANNED = ("cudnn",)  # a known name whose rows in the support table refuse every site
ENTRY_POINTS = "fa_inductor.kernels"


@functools.cache
def _plugins() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def known() -> tuple[str, ...]:
    """Names of all kernels: built in, planned and from plugins."""
    return (*BUILT_IN, *PLANNED, *_plugins())


def check_known(name: str) -> None:
    """Raise `UnknownKernelError` unless `name` is a kernel."""
    if name not in known():
        raise UnknownKernelError(
            f"Unknown kernel {name!r}; known kernels: {', '.join(known())}."
            + nearest(name, known())
        )


@functools.cache
def load(name: str) -> Any:
    """The kernel called `name`. Raises `UnknownKernelError`."""
    check_known(name)
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name])
    if name in PLANNED:
        raise UnknownKernelError(f"Kernel {name!r} is not carried by this version of fa_inductor.")
    return _plugins()[name].load()


def extra_rows(name: str) -> tuple[Row, ...]:
    """A plugin's own rows of the support table."""
    return tuple(getattr(load(name), "ROWS", ())) if name in _plugins() else ()
