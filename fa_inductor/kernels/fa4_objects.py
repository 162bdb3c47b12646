"""FA4's compile caches, backed by a directory (`object_cache.py`).

FA4 looks into `<function>.compile_cache`, compiles what is missing, and puts it there. Each of
these caches is replaced by one that looks into the directory too; and FA4's name for `cute.compile`
by one that compiles under the key's lock and keeps the object. FA4's own calls are served as well.

FA4 has a cache on disk itself, off by default. It is not shared safely: several of its keys lack
the architecture, and none has the number of SMs (flash-attn-4 4.0.0b36, `cache_utils.py`).
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import logging
import os
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import jit_monitor, object_cache
from ..object_store import Store

log = logging.getLogger("fa_inductor")

SYMBOL = "func"  # of the kernel in its object file
_LIBRARIES = ("flash-attn-4", "nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels")
_KNOBS = ("CUTE_DSL_", "FLASH_ATTENTION_", "FA_")
_NOT_KNOBS = (  # part of the store's name, of each key, or without effect on what is compiled
    *("CUTE_DSL_ARCH", "FLASH_ATTENTION_ARCH", "FLASH_ATTENTION_NUM_SMS", "FA_LOG_LEVEL"),
    *("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"),
    *("CUTE_DSL_CACHE_DIR", "CUTE_DSL_DISABLE_FILE_CACHING"),
)


class KernelCache:
    """In place of one of FA4's compile caches, `inner`.

    name: the FA4 function that it belongs to. store: None to keep nothing on disk.
    """

    def __init__(self, name: str, inner: Any, owner: Any, store: Store | None) -> None:
        self.name, self.inner, self.owner, self.store = name, inner, owner, store

    def __contains__(self, key: Any) -> bool:
        if key in self.inner.cache:
            jit_monitor.count("hits")
            return True
        text = canonical(key)
        if self.store is not None and text is not None:
            path = self.store.find(self.name, text)
            if path is not None:
                self.inner.cache[key] = load(path)
                jit_monitor.count("loads")
                return True
        if key in self.inner:  # from FA4's own directory
            jit_monitor.count("loads")
            return True
        _missing.here = (self, key, text)
        return False

    def __getitem__(self, key: Any) -> Any:
        return self.inner[key]

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.inner[key] = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def build(self, key: Any, text: str | None, compile_kernel: Callable[[], Any]) -> Any:
        """The kernel for a key that is missing: from another process that was faster, or new."""
        if self.store is None or text is None:
            return self._compiled(key, text, compile_kernel)[0]
        with self.store.building(self.name, text) as made:
            if made is not None:
                kernel = load(made)
                jit_monitor.count("loads")
                return kernel
            kernel, seconds = self._compiled(key, text, compile_kernel)
            self.store.add(
                self.name, text, self.fields(key), seconds, functools.partial(export, kernel)
            )
            return kernel

    def _compiled(
        self, key: Any, text: str | None, compile_kernel: Callable[[], Any]
    ) -> tuple[Any, float]:
        jit_monitor.about_to(f"FA4 compiles {self.name}", self.fields(key), self._known)
        started = time.perf_counter()
        kernel = compile_kernel()
        seconds = time.perf_counter() - started
        jit_monitor.count("compiles")
        jit_monitor.count("compile_seconds", seconds)
        return kernel, seconds

    def fields(self, key: Any) -> dict[str, str]:
        """The key as text, by the names that FA4's source has for its parts."""
        parts = key if isinstance(key, tuple) else (key,)
        names = key_names(self.owner, len(parts))
        return {name: canonical(part) or str(part) for name, part in zip(names, parts, strict=True)}

    def _known(self) -> list[jit_monitor.Fields]:
        kept = [] if self.store is None else [e.fields for e in self.store.entries(self.name)]
        return [*map(self.fields, list(self.inner.cache)), *kept]


class _Missing(threading.local):
    """The key that this thread has just not found, until FA4 compiles for it."""

    here: tuple[KernelCache, Any, str | None] | None = None


_missing = _Missing()


class _Cute:
    """FA4's name for the module `cutlass.cute`: that, but for `compile`."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        missing, _missing.here = _missing.here, None
        if missing is None:
            return self._module.compile(*args, **kwargs)
        cache, key, text = missing
        return cache.build(key, text, lambda: self._module.compile(*args, **kwargs))


def install(interface: Any) -> None:
    """Replace the compile caches of `flash_attn.cute.interface`; once is enough."""
    if isinstance(interface.cute, _Cute):
        return
    store = object_cache.store("fa4", environment(interface)) if object_cache.is_on() else None
    for name, function in list(vars(interface).items()):
        inner = getattr(function, "compile_cache", None)
        if hasattr(inner, "cache"):
            function.compile_cache = KernelCache(name.strip("_"), inner, function, store)
    interface.cute = _Cute(interface.cute)


def export(kernel: Any, path: Path) -> None:
    """Write a compiled kernel to an object file."""
    kernel.export_to_c(object_file_path=str(path), function_name=SYMBOL)


def load(path: Path) -> Any:
    """A compiled kernel from its object file."""
    import cutlass.cute as cute

    return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), SYMBOL)


# --- Keys -----------------------------------------------------------------------------------------


def canonical(key: Any) -> str | None:
    """A key as text that is the same in every process and Python version; None for one with a
    part of which that is not known."""
    if key is None or type(key) in (bool, int, float, str):
        return repr(key)
    if isinstance(key, tuple):
        parts = [canonical(part) for part in key]
        return None if None in parts else "({})".format(", ".join(part or "" for part in parts))
    if isinstance(key, torch.dtype):
        return str(key)
    if isinstance(key, enum.Enum):
        return f"{type(key).__qualname__}.{key.name}"
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    return None


@functools.cache
def key_names(function: Any, count: int) -> Sequence[str]:
    """What FA4's source calls the `count` parts of a function's compile key."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_key"):
            value = node.value
            parts = value.elts if isinstance(value, ast.Tuple) else [value]
            names = [" ".join(ast.unparse(part).split()) for part in parts]
            if len(names) == count == len(set(names)):
                return names
    return [f"part {number}" for number in range(count)]


# --- What objects depend on beside their keys -----------------------------------------------------


def environment(interface: Any) -> dict[str, str]:
    """Architecture, SMs, versions, sources, and variables that FA4 and CuTe compile by."""
    import cutlass

    number = interface._get_device_arch()
    arch = os.environ.get("CUTE_DSL_ARCH") or f"sm_{number}" + ("a" if number >= 90 else "")
    known = {"arch": arch, "fa4_arch": str(number), "sms": _sms()}
    known["cuda"] = str(cutlass.CUDA_VERSION.major)
    for library in _LIBRARIES:
        known[library] = _version(library)
    known["fa4_sources"] = _digest(Path(interface.__file__).parent)
    known["fa_inductor_sources"] = object_cache.sources()
    for name, value in sorted(os.environ.items()):
        is_ours = name.startswith("FA_INDUCTOR_")
        if name.startswith(_KNOBS) and name not in _NOT_KNOBS and not is_ours:
            known[name] = value
    return known


def _sms() -> str:
    named = os.environ.get("FLASH_ATTENTION_NUM_SMS")
    return named or str(torch.cuda.get_device_properties("cuda").multi_processor_count)


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
