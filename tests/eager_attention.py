"""Hand-written attention as models have it, and what its tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comparison import compare_forward
from helpers import compile_quick

HIDDEN = torch.ones(6, 6, dtype=torch.bool).triu(1)


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, dtype=dtype)


def qkv(heads: int = 4, kv_heads: int = 4, length: int = 6) -> list[Tensor]:
    return [randn(2, h, length, 8) for h in (heads, kv_heads, kv_heads)]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v)


def repeat_kv(x: Tensor, groups: int = 2) -> Tensor:
    batch, heads, length, dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, groups, length, dim)
    return x.reshape(batch, heads * groups, length, dim)


def only_spec(outcome: Any) -> Any:
    """Of the one site, which must be on the kernel."""
    (site,) = outcome.report.sites
    assert (site.kernel, site.reasons) == ("reference", {})
    return site.spec


def left_for(fn: Callable[..., Tensor], inputs: list[Tensor]) -> str:
    """The reason why the one site of `fn` is left; the result is eager's."""
    outcome = compare_forward(fn, compile_quick(fn), inputs)
    assert outcome.kernel_calls == 0
    (site,) = outcome.report.sites
    assert site.kernel is None
    (reason,) = site.reasons.values()
    return " ".join(reason)


def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """transformers' modeling_gpt_oss.eager_attention_forward."""
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask
    sinks = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([weights, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    weights = F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
    return torch.matmul(F.dropout(weights, p=0.0, training=True).to(v.dtype), v)
