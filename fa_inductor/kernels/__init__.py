"""Kernels: what can run an attention problem, by name.

A kernel is a module (or any object) with

- `forward(problem, inputs, out, lse)`: fill `out`, and `lse` unless it is None;
- `backward(problem, inputs, out, lse, grad_out, grad_lse, grads)`: fill the gradients in `grads`
  (`grad_lse` is None when lse is not used);
- optionally `ROWS`, a plugin's own rows of the support table.

`problem` is a `fa_inductor.problem.Problem`, `inputs` its `Inputs`, `grads` its `Gradients`. All
tensors are (B, H, S, D) views with real strides; `lse` is (B, Hq, Sq), natural logarithm, float32
(float64 for float64 inputs), -inf on rows without a key. Sizes are never zero: the op answers
those itself.

Both return None, or a function that does the same again for other tensors of the very same
metadata, without looking at it: `repeat(tensors)`, with the tensors in the order (*inputs, out,
lse) and (*inputs, out, lse, grad_out, grad_lse, *grads). The op checks that the metadata is the
same and the pointers are aligned, and keeps such a function for its own thread only. If that of
`forward` has an attribute `on_bshd`, a function of the same tensors as (B, S, H, D), then
`attention_inference` repeats too.

Nothing here imports a kernel library: a kernel's module does, inside its functions.
Plugins name theirs in the entry point group `fa_inductor.kernels`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from typing import Any

from ..errors import UnknownKernelError, nearest
from ..support import Row
from ..watch import plain_name, watch_of
from .watched import around

BUILT_IN = {
    "fa4": "fa_inductor.kernels.fa4",
    "cudnn": "fa_inductor.kernels.cudnn",
    "reference": "fa_inductor.kernels.reference",
}
ENTRY_POINTS = "fa_inductor.kernels"
RECORD = "FA_INDUCTOR_RECORD"  # names a file: see `fa_inductor.warming.record`
_GRADIENTS = 5  # that a repeated backward has memory for


@functools.cache
def _plugins() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def known() -> tuple[str, ...]:
    """Names of all kernels: built in and from plugins."""
    return (*BUILT_IN, *_plugins())


def check_known(name: str) -> None:
    """Raise `UnknownKernelError` unless `name` is a kernel, watched or not."""
    name = plain_name(name)
    if name not in known():
        raise UnknownKernelError(
            f"Unknown kernel {name!r}; known kernels: {', '.join(known())}."
            + nearest(name, known())
        )


@functools.cache
def load(name: str) -> Any:
    """The kernel called `name`. Raises `UnknownKernelError`."""
    check_known(name)
    if watch := watch_of(name):
        plain = plain_name(name)
        return around(load(plain), plain, watch, _GRADIENTS)
    if name in BUILT_IN:
        return recorded(name, importlib.import_module(BUILT_IN[name]))
    return _plugins()[name].load()


def recorded(name: str, module: Any) -> Any:
    """`module`, whose calls are written down where that is asked for."""
    if not os.environ.get(RECORD):
        return module
    from ..warming.record import Recorded

    return Recorded(name, module)


def extra_rows(name: str) -> tuple[Row, ...]:
    """A plugin's own rows of the support table."""
    return tuple(getattr(load(name), "ROWS", ())) if name in _plugins() else ()
