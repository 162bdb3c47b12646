"""Every exception that fa_inductor raises on purpose.

Each message names the value that was given, the limit it met, and what to do about it.
All of them derive from `FaInductorError` and from the built-in class that a caller would
expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FaInductorError(Exception):
    """Base class of all errors raised by fa_inductor."""


class OptionError(FaInductorError, ValueError):
    """An option of the backend has an unknown name or an impossible value."""


class UnknownKernelError(OptionError):
    """A kernel name that no built-in kernel and no plugin carries."""


class UnknownTargetError(FaInductorError, ValueError):
    """A target architecture that fa_inductor cannot plan for."""


class MissingLibraryError(FaInductorError, ImportError):
    """A kernel library is needed now and is not installed."""


class ShapeError(FaInductorError, ValueError):
    """Tensor sizes that do not form an attention problem."""


class DtypeError(FaInductorError, TypeError):
    """Tensor dtypes that a kernel cannot take."""


class DeviceError(FaInductorError, ValueError):
    """Tensors on a device that a kernel cannot take, or on several devices."""


class DerivativeError(FaInductorError, NotImplementedError):
    """A derivative that the attention ops do not have; raised instead of a wrong number."""


class PlanError(FaInductorError, RuntimeError):
    """cuDNN has no plan for an attention, or a plan was declared for other tensors."""


class CaptureError(FaInductorError, RuntimeError):
    """Something would have to be built while a CUDA graph is captured."""


class JitError(FaInductorError, RuntimeError):
    """`fa.on_jit="error"` and a kernel would be compiled, or a plan built, now."""


class CompileOnlyError(FaInductorError, RuntimeError):
    """Compile-only mode is used in a way that it cannot be."""


class BundleError(FaInductorError, ValueError):
    """A bundle that was made for another GPU or other versions, or that is damaged."""


class FallbackError(FaInductorError, RuntimeError):
    """`fa.on_fallback="error"` and at least one site was left to PyTorch."""


class NumericsError(FaInductorError, ArithmeticError):
    """What `fa.guard` saw was wrong, and `fa.on_guard` is "error"."""


class CoverageError(FaInductorError, AssertionError):
    """`Report.assert_coverage` or `Report.assert_no_graph_breaks` did not hold."""


class ProbeError(FaInductorError, AssertionError):
    """`ProbeResult.assert_right` did not hold."""


class AdapterError(FaInductorError, RuntimeError):
    """A private PyTorch interface that `torch_compat` adapts is no longer there."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the known name closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
