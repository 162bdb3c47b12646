"""The key under which compiled graphs may be cached: whatever could change what they compute."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import torch

from . import torch_compat
from .config import Config
from .patterns import family
from .target import installed_libraries


@functools.cache
def sources() -> str:
    """SHA-256 over the sources of fa_inductor, its measured times, and its patterns."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(family.__file__).parent):
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.json"))):
            digest.update(str(path.relative_to(folder)).encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _machine() -> dict[str, object]:
    """What does not change within a process."""
    arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return {"torch": torch.__version__, "libraries": installed_libraries(), "arch": arch}


def fingerprint(config: Config) -> str:
    """SHA-256 over sources, library versions, GPU architecture, options and SDP flags."""
    state = {
        "sources": sources(),
        **_machine(),
        **dataclasses.asdict(config),
        "sdp_backends": torch_compat.sdp_backends(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True, default=str).encode()).hexdigest()
