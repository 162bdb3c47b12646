"""The one place that touches what is private in Inductor or differs between its versions.

As `torch_compat.py`, which adapts the rest of PyTorch; `tests/test_torch_compat.py` tries both.
Importing this module does not import Inductor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .torch_compat import adapted

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass

# --- Memory ---------------------------------------------------------------------------------


def inductor_allocators() -> tuple[Any, tuple[str, ...]]:
    """(owner, names) of the functions that Inductor's generated code allocates its buffers with;
    looked up when that code is loaded."""
    names = ("_empty_strided_cpu", "_empty_strided_cuda")
    owner = adapted(torch._C._dynamo, "guards")
    for name in names:
        adapted(owner, name)
    return owner, names


# --- Inductor's options -------------------------------------------------------------------


def inductor_compiler(mode: str | None, options: dict[str, Any]) -> Any:
    """The callable that `torch.compile(backend="inductor", mode=…, options=…)` would use.

    It validates the options as PyTorch does, and has `.config` (the patches), `.reset()` and
    `__call__(gm, inputs)`.
    """
    return adapted(torch, "_TorchCompileInductorWrapper")(mode, options, None)


def inductor_option_names() -> list[str]:
    """Names of Inductor's own options."""
    from torch._inductor import config

    return list(config.get_config_copy())


def inductor_cache_dir() -> str:
    """Where Inductor keeps what it has compiled."""
    from torch._inductor.runtime import cache_dir_utils

    return adapted(cache_dir_utils, "cache_dir")()


def cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use on the CPU, or None when there is none."""
    from torch._inductor import cpp_builder, exc

    try:
        return adapted(cpp_builder, "get_cpp_compiler")()
    except adapted(exc, "InvalidCxxCompiler"):
        return None


# --- Inductor's custom passes -------------------------------------------------------------


def custom_passes(value: Any) -> tuple[Any, ...]:
    """The passes in one of Inductor's custom-pass options (None, one pass, list or tuple)."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def pre_grad_takes_list() -> bool:
    """Whether `pre_grad_custom_pass` may be a list (torch >= 2.13) or is one callable (2.11)."""
    from torch._inductor import custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")


@functools.cache
def _pass_classes() -> tuple[type, type]:
    """The two `CustomGraphPass` classes, made on first use so that Inductor loads late."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class GraphPass(CustomGraphPass):  # type: ignore[misc, valid-type]
        def __init__(self, run: Callable[[Any], None], uuid: Callable[[], Any]) -> None:
            self.run, self.get_uuid = run, uuid

        def __call__(self, graph: torch.fx.Graph) -> None:
            self.run(graph)

        def uuid(self) -> Any:
            return self.get_uuid()

        def __reduce__(self) -> Any:
            return graph_pass, (self.run, self.get_uuid)

    class CacheKeyPass(CustomGraphPass):  # type: ignore[misc, valid-type]
        """Does what the passes in `inner` do, and adds `key` to their cache key."""

        def __init__(self, key: str, inner: tuple[Any, ...]) -> None:
            self.key, self.inner = key, inner

        def __call__(self, graph: torch.fx.Graph) -> None:
            for inner in self.inner:
                inner(graph)

        def uuid(self) -> Any:
            keys = [inner.uuid() if hasattr(inner, "uuid") else None for inner in self.inner]
            # A pass without a key must keep switching the cache off, as it does alone.
            return (self.key, *keys) if all(keys) else None

        def __reduce__(self) -> Any:
            return cache_key_pass, (self.key, self.inner)

    return GraphPass, CacheKeyPass


def graph_pass(run: Callable[[Any], None], uuid: Callable[[], Any]) -> CustomGraphPass:
    """A `CustomGraphPass` that runs `run(graph)` and is keyed by `uuid()`."""
    return _pass_classes()[0](run, uuid)


def cache_key_pass(key: str, inner: Any = None) -> CustomGraphPass:
    """A pass that changes nothing beyond what `inner` does, but puts `key` into cache keys."""
    return _pass_classes()[1](key, custom_passes(inner))
