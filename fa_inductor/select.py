"""Choose the kernel for a site: the first of the configured ones that the table lets through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import kernels
from .config import Config
from .spec import AttentionSpec
from .support import reasons_against
from .target import Target


@dataclass(frozen=True)
class Choice:
    """The kernel picked, None for a fallback, and the reasons against each other candidate."""

    kernel: str | None
    reasons: Mapping[str, tuple[str, ...]]


def choose(spec: AttentionSpec, config: Config, target: Target) -> Choice:
    """The first kernel of `config.kernels` that can run `spec` on `target`, with all reasons."""
    reasons = {
        name: tuple(reasons_against(name, spec, target, kernels.extra_rows(name)))
        for name in config.kernels
    }
    able = [name for name, against in reasons.items() if not against]
    return Choice(able[0] if able else None, {n: r for n, r in reasons.items() if r})
