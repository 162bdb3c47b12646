"""What is compiled, loaded and built at run time, and what to do when something is.

A kernel that is compiled in the middle of a training run stops every rank for seconds. After a
warm-up nothing should be: `on_jit("error")` or `options={"fa.on_jit": "error"}` holds to that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from .config import JIT_POLICIES
from .errors import JitError, OptionError, nearest

log = logging.getLogger("fa_inductor")

Fields = Mapping[str, str]  # a key's fields by name, as text


@dataclass
class Stats:
    """Counts of this process, all threads together.

    compiles: kernels compiled, in compile_seconds. loads: kernels read from a directory instead.
    hits: kernels found in memory when a call of a new class of metadata asked for them.
    plan_builds: cuDNN plans built, in plan_seconds. plan_loads: read from a directory instead.
    plan_hits: found in memory.
    Calls that are only repeated ask for nothing and are not counted.
    """

    compiles: int = 0
    loads: int = 0
    hits: int = 0
    plan_builds: int = 0
    plan_loads: int = 0
    plan_hits: int = 0
    compile_seconds: float = 0.0
    plan_seconds: float = 0.0


_stats = Stats()
_lock = threading.Lock()
_policy = "ignore"


def stats() -> Stats:
    """What was compiled, loaded, built and found so far; a copy."""
    with _lock:
        return Stats(**asdict(_stats))


def count(name: str, amount: float = 1) -> None:
    """Add to one of the counts."""
    with _lock:
        setattr(_stats, name, getattr(_stats, name) + amount)


def on_jit(policy: str | None = None) -> str:
    """Set what happens from now on when a kernel is compiled or a plan built; returns what held
    before. None changes nothing. Raises `OptionError`."""
    global _policy
    before = _policy
    if policy is not None:
        if policy not in JIT_POLICIES:
            raise OptionError(
                f"on_jit({policy!r}): expected one of {JIT_POLICIES}."
                + nearest(policy, JIT_POLICIES)
            )
        _policy = policy
    return before


@contextmanager
def allowed() -> Iterator[None]:
    """Inside, compiling is what was asked for."""
    before = on_jit("ignore")
    try:
        yield
    finally:
        on_jit(before)


def about_to(what: str, fields: Fields, known: Callable[[], Sequence[Fields]]) -> None:
    """Say that `what` will be compiled or built now for the key with these fields.

    known: the keys that there are already. Raises `JitError` where that is not to happen.
    """
    if _policy == "ignore":
        return
    message = f"{what}: {news(fields, known())}"
    if _policy == "error":
        raise JitError(
            f'fa.on_jit="error", but it is not there yet and would be made now: {message}. '
            "Warm it up (fa-inductor warm, or a call with such tensors before)."
        )
    log.warning("made at run time: %s", message)


def news(fields: Fields, known: Sequence[Fields]) -> str:
    """What a key has that the most similar known one has not."""
    if not known:
        return "the first of its kind; " + _text(fields, fields)
    nearest_key = min(known, key=lambda other: len(_changed(fields, other)))
    changed = _changed(fields, nearest_key)
    if not changed:
        return "like one that is there, but not loadable; " + _text(fields, fields)
    return "new is " + ", ".join(
        f"{name} {fields.get(name, 'missing')} (known: {nearest_key.get(name, 'missing')})"
        for name in changed
    )


def _changed(fields: Fields, other: Fields) -> list[str]:
    names = dict.fromkeys((*fields, *other))
    return [name for name in names if fields.get(name) != other.get(name)]


def _text(fields: Fields, names: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={fields[name]}" for name in names)
