"""Choose the kernel for a site, among those that the support table lets through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import kernels, symbolic, times
from .config import DEFAULT_KERNELS, Config
from .spec import AttentionSpec
from .support import reasons_against
from .target import Target
from .times import CORE

# PyTorch's own attention must be this much faster to be kept: a tie goes to the kernel whose
# limits are checked.
_MARGIN = 1.03
_PLAN_FOR_EACH_LENGTH = (
    "the lengths vary (cuDNN builds a plan for each, FA4 does not; fa_inductor/select.py)"
)


@dataclass(frozen=True)
class Choice:
    """The kernel picked, and the reasons against each other candidate.

    kernel: None for a fallback, "core" where PyTorch's own attention is kept because it is faster.
    """

    kernel: str | None
    reasons: Mapping[str, tuple[str, ...]]


def choose(spec: AttentionSpec, config: Config, target: Target, has_core: bool = True) -> Choice:
    """The kernel of `config.kernels` for `spec` on `target`, with all reasons.

    Kernels that the user has named are taken in their order; the default ones by measured time.
    has_core: whether PyTorch's own fused attention is what a site left alone would run.
    """
    by_time = config.kernels == DEFAULT_KERNELS
    reasons: dict[str, tuple[str, ...]] = {}
    for name in config.kernels:
        reasons[name] = tuple(reasons_against(name, spec, target, kernels.extra_rows(name)))
        if by_time and name == "fa4" and not reasons[name] and _lengths_vary(spec):
            # Nor is cuDNN asked: some of its limits hold under guards, which split the graph.
            return Choice(name, {"cudnn": (_PLAN_FOR_EACH_LENGTH,)})
    able = [name for name, against in reasons.items() if not against]
    reasons = {name: against for name, against in reasons.items() if against}
    if not able:
        return Choice(None, reasons)
    if not by_time:
        return Choice(able[0], reasons)
    picked, slower = _fastest(able, spec, target, has_core)
    return Choice(picked, {**reasons, **slower})


def _fastest(
    able: Sequence[str], spec: AttentionSpec, target: Target, has_core: bool
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The fastest of the able kernels or core, and what the others were measured at."""
    measured = times.of(spec, target)
    known = {name: measured[name] for name in able if name in measured}
    if not known:
        return able[0], {}
    best = min(known, key=lambda name: known[name])
    # What PyTorch was measured at is its own choice of backend, not one that the user has pinned.
    core_counts = has_core and CORE in measured and spec.sdp_backends is None
    if core_counts and measured[CORE] * _MARGIN < known[best]:
        known[CORE] = measured[CORE]
        best = CORE
    slower: dict[str, tuple[str, ...]] = {
        name: (
            f"{time:.0f} µs on the most similar problem measured on {target.arch}, "
            f"{best} {known[best]:.0f} µs",
        )
        for name, time in known.items()
        if name != best
    }
    return best, slower


def _lengths_vary(spec: AttentionSpec) -> bool:
    return not all(map(symbolic.is_static, (*spec.lengths, spec.q.shape[0])))
