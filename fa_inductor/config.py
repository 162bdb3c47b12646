"""The options that fa_inductor adds to Inductor's own: `options={"fa.<key>": value}`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import OptionError, nearest

PREFIX = "fa."
DEFAULT_KERNELS = ("fa4", "cudnn")
FALLBACK_POLICIES = ("ignore", "warn", "error")
JIT_POLICIES = ("ignore", "warn", "error")
ASSUMED_MASKS = ("causal", "full")


@dataclass(frozen=True)
class Config:
    """Options of one compile.

    kernels: names of the kernels that may be used, in order of preference. A site that none
        of them can run is left to PyTorch. The default ones are not taken in that order but by
        measured time, where there are measurements for the GPU, and PyTorch's own attention is
        kept where it was faster.
    on_fallback: what to do when a site is left to PyTorch: "ignore", "warn" (one log line a
        compile) or "error" (`FallbackError`).
    assume_mask: what you promise of every mask that is not learned and not understood: "causal"
        (those of as many queries as keys: query i sees keys j <= i) or "full" (hides nothing).
        It is then not handed to a kernel, but asserted on its device, once for each mask and
        call, with nothing waiting for it: on CUDA a broken promise is a device-side assertion.
    on_jit: what to do when from now on, anywhere in this process, a kernel is compiled or a plan
        is built: "ignore", "warn" (a log line with what was new) or "error" (`JitError`, before
        it is done). None leaves it as it was; it starts as "ignore".
    mode: an Inductor mode ("reduce-overhead", "max-autotune", ...), because `torch.compile`
        refuses its own `mode=` beside `options=`.
    """

    kernels: tuple[str, ...] = DEFAULT_KERNELS
    on_fallback: str = "warn"
    assume_mask: str | None = None
    on_jit: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.kernels, str) or not all(isinstance(k, str) for k in self.kernels):
            raise OptionError(
                f"fa.kernels={self.kernels!r}: expected a tuple of kernel names, "
                f"for example ({self.kernels!r},) or ('fa4', 'cudnn')."
            )
        object.__setattr__(self, "kernels", tuple(self.kernels))
        if not self.kernels:
            raise OptionError("fa.kernels=(): name at least one kernel, or use backend='inductor'.")
        if self.on_fallback not in FALLBACK_POLICIES:
            raise OptionError(
                f"fa.on_fallback={self.on_fallback!r}: expected one of {FALLBACK_POLICIES}."
                + nearest(str(self.on_fallback), FALLBACK_POLICIES)
            )
        if self.assume_mask not in (None, *ASSUMED_MASKS):
            raise OptionError(
                f"fa.assume_mask={self.assume_mask!r}: expected one of {ASSUMED_MASKS} or None."
                + nearest(str(self.assume_mask), ASSUMED_MASKS)
            )
        if self.on_jit not in (None, *JIT_POLICIES):
            raise OptionError(
                f"fa.on_jit={self.on_jit!r}: expected one of {JIT_POLICIES} or None."
                + nearest(str(self.on_jit), JIT_POLICIES)
            )
        if self.mode is not None and not isinstance(self.mode, str):
            raise OptionError(f"fa.mode={self.mode!r}: expected the name of an Inductor mode.")


def option_names() -> tuple[str, ...]:
    """The `fa.` option keys, with prefix."""
    return tuple(PREFIX + field.name for field in dataclasses.fields(Config))


def split_options(options: Mapping[str, Any] | None) -> tuple[Config, dict[str, Any]]:
    """Separate `fa.` options from Inductor's.

    Returns the validated `Config` and the remaining options, untouched.
    Raises `OptionError` for an unknown `fa.` key, naming the nearest known one.
    """
    ours: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if not key.startswith(PREFIX):
            rest[key] = value
        elif key in option_names():
            ours[key.removeprefix(PREFIX)] = value
        else:
            raise OptionError(
                f"Unknown option {key!r}; fa_inductor knows {', '.join(option_names())}."
                + nearest(key, option_names())
            )
    return Config(**ours), rest
