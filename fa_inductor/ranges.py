"""What a profiler shows of a compiled graph: its attention sites and their kernels, by name.

A range is around the whole call of a graph, forward: the ops do not know which site they are, as
that would make cached graphs differ by the names in a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import torch_compat
from .rewrite import SiteRecord


def range_name(sites: Sequence[SiteRecord]) -> str:
    """`fa_inductor: layers.0.attn … layers.3.attn (4) on fa4, head on fallback`."""
    runs: list[list[SiteRecord]] = []
    for site in sites:
        if runs and runs[-1][0].kernel == site.kernel and runs[-1][0].source == site.source:
            runs[-1].append(site)
        else:
            runs.append([site])
    return "fa_inductor: " + ", ".join(map(_run_name, runs))


def _run_name(run: Sequence[SiteRecord]) -> str:
    names = [site.module or "/".join(site.source.split("/")[-1:]) for site in run]
    shown = names[0] if len(run) == 1 else f"{names[0]} … {names[-1]} ({len(run)})"
    return f"{shown} on {run[0].kernel or 'fallback'}"


def in_range(compiled: Callable[..., Any], sites: Sequence[SiteRecord]) -> Callable[..., Any]:
    """`compiled`, its calls in a profiler range that names `sites` whenever a profiler runs.

    Without a site it is `compiled` itself; without a profiler a call looks at one flag more.
    """
    if not sites:
        return compiled
    name = range_name(sites)

    def named(*args: Any) -> Any:
        with torch.profiler.record_function(name):
            return compiled(*args)

    return torch_compat.while_profiled(compiled, named)
