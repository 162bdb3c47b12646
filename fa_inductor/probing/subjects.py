"""What is probed: an attention, and how it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError, nearest
from .data import Drawn

CORE = "core"
_SCORES_LIMIT = 16384


@dataclass(frozen=True)
class Subject:
    """fn: (B, Hq, S, D), (B, Hkv, S, D), (B, Hkv, S, Dv) -> (B, Hq, S, Dv); with `takes_kept` its
    fourth argument is (B, S) bool, the keys that are no padding, or None.

    causal: whether query i is to see keys j <= i only. scale: on q kᵀ, None for 1/sqrt(D).
    backend, options: as for `torch.compile`. scores_limit: the longest S for data with padding,
    for kernels that hold S x S scores.
    eager: what stands for `fn` where nothing is compiled; None for `fn` itself.
    source: how to write `fn` down in a script that stands alone.
    """

    name: str
    fn: Callable[..., Tensor]
    backend: str = "fa_inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    causal: bool = True
    scale: float | None = None
    takes_kept: bool = False
    scores_limit: int | None = None
    source: str | None = None
    eager: Callable[..., Tensor] | None = None

    def arguments(self, drawn: Drawn) -> tuple[Any, ...]:
        """What `fn` takes beside q, k and v."""
        return (drawn.kept,) if self.takes_kept else ()


def attend(q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None = None) -> Tensor:
    """Causal attention by PyTorch's function; padding as a mask, which the graph builds."""
    if kept is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    place = torch.arange(q.shape[2], device=q.device)
    mask = (place <= place[:, None]) & kept[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def kernel_subject(kernel: str) -> Subject:
    """`attend` on one of our kernels, or on PyTorch's own by the name "core"."""
    from .. import kernels

    known = (*kernels.known(), CORE)
    if kernel not in known:
        raise OptionError(f"{kernel!r}: expected one of {known}." + nearest(kernel, known))
    source = "from fa_inductor.probing.subjects import attend as fn"
    if kernel == CORE:
        return Subject(
            CORE, attend, "inductor", takes_kept=True, scores_limit=_SCORES_LIMIT, source=source
        )
    options = {"fa.kernels": (kernel,), "fa.on_fallback": "error"}
    # cuDNN reads padding from a bias of S x S.
    limit = _SCORES_LIMIT if kernel == "cudnn" else None
    return Subject(
        kernel, attend, "fa_inductor", options, True, None, True, limit, source, _op_on(kernel)
    )


def _op_on(kernel: str) -> Callable[..., Tensor]:
    """Causal attention by the op itself, without padding."""

    def attend_by_op(q: Tensor, k: Tensor, v: Tensor, kept: None = None) -> Tensor:
        op = torch.ops.fa_inductor.attention
        out: Tensor = op(q, k, v, q.shape[3] ** -0.5, "top_left", "BSHD", False, kernel)[0]
        return out

    return attend_by_op
