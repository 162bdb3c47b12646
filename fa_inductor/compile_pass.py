"""One compile's worth of the pass: guard the SDP flags, rewrite, report, apply the policy."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

from torch import fx

from . import dynamo_compat, numerics, report, torch_compat
from .config import Config
from .errors import FallbackError
from .rewrite import SiteRecord, rewrite
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
    collecting = report.collector()
    if collecting is not None:
        reason = dynamo_compat.graph_break_reason(gm)
        broken = report.GraphBreak(*reason) if reason else None
        collecting.add(len(gm.graph.nodes), sites, broken)
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


def _prepare_tables(sites: list[SiteRecord]) -> None:
    """What watched kernels write to has to be there before their code runs."""
    with torch_compat.without_fake_tensors():
        for site in sites:
            if site.kernel is not None and site.spec is not None:
                numerics.table_of(site.spec.q.device)
