"""FlashAttention-4 (`flash_attn.cute`), CuTe-DSL kernels for Hopper and Blackwell.

FA4 works on (B, S, H, D); the transposes here are views, so it sees the tensors' real strides.
Its Python entry costs several times what a launch does, so the forward remembers the launch
that the entry ended in (`fa4_launch.py`) and repeats it for the same metadata.
"""

from __future__ import annotations

import functools
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


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: str
) -> None:
    """See `fa_inductor.kernels`. `out` may have any dimension order with D innermost."""
    tensors = (q, k, v, out)
    if _launches.repeat(tensors, lse, scale, causal):
        return
    _check(q, v)
    interface = _interface()
    q_, k_, v_, out_ = (tensor.detach().transpose(1, 2) for tensor in tensors)
    with _launches.recording(interface._flash_attn_fwd, tensors, lse, scale, causal):
        interface._flash_attn_fwd(
            q_,
            k_,
            v_,
            softmax_scale=scale,
            causal=causal != "none",
            return_lse=True,
            out=out_,
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
    _check(q, v)
    _interface()._flash_attn_bwd(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        out.transpose(1, 2),
        grad_out.transpose(1, 2),
        lse,
        softmax_scale=scale,
        causal=causal != "none",
        deterministic=deterministic,
        dq=grad_q.transpose(1, 2),
        dk=grad_k.transpose(1, 2),
        dv=grad_v.transpose(1, 2),
        dlse=grad_lse,
    )
