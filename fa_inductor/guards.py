"""User code that calls FlashAttention-4 itself: under Dynamo the call becomes our op.

Dynamo cannot trace FA4: 4.0.0b36 breaks the graph, and with its fake-mode check patched the
graph holds an empty output and launches no kernel. So Dynamo is told to use substitutes for
`flash_attn.cute.flash_attn_func` and `flash_attn_varlen_func` (`substitutes.py`); eager calls are
left alone. Nothing is imported here: the substitutes are registered once both Dynamo and FA4 have
been imported by somebody.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from . import dynamo_compat, substitutes
from .target import TESTED_LIBRARIES, installed_libraries

log = logging.getLogger("fa_inductor")

_FA4 = "flash_attn.cute.interface"
_AWAITED = ("torch._dynamo", _FA4)
_MAKE = {
    "flash_attn_func": substitutes.make_flash_attn_func,
    "flash_attn_varlen_func": substitutes.make_flash_attn_varlen_func,
}


def install() -> None:
    """Arrange for FA4's functions to be substituted in graphs. Idempotent and cheap.

    Nothing can be done before both Dynamo and FA4 are there, so whichever is missing is awaited.
    """
    if not _substitute_when_both_are_imported():
        for name in _AWAITED:
            if name not in sys.modules:
                sys.meta_path.insert(0, _ImportHook(name))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Calls `_substitute_when_both_are_imported` once one module has been imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        if found is None or found.loader is None:
            return found
        run = found.loader.exec_module

        def exec_and_substitute(module: ModuleType) -> None:
            run(module)
            _imported.add(fullname)
            _substitute_when_both_are_imported()

        found.loader.exec_module = exec_and_substitute  # type: ignore[method-assign]
        return found


# Modules whose code has run to its end, as told by the hooks.
_imported: set[str] = set()
_substituted: list[Callable[..., Any]] = []


def _substitute_when_both_are_imported() -> bool:
    if not all(map(_is_imported, _AWAITED)):
        return False
    if not _substituted:
        _substitute(sys.modules[_FA4])
    return True


def _is_imported(name: str) -> bool:
    """Whether a module is there and complete; `sys.modules` also has those under way."""
    if name in _imported:
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _substitute(interface: ModuleType) -> None:
    # Whatever is not substituted must break the graph, not be traced into.
    dynamo_compat.never_trace_module(_FA4.rpartition(".")[0])
    for name, make in _MAKE.items():
        original = getattr(interface, name)
        dynamo_compat.never_compile(original)
        substitute = make(original)
        _substituted.append(substitute)
        if _parameters(original) == _parameters(substitute):
            dynamo_compat.substitute_in_graphs(original, substitute)
        else:
            log.warning(
                "%s of this FlashAttention-4 (%s) has other arguments than %s; "
                "calls of it break the graph.",
                name,
                installed_libraries()["flash-attn-4"],
                TESTED_LIBRARIES["flash-attn-4"],
            )


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)
