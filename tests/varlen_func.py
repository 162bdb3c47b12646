"""Calls of `flash_attn_varlen_func` on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flash_attn.cute
import torch
from torch import Tensor

flash_attn_varlen_func = flash_attn.cute.flash_attn_varlen_func

STARTS_Q, STARTS_K = [0, 3, 3, 9], [0, 5, 7, 11]
CU_Q, CU_K = (torch.tensor(starts, dtype=torch.int32) for starts in (STARTS_Q, STARTS_K))
LENGTHS: dict[str, Any] = {
    "cu_seqlens_q": CU_Q,
    "cu_seqlens_k": CU_K,
    "max_seqlen_q": 6,
    "max_seqlen_k": 5,
}


def thd(grad: bool = False, **options: Any) -> list[Tensor]:
    """FA4's layout (T, H, D): four query heads on two."""
    shapes = ((9, 4, 8), (11, 2, 8), (11, 2, 16))
    return [torch.randn(shape, requires_grad=grad, **options) for shape in shapes]


def call_of(**given: Any) -> Callable[..., Any]:
    """A function of q, k, v and perhaps a sink."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Any:
        rest = {"learnable_sink": sink[0]} if sink else {}
        return flash_attn_varlen_func(q, k, v, **{**LENGTHS, **given, **rest})

    return attend


def padded(grad: bool = False) -> list[Tensor]:
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16))
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]
