"""FlashAttention-4 (`flash_attn.cute`), CuTe-DSL kernels for Hopper and Blackwell.

FA4 works on (B, S, H, D); the transposes here are views, so it sees the tensors' real strides.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ..errors import MissingLibraryError
from ..target import TESTED_LIBRARIES


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


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: str) -> None:
    """See `fa_inductor.kernels`. `out` may have any dimension order with D innermost."""
    _interface()._flash_attn_fwd(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        softmax_scale=scale,
        causal=causal != "none",
        return_lse=True,
        out=out.transpose(1, 2),
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
