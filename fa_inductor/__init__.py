"""fa_inductor: attention in compiled PyTorch graphs on the fastest kernel that is right for it.

`torch.compile(model, backend="fa_inductor")` needs no import; importing this module also makes
user code that calls FlashAttention-4 itself compile without graph breaks (`guards.py`).
"""

from __future__ import annotations

from . import guards, mask_blocks, masked_ops, ops, packed_ops  # noqa: F401  (register the ops)
from .config import Config
from .errors import FaInductorError
from .jit_monitor import Stats, on_jit, stats
from .spec import AttentionSpec

__version__ = "0.1.0"

# These need Inductor's or Dynamo's modules, which cost seconds: imported on first use.
_LAZY = {
    "register": "backend",
    "unregister": "backend",
    "enabled": "backend",
    "explain": "explaining",
    "Report": "report",
    "collecting": "report",
    "warm": "warming.warm",
    "compile_only": "warming.compile_only",
    "is_compile_only": "warming.compile_only",
    "use_kernel_cache": "kernels.fa4",
    "probe": "probing.probe",
}

__all__ = [
    "AttentionSpec",
    "Config",
    "FaInductorError",
    "Stats",
    "__version__",
    "on_jit",
    "stats",
    *_LAZY,
]


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'fa_inductor' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


guards.install()
