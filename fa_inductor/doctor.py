"""`fa-inductor doctor`: what is installed, what the GPU is, and which limits hold here."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from . import __version__, kernels
from .support import ROWS, Row
from .target import TESTED_LIBRARIES, Target, installed_libraries

if TYPE_CHECKING:
    from rich.console import RenderableType


def here() -> Target:
    """The target of this machine: its first GPU, or the CPU."""
    return Target.of_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def rows_that_hold(kernel: str, target: Target) -> list[Row]:
    """Rows of the support table that can bite on `target`."""
    return [r for r in ROWS if r.kernel == kernel and (not r.families or target.family in r.families)]


def obstacle(kernel: str, target: Target) -> str | None:
    """Why a kernel can run nothing at all on `target`, or None."""
    if kernel in kernels.PLANNED:
        return "not carried by this version of fa_inductor"
    if kernel != "fa4":
        return None
    version = target.libraries["flash-attn-4"]
    tested = TESTED_LIBRARIES["flash-attn-4"]
    if not version:
        return f"flash-attn-4 is not installed: pip install flash-attn-4=={tested}"
    if version != tested:
        return f"flash-attn-4 {version} is installed, {tested} is needed: pip install flash-attn-4=={tested}"
    if not target.family:
        return "no CUDA GPU"
    if target.family not in (8, 9, 10, 12):
        return f"{target.arch}: FA4 needs sm_80, sm_90, sm_10x or sm_12x"
    return None


def diagnosis() -> RenderableType:
    """A renderable with versions, GPU and kernels."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    target = here()
    versions = Table(title=f"fa-inductor {__version__}", title_justify="left")
    for heading in ("library", "installed", "tested with"):
        versions.add_column(heading)
    versions.add_row("python", platform.python_version(), "3.10 to 3.13")
    versions.add_row("torch", torch.__version__, "2.11 to 2.14")
    for library, version in installed_libraries().items():
        versions.add_row(library, version or "missing", TESTED_LIBRARIES[library])
    name = torch.cuda.get_device_name() if target.family else "none"
    gpu = Text(f"GPU: {name} ({target.arch}, {target.sm_count} SMs)\n")

    table = Table(title="kernels here", title_justify="left")
    for heading in ("kernel", "can run", "limit", "pass", "source"):
        table.add_column(heading, overflow="fold")
    for kernel in kernels.known():
        blocked = obstacle(kernel, target)
        rows = [] if blocked else rows_that_hold(kernel, target)
        table.add_row(kernel, f"no: {blocked}" if blocked else "yes")
        for row in rows:
            table.add_row("", row.feature, row.limit, row.passes, row.source)
    return Group(versions, gpu, table)
