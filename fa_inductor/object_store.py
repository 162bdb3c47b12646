"""Compiled kernels as files in one directory: written whole or not at all, checked when read.

An object is `<name>/<digest of its key>.o` and beside it `.json`, which says what the object is and
what its bytes hash to. The `.json` is written last: without it the object does not exist. Readers
take no lock, so a directory that cannot be written to serves as well. A writer compiles under the
key's lock, which ends with its process, and others that wait for it find the object made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

log = logging.getLogger("fa_inductor")

QUARANTINE = "quarantine"


@dataclass(frozen=True)
class Entry:
    """One object: its file, and what the `.json` beside it says.

    name: of the cache that it belongs to. fields: its key, as text. digest: SHA-256 of the file.
    seconds: what compiling it took. created: seconds since 1970.
    """

    path: Path
    name: str
    fields: Mapping[str, str]
    digest: str
    seconds: float
    created: float

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def last_used(self) -> float:
        """Seconds since 1970."""
        return self.path.stat().st_mtime

    @property
    def is_intact(self) -> bool:
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest() == self.digest
        except FileNotFoundError:
            return False

    @staticmethod
    def read(path: Path) -> Entry | None:
        """The entry of the object file `path`; None if there is none, or none that can be read."""
        try:
            said = json.loads(path.with_suffix(".json").read_text())
            return Entry(
                path, said["name"], said["fields"], said["digest"], said["seconds"], said["created"]
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return Entry(path, path.parent.name, {}, "", 0.0, 0.0)  # damaged: never intact


class Store:
    """The objects of one kind of GPU and one set of versions.

    folder: need not exist yet. environment: what its objects depend on beside their keys; kept
    in `environment.json` for people and for bundles.
    """

    def __init__(self, folder: Path, environment: Mapping[str, Any]) -> None:
        self.folder, self.environment = folder, environment

    def path(self, name: str, key: str) -> Path:
        """Where the object with this key is, or would be."""
        return self.folder / name / (hashlib.sha256(key.encode()).hexdigest() + ".o")

    def find(self, name: str, key: str) -> Path | None:
        """The object, if it is there and intact. A damaged one is put aside."""
        path = self.path(name, key)
        entry = Entry.read(path)
        if entry is None:
            return None
        if not entry.is_intact:
            with self._locked(path) as is_locked:
                # Another process may have made it anew meanwhile.
                entry = Entry.read(path)
                if entry is None or not entry.is_intact:
                    if is_locked:
                        self.put_aside(path)
                    return None
        with contextlib.suppress(OSError):  # a read-only directory keeps no time of use
            os.utime(path)
        return path

    @contextmanager
    def building(self, name: str, key: str) -> Iterator[Path | None]:
        """Hold the key's lock; yields the object if another process has made it meanwhile."""
        path = self.path(name, key)
        with self._locked(path):
            entry = Entry.read(path)
            yield path if entry is not None and entry.is_intact else None

    def add(
        self,
        name: str,
        key: str,
        fields: Mapping[str, str],
        seconds: float,
        write: Callable[[Path], Any],
    ) -> bool:
        """Keep an object that `write(path)` writes; False where the directory takes none."""
        path = self.path(name, key)
        made = beside(path, ".o")
        try:
            self._ensure(path.parent)
            write(made)
            data = made.read_bytes()
            said = {
                "name": name,
                "fields": dict(fields),
                "digest": hashlib.sha256(data).hexdigest(),
                "seconds": round(seconds, 3),
                "created": time.time(),
            }
            path.with_suffix(".json").unlink(missing_ok=True)
            os.replace(made, path)
            _write(path.with_suffix(".json"), json.dumps(said, indent=1))
        except OSError as error:
            log.info("compiled kernels are not kept in %s: %s", self.folder, error)
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
            return False
        return True

    def put_aside(self, path: Path) -> None:
        """Move a damaged object out of the way."""
        aside = self.folder / QUARANTINE
        with contextlib.suppress(OSError):
            aside.mkdir(exist_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
            os.replace(path, aside / f"{path.parent.name}-{path.name}")
            log.warning("a damaged kernel was put aside: %s", aside / path.name)

    def entries(self, name: str = "*") -> Iterator[Entry]:
        """All objects, or those of one cache."""
        for said in sorted(self.folder.glob(f"{name}/*.json")):
            entry = Entry.read(said.with_suffix(".o"))
            if entry is not None:
                yield entry

    def remove(self, path: Path) -> None:
        """Remove an object; its lock stays, others may wait for it."""
        path.with_suffix(".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _ensure(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        said = self.folder / "environment.json"
        if not said.exists():
            _write(said, json.dumps(dict(self.environment), indent=1, sort_keys=True))

    @contextmanager
    def _locked(self, path: Path) -> Iterator[bool]:
        """The lock of one object; without it where the directory cannot be written to."""
        try:
            self._ensure(path.parent)
            lock = FileLock(path.with_suffix(".lock"))
            lock.acquire()
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def beside(path: Path, suffix: str = "") -> Path:
    """A name that no other thread, process or host takes."""
    return path.with_name(f".{path.stem}.{uuid.uuid4().hex}{suffix}")


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    made = beside(path)
    made.write_text(text)
    os.replace(made, path)
