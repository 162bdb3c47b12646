"""What the ops have to take: q, k and v in every memory layout, and the arguments after them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_inductor import ops

Inputs = tuple[Tensor, Tensor, Tensor]
ORDERS = tuple(itertools.permutations((0, 1, 2)))  # of (B, H, S) in memory, D always innermost
ORDER_IDS = ["".join("BHS"[dim] for dim in order) + "D" for order in ORDERS]
BSHD = (0, 2, 1)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_order(size: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A random (B, H, S, D) tensor whose dimensions lie in memory as `order` says."""
    return torch.empty_permuted(size, (*order, 3), dtype=dtype).copy_(torch.randn(size))


def qkv(
    b: int = 2,
    hq: int = 4,
    hkv: int = 4,
    sq: int = 5,
    sk: int = 6,
    d: int = 8,
    dv: int = 8,
    dtype: torch.dtype = torch.float32,
    orders: tuple[tuple[int, ...], ...] = (BSHD, BSHD, BSHD),
) -> Inputs:
    """q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), each in its own memory order."""
    sizes = ((b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv))
    q, k, v = (in_order(size, order, dtype) for size, order in zip(sizes, orders, strict=True))
    return q, k, v


def packed() -> Inputs:
    """Three slices of one (B, S, 3, H, D) projection."""
    q, k, v = torch.randn(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def packed_unequal_heads() -> Inputs:
    """Slices of one (S, B, Hq + 2, D) projection with a single key and value head."""
    q, k, v = torch.randn(5, 2, 6, 8).permute(1, 2, 0, 3).split([4, 1, 1], dim=1)
    return q, k, v


def every_second_token() -> Inputs:
    q, k, v = qkv(sk=12)
    return q, k[:, :, ::2], v[:, :, 1::2]


def expanded_heads() -> Inputs:
    q, k, v = qkv(hkv=1)
    return q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1)


def head_dim_outermost() -> Inputs:
    q, k, v = (tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for tensor in qkv())
    return q, k, v


def rotated(start: int) -> Inputs:
    """q, k and v each in another memory order."""
    return qkv(orders=tuple(ORDERS[(start + shift) % len(ORDERS)] for shift in range(3)))


LAYOUTS: dict[str, Callable[[], Inputs]] = {
    **{f"q {name}": lambda i=i: rotated(i) for i, name in enumerate(ORDER_IDS)},
    "B=1": lambda: qkv(b=1),
    "H=1": lambda: qkv(hq=1, hkv=1),
    "Sq=1": lambda: qkv(sq=1),
    "Sk=1": lambda: qkv(sk=1),
    "D=1": lambda: qkv(d=1),
    "Dv=1": lambda: qkv(dv=1),
    "all sizes 1": lambda: qkv(1, 1, 1, 1, 1, 1, 1),
    "packed": packed,
    "packed, unequal heads": packed_unequal_heads,
    "every second token": every_second_token,
    "expanded heads": expanded_heads,
    "D outermost": head_dim_outermost,
    "GQA": lambda: qkv(hkv=2),
    "MQA": lambda: qkv(hkv=1),
    "Dv < D": lambda: qkv(dv=4),
    "Dv > D": lambda: qkv(dv=16),
    **{dtype_id(dtype): lambda dtype=dtype: qkv(dtype=dtype) for dtype in FLOATS},
    "B=0": lambda: qkv(b=0),
    "Sq=0": lambda: qkv(sq=0),
    "Sk=0": lambda: qkv(sk=0),
}


def arguments(causal: str = "none", order: tuple[int, ...] = BSHD, **changed: Any) -> list[Any]:
    """What follows q, k, v in a call of `ops.attention`."""
    out_order = "".join("BHSD"[dim] for dim in (*order, 3))
    return list({**_ARGUMENTS, "causal": causal, "out_order": out_order, **changed}.values())


_ARGUMENTS = {
    "scale": None,
    "causal": "none",
    "out_order": "BSHD",
    "deterministic": False,
    "kernel": "reference",
}


def attend(call: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
    """`ops.attention` with its arguments by name, on the reference kernel unless told."""
    return ops.attention(**{**_ARGUMENTS, **call, **more})


def leaves(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Aliases with the same strides (unless cast) that require gradients if of a float dtype."""
    found = {}
    for name, tensor in tensors.items():
        floating = tensor.is_floating_point()
        cast = tensor.detach().to(dtype) if floating and dtype else tensor.detach()
        found[name] = cast.requires_grad_(floating)
    return found


def lengths(*values: int) -> Tensor:
    """Sequence lengths."""
    return torch.tensor(values, dtype=torch.int32)


def rng(seed: int, offset: int = 0) -> Tensor:
    return torch.tensor([seed, offset])
