"""Attentions from bug reports as subjects of the probe: their layouts, masks and sizes, made inside
the function from inputs that the probe draws, so that its oracle knows what is right.

What the oracle does not know has tests of its own: dropout (DR-01), gradients of a mask (MK-02),
sizes of zero (DY-05), batches past a grid (LG-03), the log-sum-exp (PM-10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_inductor.probing.data import Sizes
from fa_inductor.probing.subjects import Subject, attend, kernel_subject

Attend = Callable[..., Tensor]
ALL = ("fa4", "cudnn")


@dataclass(frozen=True)
class ProbedCase:
    """ids: of the bug reports' cases. fn, causal: see `Subject`. lengths: S = Sq = Sk.
    kernels: those that can run it; others must say why not."""

    ids: str
    fn: Attend
    sizes: Sizes = field(default_factory=lambda: Sizes(2, 4, 4, 64))
    lengths: Sequence[int] = (256,)
    causal: bool = False
    data: str = "normal"
    kernels: tuple[str, ...] = ALL
    takes_kept: bool = False

    def subject(self, kernel: str) -> Subject:
        named = kernel_subject(kernel)
        return replace(
            named,
            name=f"{self.ids} on {kernel}",
            fn=self.fn,
            eager=None,
            causal=self.causal,
            takes_kept=self.takes_kept,
            source=None,
            scores_limit=None,
        )


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def laid_out(tensor: Tensor, order: str) -> Tensor:
    """The same (B, H, S, D) tensor in memory of that order."""
    dims = ["BHSD".index(letter) for letter in order]
    return tensor.permute(dims).contiguous().permute([dims.index(each) for each in range(4)])


def in_orders(*orders: str) -> Attend:
    def run(*tensors: Tensor) -> Tensor:
        q, k, v = (laid_out(t, order) for t, order in zip(tensors, orders, strict=True))
        return full(q, k, v) * 1

    return run


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ST-05: the output is viewed as (B, S, H D), without a copy."""
    b, h, s, d = q.shape
    return full(q, k, v).transpose(1, 2).view(b, s, h * d).view(b, s, h, d).transpose(1, 2)


def wide(grad: str) -> Attend:
    """ST-08: what the output is used for gives its gradient another layout."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = full(q, k, v)
        if grad == "every second":
            return torch.stack((out, out * 0), -1)[..., 0]
        return laid_out(out, "BSHD" if grad == "transposed" else "BHSD")

    return run


def row_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ST-10: one number for each query, expanded: softmax does not see it."""
    bias = q.detach()[:, :1, :, :1].expand(-1, q.shape[1], -1, k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def misaligned(which: str) -> Attend:
    """ST-13: a pointer, or a row pitch, that is no multiple of 16 bytes."""

    def moved(tensor: Tensor) -> Tensor:
        if which == "pitch":
            return F.pad(tensor.contiguous(), (0, 1))[..., :-1]
        return F.pad(tensor.flatten(), (1, 0))[1:].view(tensor.shape)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return full(moved(q), k, moved(v))

    return run


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ST-14: one tensor in sequence-first memory holds all, one key head."""
    heads = q.shape[1]
    p = torch.cat((q, k, v), 1).permute(2, 0, 1, 3).contiguous()
    q, k, v = (each.permute(1, 2, 0, 3) for each in p.split([heads, 1, 1], 2))
    return causal(q, k, v)


def every_second(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ST-15: keys are every second token of a longer cache."""
    longer = torch.stack((k, k * 0 + 7), 3).flatten(2, 3)
    return full(q, longer[:, :, ::2], v)


def additive(q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None) -> Tensor:
    """MK-01: causal and left padding as 0 and -inf; rows that see nothing give 0."""
    assert kept is not None
    place = torch.arange(q.shape[2], device=q.device)
    seen = (place <= place[:, None]) & kept[:, None, None, :]
    mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def lowest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MK-06: causal, as 0 and the dtype's lowest number."""
    place = torch.arange(q.shape[2], device=q.device)
    mask = torch.where(place <= place[:, None], 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None])


def stale_cache(q: Tensor, k: Tensor, v: Tensor, kept: Tensor | None) -> Tensor:
    """MK-09: what the mask hides is huge."""
    assert kept is not None
    hidden = ~kept[:, None, :, None]
    return attend(q, k.masked_fill(hidden, 1e30), v.masked_fill(hidden, 1e30), kept)


def decoding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DY-03, GQ-03: the last query again, alone beside all keys, as in decoding."""
    last = full(q[:, :, -1:], k, v)
    return torch.cat((causal(q, k, v)[:, :, :-1], last), 2)


def unequal_dims(width: int) -> Attend:
    """HD-02: values narrower than keys, in two parts."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([causal(q, k, part) for part in v.split(width, -1)], -1)

    return run


CASES = [
    ProbedCase("ST-01", in_orders("BHSD", "BHSD", "BSHD"), Sizes(1, 24, 24, 64)),
    ProbedCase("ST-01 GQA", in_orders("BHSD", "BHSD", "BSHD"), Sizes(1, 24, 4, 128)),
    *(
        ProbedCase(f"ST-04 {order}", in_orders(order, order, order), Sizes(2, 12, 12, 128), (20,))
        for order in ("BHSD", "BSHD", "HBSD", "HSBD", "SBHD", "SHBD")
    ),
    ProbedCase("ST-05", viewed, lengths=(128,)),
    ProbedCase("ST-06", in_orders("BHDS", "BHDS", "BHDS"), Sizes(1, 4, 4, 32), (32,)),
    ProbedCase("ST-07", full, Sizes(8, 4, 4, 32), (49,)),
    *(
        ProbedCase(f"ST-08 {grad}", wide(grad))
        for grad in ("transposed", "as it is", "every second")
    ),
    ProbedCase("ST-10", row_bias, Sizes(2, 8, 8, 64), (64,), kernels=("cudnn",)),
    ProbedCase("ST-11", full, Sizes(3, 12, 12, 64), (1,)),
    ProbedCase("ST-13 pointer", misaligned("pointer")),
    ProbedCase("ST-13 pitch", misaligned("pitch")),
    ProbedCase("ST-14", packed, Sizes(1, 16, 1, 64), (512,), causal=True),
    ProbedCase("ST-15", every_second, lengths=(129,)),
    ProbedCase(
        "MK-01", attend, lengths=(16, 160), causal=True, data="masked rows", takes_kept=True
    ),
    ProbedCase(
        "MK-01 additive",
        additive,
        lengths=(160,),
        causal=True,
        data="masked rows",
        takes_kept=True,
    ),
    ProbedCase("MK-06", lowest, lengths=(32,), causal=True),
    ProbedCase(
        "MK-09", stale_cache, lengths=(256,), causal=True, data="masked rows", takes_kept=True
    ),
    ProbedCase("GQ-01", full, Sizes(3, 8, 2, 64), (17,)),
    ProbedCase("GQ-03", causal, Sizes(1, 28, 4, 128), (3, 129, 257), causal=True),
    ProbedCase("GQ-03 8:1", causal, Sizes(1, 8, 1, 128), (129,), causal=True),
    ProbedCase("DY-03", decoding, Sizes(2, 32, 8, 128), (101, 300), causal=True),
    ProbedCase("DY-04", causal, Sizes(1, 2, 2, 64), (16384 + 777,), causal=True),
    ProbedCase("LG-01", causal, Sizes(1, 1, 1, 64), (65535, 65537, 70001), causal=True),
    ProbedCase("LG-01 32 x 2048", causal, Sizes(32, 1, 1, 64), (2048,), causal=True),
    *(
        ProbedCase(f"HD-01 {d}", causal, Sizes(1, 4, 4, d), (129,), causal=True)
        for d in (7, 33, 40, 72, 80, 96, 112, 160, 192, 224, 256, 264)
    ),
    ProbedCase("HD-02 192, 128 and 64", unequal_dims(128), Sizes(1, 8, 8, 192), (300,), True),
    ProbedCase("HD-02 128, 64", unequal_dims(64), Sizes(1, 8, 8, 128), (300,), True),
    ProbedCase("HD-04", causal, Sizes(3, 16, 2, 256), (256,), causal=True, data="outliers"),
    ProbedCase("PM-09", causal, Sizes(2, 8, 8, 128), (1024,), causal=True),
]
