"""Where compiled kernels are kept: one `Store` for each kind of GPU and set of versions.

Under `FA_INDUCTOR_CACHE_DIR`, or `fa_inductor` in Inductor's cache directory. `FA_INDUCTOR_CACHE=0`
keeps nothing. A store's name starts with the GPU's architecture and number of SMs, which compiled
kernels depend on and their keys do not always say.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import inductor_compat
from .object_store import QUARANTINE, Entry, Store

DIRECTORY = "FA_INDUCTOR_CACHE_DIR"
SWITCH = "FA_INDUCTOR_CACHE"

_ABANDONED = 3600.0  # seconds after which nobody is still writing a file


def root() -> Path:
    """The directory of all stores."""
    named = os.environ.get(DIRECTORY)
    return Path(named) if named else Path(inductor_compat.inductor_cache_dir()) / "fa_inductor"


def is_on() -> bool:
    """Whether compiled kernels are kept at all."""
    return os.environ.get(SWITCH, "1") != "0"


def store(kernel: str, environment: Mapping[str, str]) -> Store:
    """The store for a kernel's objects.

    environment: all that they depend on beside their keys, "arch", "sms" and "cuda" among it.
    """
    text = json.dumps(dict(environment), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = "{}-{arch}-{sms}sms-cuda{cuda}-{}".format(kernel, digest, **environment)
    return Store(root() / name, environment)


@functools.cache
def sources() -> str:
    """SHA-256 over those sources of ours that decide what a kernel is compiled from; how launches
    are repeated does not."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    kernels = (path for path in (here / "kernels").glob("fa4*.py") if path.stem != "fa4_launch")
    for path in (*sorted(kernels), here / "mask_text.py"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def stores() -> Iterator[Store]:
    """All stores there are."""
    for said in sorted(root().glob("*/environment.json")):
        yield Store(said.parent, json.loads(said.read_text()))


@dataclass(frozen=True)
class Removed:
    """What `prune` has removed."""

    objects: int
    bytes: int


def prune(max_bytes: int | None = None, max_days: float | None = None) -> Removed:
    """Remove objects not used for `max_days`, then the longest unused ones until all stores
    together have at most `max_bytes`; and what was put aside or left half written."""
    found = [(store, entry) for store in stores() for entry in store.entries()]
    found.sort(key=lambda pair: pair[1].last_used)
    total = sum(entry.size for _, entry in found)
    oldest = float("-inf") if max_days is None else time.time() - max_days * 86400
    objects = removed = 0
    for store_of, entry in found:
        is_too_much = max_bytes is not None and total - removed > max_bytes
        if entry.last_used >= oldest and not is_too_much:
            continue
        size = entry.size
        store_of.remove(entry.path)
        objects, removed = objects + 1, removed + size
    for store_of in stores():
        for path in (store_of.folder / QUARANTINE).glob("*"):
            path.unlink(missing_ok=True)
        for path in store_of.folder.glob("*/.*"):  # a killed process was writing it
            if path.stat().st_mtime < time.time() - _ABANDONED:
                path.unlink(missing_ok=True)
    return Removed(objects, removed)


def verify() -> tuple[list[Entry], list[Entry]]:
    """(intact, damaged) objects of all stores; the damaged ones are put aside."""
    intact: list[Entry] = []
    damaged: list[Entry] = []
    for store_of in stores():
        for entry in store_of.entries():
            if entry.is_intact:
                intact.append(entry)
            else:
                damaged.append(entry)
                store_of.put_aside(entry.path)
    return intact, damaged
