"""Which inputs a kernel library can only read through a copy, and why."""

from __future__ import annotations

from torch import Tensor

from . import symbolic
from .spec import AttentionSpec, TensorSpec

ALIGNMENT = 16  # bytes; TMA loads and 128-bit vector loads
# Kernels that read through TMA; `reference` and plugins read any strides.
ALIGNED_KERNELS = ("fa4", "cudnn")


def copy_reason(tensor: TensorSpec, itemsize: int) -> str | None:
    """Why a (B, H, S, D) tensor has to be copied before FA4 or cuDNN can read it, or None.

    FA4 4.0.0b36 (`flash_attn/cute/cute_dsl_utils.py`, `maybe_contiguous`) and cuDNN (its
    developer guide on attention): the pointer and every stride but the innermost must be a
    multiple of 16 bytes, and the innermost stride must be 1. Pointers are judged by their storage
    offset, as a fresh allocation is always aligned. A symbolic stride that cannot be proven to be
    a multiple counts as one that is.
    """
    if _breaks(tensor.storage_offset, itemsize):
        return f"storage offset {symbolic.text(tensor.storage_offset)} elements"
    return stride_reason(tensor, itemsize)


def stride_reason(tensor: TensorSpec, itemsize: int) -> str | None:
    """`copy_reason` without the pointer."""
    if is_contiguous_bshd(tensor):
        return None
    last = tensor.stride[-1]
    if not symbolic.same(last, 1) and not symbolic.same(tensor.shape[-1], 1):
        return f"innermost stride {symbolic.text(last)}"
    for size, stride in zip(tensor.shape[:-1], tensor.stride[:-1], strict=True):
        if _breaks(stride, itemsize) and not symbolic.same(size, 1):
            return f"stride {symbolic.text(stride)} elements, not a multiple of {ALIGNMENT} bytes"
    return None


def bias_reason(bias: TensorSpec, keys: symbolic.Dim, itemsize: int) -> str | None:
    """Why cuDNN has to copy a (B or 1, Hq or 1, Sq or 1, Sk or 1) bias, or None.

    Its innermost stride must be 1 (measured on an H200, cuDNN 9.19; other strides may be any),
    its pointer a multiple of 16 bytes.
    """
    if _breaks(bias.storage_offset, itemsize):
        return f"storage offset {symbolic.text(bias.storage_offset)} elements"
    if symbolic.same(keys, 1):
        return None
    if symbolic.same(bias.shape[3], 1) or not symbolic.same(bias.stride[3], 1):
        last = 0 if symbolic.same(bias.shape[3], 1) else bias.stride[3]
        return f"innermost stride {symbolic.text(last)}"
    return None


def copies(spec: AttentionSpec, kernel: str | None) -> dict[str, str]:
    """Inputs that `kernel` will copy on each call: name -> reason."""
    if kernel not in ALIGNED_KERNELS:
        return {}
    reasons = {n: copy_reason(getattr(spec, n), spec.dtype.itemsize) for n in ("q", "k", "v")}
    is_read = kernel == "cudnn" and spec.bias is not None
    if is_read and spec.bias is not None and spec.bias.dtype.is_floating_point:
        reasons["bias"] = bias_reason(spec.bias, spec.lengths[1], spec.bias.dtype.itemsize)
    return {name: reason for name, reason in reasons.items() if reason}


def _breaks(stride: symbolic.Dim, itemsize: int) -> bool:
    return symbolic.is_static(stride) and symbolic.as_int(stride) * itemsize % ALIGNMENT != 0


def packed_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a real tensor, those of dimensions of size 1 made as if it were packed: such
    a dimension never moves in memory, but libraries look at its stride."""
    strides = list(tensor.stride())
    for dim in reversed(range(tensor.dim())):
        if tensor.shape[dim] == 1:
            last = dim + 1 == tensor.dim()
            strides[dim] = 1 if last else strides[dim + 1] * tensor.shape[dim + 1]
    return tuple(strides)


def is_contiguous_bshd(tensor: TensorSpec) -> bool:
    """Whether a (B, H, S, D) tensor is provably contiguous as (B, S, H, D)."""
    expected: symbolic.Dim = 1
    for dim in (3, 1, 2, 0):
        if not symbolic.same(tensor.shape[dim], 1):
            if not symbolic.same(tensor.stride[dim], expected):
                return False
            expected = expected * tensor.shape[dim]
    return True
