"""Kernels of the variants of attention, by the name of the kernel that they belong to.

Such a kernel is a module with `forward` and `backward` as in `fa_inductor.kernels`, of which a lse
is always asked for, and no gradient of a bias, and with

- `check(problem, inputs)`: raise for what the kernel cannot take.

The tensors of a repeated call come in the order (*given, out, lse) and (*given, out, lse, grad_out,
grad_lse, *grads but bias).

Variable lengths: `inputs` is a `fa_inductor.varlen_problem.VarlenInputs`, out (Tq, Hq, Dv), lse
(Hq, Tq); given are (q, k, v, cu_seqlens_q, cu_seqlens_k, sink). A repeated call has the same
metadata and bounds, and other values in `cu_seqlens_q` and `cu_seqlens_k`; those two share their
memory in all calls of a class or in none.

Masks as text: `inputs` is a `fa_inductor.masked_problem.MaskedInputs`; given are (q, k, v, sink,
*mask tensors, *blocks), where blocks are the four of `by_query` in the forward and those of
`by_key` in the backward.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from ..errors import UnknownKernelError
from ..watch import plain_name, watch_of
from . import check_known, recorded
from .watched import around

_GRADIENTS = 4  # that a repeated backward has memory for


class VariantKernels(NamedTuple):
    """takes: what they take that others do not. modules: by the name of the kernel."""

    takes: str
    modules: dict[str, str]

    def check_known(self, name: str) -> None:
        """Raise `UnknownKernelError` unless `name` is a kernel of this variant."""
        check_known(name)
        if not self.has(name):
            raise UnknownKernelError(
                f"Kernel {name!r} takes no {self.takes}; kernels that do: "
                f"{', '.join(self.modules)}."
            )

    def has(self, name: str) -> bool:
        """Whether `name`, a kernel, takes them."""
        return plain_name(name) in self.modules

    def load(self, name: str) -> Any:
        """The module for the kernel called `name`. Raises `UnknownKernelError`."""
        self.check_known(name)
        plain = plain_name(name)
        module = recorded(plain, importlib.import_module(self.modules[plain]))
        if watch := watch_of(name):
            return around(module, plain, watch, _GRADIENTS)
        return module


VARLEN = VariantKernels(
    "variable lengths",
    {
        "fa4": "fa_inductor.kernels.fa4_varlen",
        "reference": "fa_inductor.kernels.reference_varlen",
    },
)
MASKED = VariantKernels(
    "masks as text",
    {
        "fa4": "fa_inductor.kernels.fa4_masked",
        "reference": "fa_inductor.kernels.reference_masked",
    },
)
