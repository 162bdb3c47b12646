"""`fa-inductor doctor`: what is installed, what the GPU is, and which limits hold here."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from . import __version__, kernels
from .spec import AttentionSpec, TensorSpec
from .support import Row, defects, reasons_against, rows_of
from .target import TESTED_LIBRARIES, Target, installed_libraries

if TYPE_CHECKING:
    from rich.console import RenderableType


def here() -> Target:
    """The target of this machine: its first GPU, or the CPU."""
    return Target.of_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def rows_that_hold(kernel: str, target: Target) -> list[Row]:
    """Rows of the support table that can bite on `target`."""
    rows = rows_of(kernel, kernels.extra_rows(kernel))
    return [row for row in rows if not row.families or target.family in row.families]


def obstacles(kernel: str, target: Target) -> list[str]:
    """Why a kernel can run not even a plain bfloat16 attention on `target`."""
    device = torch.device("cuda" if target.family else "cpu")
    tensor = TensorSpec((1, 1, 128, 64), (8192, 64, 64, 1), torch.bfloat16, device)
    plain = AttentionSpec(tensor, tensor, tensor, torch.bfloat16, scale=0.125)
    return reasons_against(kernel, plain, target, kernels.extra_rows(kernel))


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
        blocked = obstacles(kernel, target)
        rows = [] if blocked else rows_that_hold(kernel, target)
        table.add_row(kernel, f"no: {' · '.join(blocked)}" if blocked else "yes")
        for row in rows:
            table.add_row("", row.feature, row.limit, row.passes, row.source)
    known = [Text(f"known to be wrong: {line}", style="yellow") for line in defects(target)]
    return Group(versions, gpu, *known, table)
