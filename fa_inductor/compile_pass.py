"""One compile's worth of the pass: guard the SDP flags, rewrite, report, apply the policy."""

from __future__ import annotations

import functools
import logging
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import fx

from . import dynamo_compat, numerics, report, torch_compat
from .config import Config
from .errors import FallbackError
from .graph_breaks import understand
from .rewrite import SiteRecord, rewrite
from .support import defects
from .target import Target

log = logging.getLogger("fa_inductor")


@dataclass
class RewrittenOnly:
    """While attention only compiles, graphs run as the pass has left them, without Inductor.

    target: what they are planned for; None is the device of their tensors. graphs: how many.
    """

    target: Target | None
    graphs: int = 0


rewritten_only: ContextVar[RewrittenOnly | None] = ContextVar("fa_inductor_rewritten", default=None)


def run(
    gm: fx.GraphModule, config: Config, target: Target | None = None, *, apply: bool = True
) -> list[SiteRecord]:
    """Rewrite `gm` (or only plan it), tell the collecting report and the log.

    Raises `FallbackError` when a site is left to PyTorch under `fa.on_fallback="error"`.
    """
    dynamo_compat.guard_sdp_backends()
    sites = rewrite(gm, config, target, apply=apply)
    if config.guard != "off" and apply:
        _prepare_tables(sites)
    if apply and target is None:
        for device in {site.spec.q.device for site in sites if site.spec is not None}:
            _warn_of_defects(device)
    _report(gm, sites)
    for site in sites:
        log.info("%s: %s on %s; %s", site.source, site.spec, site.kernel, site.reason_texts)
        if site.objections and apply:
            log.warning(
                "%s: %s is called by name, although: %s",
                site.source,
                site.kernel,
                " · ".join(site.objections),
            )
    line = report.fallback_line(sites)
    if line and config.on_fallback == "error":
        raise FallbackError(line)
    if line and config.on_fallback == "warn" and apply:
        log.warning("fa_inductor: %s", line)
    return sites


def _report(gm: fx.GraphModule, sites: list[SiteRecord]) -> None:
    """To the report that is collecting, and to the trace that `TORCH_TRACE` asks for."""
    found = dynamo_compat.graph_break_reason(gm)
    broken = understand(*found, dynamo_compat.graph_break_ids()) if found else None
    nodes = len(gm.graph.nodes)
    report.add_graph(nodes, sites, broken)

    def alone() -> str:
        attempt = dynamo_compat.attempt()
        this_graph = report.Report()
        this_graph.add(nodes, sites, broken, attempt.compile_id if attempt else "")
        return this_graph.dumps()

    dynamo_compat.write_trace_artifact("fa_inductor_report", alone)


@functools.cache
def _warn_of_defects(device: torch.device) -> None:
    """Once for each GPU: PyTorch and user code call the same libraries, without these limits."""
    for line in defects(Target.of_device(device)):
        log.warning(
            "fa_inductor: known to be wrong: %s. fa_inductor keeps off it; what else calls this "
            "library, as PyTorch's own attention does cuDNN, may not.",
            line,
        )


def _prepare_tables(sites: list[SiteRecord]) -> None:
    """What watched kernels write to has to be there before their code runs."""
    with torch_compat.without_fake_tensors():
        for site in sites:
            if site.kernel is not None and site.spec is not None:
                numerics.table_of(site.spec.q.device)
