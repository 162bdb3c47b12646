"""FlashAttention-4 (`flash_attn.cute`), CuTe-DSL kernels for Hopper and Blackwell.

FA4 works on (B, S, H, D); the transposes here are views, so it sees the tensors' real strides.
Its Python entries cost several times what their launches do, so the launches are remembered
(`fa4_launch.py`) and repeated for the same metadata.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, MissingLibraryError, ShapeError
from ..target import TESTED_LIBRARIES
from .fa4_launch import LaunchCache


@functools.cache
def _interface() -> Any:
    try:
        from flash_attn.cute import interface
    except ImportError as missing:
        raise MissingLibraryError(
            f"Kernel fa4 needs {missing.name or 'flash_attn.cute'}: "
            f"pip install flash-attn-4=={TESTED_LIBRARIES['flash-attn-4']} "
            "'nvidia-cutlass-dsl[cu13]>=4.8.1' triton"
        ) from missing
    return interface


_launches = LaunchCache()


def _check(q: Tensor, v: Tensor) -> None:
    """The limits that hold on every GPU, as errors for people; FA4 itself only asserts."""
    if not q.is_cuda:
        raise DeviceError(f"Kernel fa4 runs on CUDA tensors, got tensors on {q.device}.")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise DtypeError(f"Kernel fa4 takes float16 and bfloat16, got {q.dtype}.")
    for dim in (q.shape[3], v.shape[3]):
        if dim % 8 or not 8 <= dim <= 256:
            raise ShapeError(f"Kernel fa4 takes head dims 8, 16, ... 256, got {dim}.")


def _bshd(*tensors: Tensor) -> list[Tensor]:
    """(B, H, S, D) tensors as FA4 takes them, without their autograd history."""
    return [(t.detach() if t.requires_grad else t).transpose(1, 2) for t in tensors]


def _key(tensors: Sequence[Tensor], *flags: Hashable) -> Hashable:
    """All metadata that FA4 decides by."""
    layout = [(tensor.shape, tensor.stride()) for tensor in tensors]
    return (*flags, tensors[0].dtype, tensors[0].device, *layout)


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: str
) -> None:
    """See `fa_inductor.kernels`. `out` may have any dimension order with D innermost."""
    tensors = [*_bshd(q, k, v, out), lse]
    key = _key(tensors, scale, causal)
    if _launches.repeat(key, tensors):
        return
    _check(q, v)
    entry = _interface()._flash_attn_fwd
    with _launches.recording((entry,), key, tensors):
        entry(
            *tensors[:3],
            softmax_scale=scale,
            causal=causal != "none",
            return_lse=True,
            out=tensors[3],
            lse=lse,
        )


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    *,
    scale: float,
    causal: str,
    deterministic: bool,
) -> None:
    """See `fa_inductor.kernels`. FA4 does not check the gradients' strides: contiguous BSHD."""
    tensors = [*_bshd(q, k, v, out, grad_out, grad_q, grad_k, grad_v), lse]
    if grad_lse is not None:
        tensors.append(grad_lse)
    key = _key(tensors, scale, causal, deterministic)
    if _launches.repeat(key, tensors):
        return
    _check(q, v)
    interface = _interface()
    entry = interface._flash_attn_bwd
    entries = (interface._bwd_preprocess, entry, interface._bwd_postprocess_convert)
    with _launches.recording(entries, key, tensors):
        entry(
            *tensors[:5],
            lse,
            softmax_scale=scale,
            causal=causal != "none",
            deterministic=deterministic,
            dq=tensors[5],
            dk=tensors[6],
            dv=tensors[7],
            dlse=grad_lse,
        )
