"""All that a cold start would compile, in one file: for a container image.

A bundle is a zip of compiled kernels for one or more GPUs, cuDNN's plans that were built on a GPU,
the digest of the measured times that choices were made by, and what
`torch.compiler.save_cache_artifacts()` gives: what PyTorch has compiled in this process, so `save`
belongs at the end of a run that has trained a step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from .. import __version__, object_cache
from ..errors import BundleError
from ..object_store import Entry, beside

log = logging.getLogger("fa_inductor")

_CONTENTS = "bundle.json"
_ARTIFACTS = "torch_artifacts"
_FORMAT = 1


@dataclass(frozen=True)
class Bundled:
    """What a bundle holds, or what of it was loaded. stores: their names."""

    stores: tuple[str, ...]
    objects: int
    has_artifacts: bool

    def __str__(self) -> str:
        artifacts = "with" if self.has_artifacts else "without"
        return (
            f"{self.objects} kernels and plans for {', '.join(self.stores)}, {artifacts} what "
            "PyTorch has compiled"
        )


def save(file: Path, target: str | None = None) -> Bundled:
    """Write the kernels in the cache, those of one architecture or of all, to `file`.

    Raises `BundleError` when there are none.
    """
    stores = [s for s in object_cache.stores() if target in (None, s.environment["arch"])]
    entries = [(store, entry) for store in stores for entry in store.entries() if entry.is_intact]
    if not entries:
        raise BundleError(f"there are no kernels in {object_cache.root()}: warm some first.")
    artifacts = torch.compiler.save_cache_artifacts()
    digests = {}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:

        def put(path: Path) -> None:
            name = path.relative_to(object_cache.root()).as_posix()
            data = path.read_bytes()
            digests[name] = hashlib.sha256(data).hexdigest()
            made.writestr(name, data)

        for store in {store.folder: store for store, _ in entries}.values():
            put(store.folder / "environment.json")
        for _, entry in entries:
            put(entry.path)
            put(entry.path.with_suffix(".json"))
        for table in sorted((Path(__file__).parents[1] / "data").glob("*.json")):
            name = f"data/{table.name}"
            digests[name] = hashlib.sha256(table.read_bytes()).hexdigest()
        if artifacts is not None:
            made.writestr(_ARTIFACTS, artifacts[0])
            digests[_ARTIFACTS] = hashlib.sha256(artifacts[0]).hexdigest()
        contents = {
            "format": _FORMAT,
            "fa_inductor": __version__,
            "torch": torch.__version__,
            "files": digests,
            "environments": {s.folder.name: dict(s.environment) for s in stores},
        }
        made.writestr(_CONTENTS, json.dumps(contents, indent=1))
    names = tuple(sorted({store.folder.name for store, _ in entries}))
    return Bundled(names, len(entries), artifacts is not None)


def load(file: Path, expected: dict[str, str] | None = None) -> Bundled:
    """Unpack a bundle into the cache, and hand PyTorch its artifacts.

    expected: what this machine's kernels depend on (`fa4_objects.environment`); None on a machine
        that only unpacks, where versions are compared when a kernel is looked for.
    Raises `BundleError` for a file that is damaged, or that has no kernels for what is expected,
    naming what differs.
    """
    try:
        with zipfile.ZipFile(file) as packed:
            contents = _checked(packed, file)
            if expected is not None:
                _compare(contents["environments"], expected, file)
            objects = 0
            for name in contents["files"]:
                if name == _ARTIFACTS or name.startswith("data/"):
                    continue
                _unpack(packed, name, object_cache.root())
                objects += name.endswith(".o")
            artifacts = packed.read(_ARTIFACTS) if _ARTIFACTS in contents["files"] else None
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{file} is no bundle, or a damaged one: {error}") from error
    if artifacts is not None and contents["torch"] != torch.__version__:
        log.warning(
            "%s has what PyTorch %s has compiled, which this one, %s, does not load",
            *(file, contents["torch"], torch.__version__),
        )
        artifacts = None
    if artifacts is not None:
        torch.compiler.load_cache_artifacts(artifacts)
    return Bundled(tuple(contents["environments"]), objects, artifacts is not None)


def _checked(packed: zipfile.ZipFile, file: Path) -> dict:  # type: ignore[type-arg]
    contents = json.loads(packed.read(_CONTENTS))
    if contents["format"] != _FORMAT:
        raise BundleError(f"{file} has format {contents['format']}, this version reads {_FORMAT}.")
    tables = Path(__file__).parents[1] / "data"
    for name, digest in contents["files"].items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BundleError(f"{file} wants to write to {name}.")
        if name.startswith("data/"):
            ours = tables / PurePosixPath(name).name
            data = ours.read_bytes() if ours.exists() else b""
            if hashlib.sha256(data).hexdigest() != digest:
                raise BundleError(f"{file} was made with other measured times ({ours.name}).")
            continue
        if hashlib.sha256(packed.read(name)).hexdigest() != digest:
            raise BundleError(f"{file} is damaged: {name} is not what was saved.")
    return contents  # type: ignore[no-any-return]


def _compare(environments: dict[str, dict[str, str]], expected: dict[str, str], file: Path) -> None:
    """Of FA4's stores, if there are any, one must be for just what is expected."""
    found = [env for name, env in environments.items() if name.startswith("fa4-")]
    if expected in found or not found:
        return
    closest = min(found, key=lambda env: len(_differences(env, expected)))
    raise BundleError(
        f"{file} has no kernels for this machine: " + ", ".join(_differences(closest, expected))
    )


def _differences(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    return [
        f"{name} {theirs.get(name)} (here {ours.get(name)})"
        for name in dict.fromkeys((*theirs, *ours))
        if theirs.get(name) != ours.get(name)
    ]


def _unpack(packed: zipfile.ZipFile, name: str, root: Path) -> None:
    """Objects before their `.json`, as `object_store` writes them; what is intact stays."""
    path = root / name
    if name.endswith(".json") or path.suffix == ".o":
        entry = Entry.read(path.with_suffix(".o"))
        if entry is not None and entry.is_intact:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    made = beside(path)
    made.write_bytes(packed.read(name))
    made.replace(path)
