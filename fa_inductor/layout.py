"""Which inputs a kernel library can only read through a copy, and why."""

from __future__ import annotations

from . import symbolic
from .spec import AttentionSpec, TensorSpec

ALIGNMENT = 16  # bytes; TMA loads and 128-bit vector loads


def copy_reason(tensor: TensorSpec, itemsize: int) -> str | None:
    """Why FA4 has to copy `tensor` before it can read it, or None.

    FA4 4.0.0b36 (`flash_attn/cute/cute_dsl_utils.py`, `maybe_contiguous`): the pointer and,
    unless the tensor is contiguous in (B, S, H, D), every stride but the innermost must be a
    multiple of 16 bytes, and the innermost stride must be 1. Pointers are judged by their
    storage offset, as a fresh allocation is always aligned. A symbolic stride that cannot be
    proven to be a multiple counts as one that is.
    """
    if _breaks(tensor.storage_offset, itemsize):
        return f"storage offset {symbolic.text(tensor.storage_offset)} elements"
    if is_contiguous_bshd(tensor):
        return None
    if not symbolic.same(tensor.stride[-1], 1):
        return f"innermost stride {symbolic.text(tensor.stride[-1])}"
    for stride in tensor.stride[:-1]:
        if _breaks(stride, itemsize):
            return f"stride {symbolic.text(stride)} elements, not a multiple of {ALIGNMENT} bytes"
    return None


def copies(spec: AttentionSpec, kernel: str | None) -> dict[str, str]:
    """Inputs that `kernel` will copy on each call: name -> reason."""
    if kernel != "fa4":
        return {}
    found = {}
    for name in ("q", "k", "v"):
        tensor: TensorSpec = getattr(spec, name)
        if reason := copy_reason(tensor, spec.dtype.itemsize):
            found[name] = reason
    return found


def _breaks(stride: symbolic.Dim, itemsize: int) -> bool:
    return symbolic.is_static(stride) and symbolic.as_int(stride) * itemsize % ALIGNMENT != 0


def is_contiguous_bshd(tensor: TensorSpec) -> bool:
    """Whether a (B, H, S, D) tensor is provably contiguous as (B, S, H, D)."""
    expected: symbolic.Dim = 1
    for dim in (3, 1, 2, 0):
        if not symbolic.same(tensor.shape[dim], 1):
            if not symbolic.same(tensor.stride[dim], expected):
                return False
            expected = expected * tensor.shape[dim]
    return True
