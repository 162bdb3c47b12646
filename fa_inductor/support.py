"""The support table: which kernel can run which attention, as data.

Dispatch, `explain`'s reasons, `fa-inductor doctor`, the README's matrix and test ids are all
made from `ROWS`. A row is one limit of one kernel with the source it was read in; a kernel can
run a spec when no row objects.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import support_cudnn, support_fa4
from . import support_row as check
from .spec import AttentionSpec
from .support_row import Row
from .target import Target

__all__ = ["ROWS", "Row", "defects", "reasons_against", "rows_of"]

_REFERENCE = "fa_inductor/kernels/reference.py"

ROWS: tuple[Row, ...] = (
    *support_fa4.ROWS,
    *support_cudnn.ROWS,
    Row("reference", "mask", check.MASK_DTYPE, "fa_inductor/patterns", check.mask_of_another_dtype),
    Row(
        "reference",
        "mask",
        "masks that the op can take",
        "fa_inductor/patterns",
        check.unknown_mask,
    ),
    Row(
        "reference",
        "dtype",
        "float16, bfloat16, float32, float64",
        _REFERENCE,
        check.needs_dtype(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ),
    Row(
        "reference",
        "sdpa_kernel",
        "runs where nothing is pinned",
        check.SDPA_KERNEL,
        check.pinned_unless_first(""),
    ),
)


def rows_of(kernel: str, extra: Sequence[Row] = ()) -> tuple[Row, ...]:
    """The rows of one kernel; `extra` are a plugin's own."""
    return tuple(row for row in (*ROWS, *extra) if row.kernel == kernel)


def reasons_against(
    kernel: str, spec: AttentionSpec, target: Target, extra: Sequence[Row] = ()
) -> list[str]:
    """Every reason why `kernel` cannot run `spec` on `target`; empty when it can."""
    found = (row.reason(spec, target) for row in rows_of(kernel, extra))
    return [reason for reason in found if reason is not None]


def defects(target: Target) -> list[str]:
    """What is known to be wrong in the libraries of `target`, one line each."""
    return [
        f"{row.defect.library} {target.libraries[row.defect.library]} on {target.arch}: "
        f"{row.limit} ({row.source})"
        for row in ROWS
        if row.defect is not None
        and row.defect.is_in(target)
        and (not row.families or target.family in row.families)
    ]
