"""cuDNN's built plans on disk, in the directory of `object_cache.py`.

A plan is kept as cudnn-frontend serialises it: the kernels that were chosen, the constants, and
which tensors it reads and writes. It belongs to one kind of GPU and one version of cuDNN.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .. import jit_monitor, object_cache
from ..object_store import Store
from ..target import Target
from . import cudnn_graph
from .cudnn_graph import Description, Plan

log = logging.getLogger("fa_inductor")

CAPACITY = 1024  # forward, and as many backward: where lengths vary, each step has new ones


def plan_of(description: Description, handle: int, build: Callable[[], Plan]) -> Plan:
    """The plan that is kept for a description, or the one that `build` makes, which then is.

    Raises what `build` raises.
    """
    if not object_cache.is_on():
        return build()
    store, key = _store(description.device, description.version), _key(description)
    path = store.find(description.kind, key)
    if path is None:
        with store.building(description.kind, key) as path:
            if path is None:
                return _built(description, store, key, build)
    return _read(path, description, handle) or build()


def _built(description: Description, store: Store, key: str, build: Callable[[], Plan]) -> Plan:
    started = time.perf_counter()
    plan = build()
    seconds = time.perf_counter() - started
    if sum(1 for _ in store.folder.glob(f"{description.kind}/*.o")) >= CAPACITY:
        log.info("%s has %d plans and takes no more: fa-inductor cache prune", store, CAPACITY)
        return plan
    data = plan.serialized()
    store.add(
        description.kind, key, description.fields, seconds, lambda path: path.write_bytes(data)
    )
    return plan


def _read(path: Path, description: Description, handle: int) -> Plan | None:
    """None for one that cuDNN does not take back."""
    refused = (cudnn_graph.library().cudnnGraphNotSupportedError, RuntimeError)
    try:
        plan = cudnn_graph.deserialized(description, handle, path.read_bytes())
    except refused as error:
        log.warning("cuDNN does not take back the plan in %s, and builds it: %s", path, error)
        return None
    jit_monitor.count("plan_loads")
    return plan


def _key(description: Description) -> str:
    """All that a plan depends on beside what the store's name says."""
    said = description.fields
    del said["device"], said["version"]
    return repr(sorted(said.items())) + repr([each.name for each in description.operands])


@functools.cache
def _store(device: int, version: int) -> Store:
    target = _target(device)
    environment = {
        "arch": target.arch,
        "sms": str(target.sm_count),
        "cuda": (torch.version.cuda or "").split(".")[0],
        "cudnn": str(version),
        "nvidia-cudnn-frontend": importlib.metadata.version("nvidia-cudnn-frontend"),
        "fa_inductor_sources": _digest(cudnn_graph.__file__),
    }
    return object_cache.store("cudnn", environment)


def _target(device: int) -> Target:
    return Target.of_device(torch.device("cuda", device))


def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
