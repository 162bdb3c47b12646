"""What fa_inductor picks by default, to be held against what PyTorch picks."""

from __future__ import annotations

from fa_inductor import select
from fa_inductor.config import Config
from fa_inductor.spec import AttentionSpec
from fa_inductor.target import Target


def default_choice(spec: AttentionSpec, arch: str) -> str | None:
    """The kernel that fa_inductor picks for `spec` on `arch`, None where PyTorch's own runs.

    Decided by the shipped table, not by the run's own times: it is what is to be judged.
    """
    kernel = select.choose(spec, Config(), Target.of_name(arch)).kernel
    return None if kernel == select.CORE else kernel
