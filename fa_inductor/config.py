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
GUARDS = ("off", "finite", "oracle", "replay")
GUARD_ACTIONS = ("warn", "error")


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
    guard: "finite" looks at the output, the log-sum-exp and the gradients of every site for NaN
        and infinity, without waiting for them, and tells the site in a later call, usually of the
        next step; "oracle" also compares a few rows of a site with float64, at its first call and
        every `guard_every` calls. See `fa_inductor.numerics`. "replay" compares each call as a
        whole, for `fa-inductor probe --model`.
    on_guard: what to do with what it finds: "warn" (one log line a site) or "error"
        (`NumericsError`).
    guard_every: a number from 1 on, for "oracle".
    mode: an Inductor mode ("reduce-overhead", "max-autotune", ...), because `torch.compile`
        refuses its own `mode=` beside `options=`.
    """

    kernels: tuple[str, ...] = DEFAULT_KERNELS
    on_fallback: str = "warn"
    assume_mask: str | None = None
    on_jit: str | None = None
    guard: str = "off"
    on_guard: str = "warn"
    guard_every: int = 100
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
        _check("on_fallback", self.on_fallback, FALLBACK_POLICIES)
        if self.assume_mask is not None:
            _check("assume_mask", self.assume_mask, ASSUMED_MASKS, " or None")
        if self.on_jit is not None:
            _check("on_jit", self.on_jit, JIT_POLICIES, " or None")
        _check("guard", self.guard, GUARDS)
        _check("on_guard", self.on_guard, GUARD_ACTIONS)
        if not isinstance(self.guard_every, int) or self.guard_every < 1:
            raise OptionError(f"fa.guard_every={self.guard_every!r}: expected a number from 1 on.")
        if self.mode is not None and not isinstance(self.mode, str):
            raise OptionError(f"fa.mode={self.mode!r}: expected the name of an Inductor mode.")


def _check(key: str, value: object, known: tuple[str, ...], other: str = "") -> None:
    if value not in known:
        raise OptionError(
            f"fa.{key}={value!r}: expected one of {known}{other}." + nearest(str(value), known)
        )


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
