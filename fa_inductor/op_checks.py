"""What the attention ops ask of their arguments, the same for fake and real tensors.

Shapes: q (B, Hq, Sq, D); k (B, Hkv, Sk, D); v (B, Hkv, Sk, Dv); Hq a multiple of Hkv.
Metadata goes in, not tensors, so that for real tensors the verdict can be remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import DeviceError, DtypeError, ShapeError
from .spec import BSHD_ORDER, CAUSAL_KINDS

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(
    shapes: Sequence[Sequence[Any]],
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
    causal: str,
    out_order: Sequence[int],
) -> None:
    """Raise unless the metadata of q, k, v and the arguments form an attention problem."""
    described = ", ".join(f"{n} {tuple(s)}" for n, s in zip("qkv", shapes, strict=True))
    if any(len(shape) != 4 for shape in shapes):
        raise ShapeError(f"fa_inductor.attention takes (B, H, S, D) tensors, got {described}.")
    q, k, v = (tuple(shape) for shape in shapes)
    if (q[0], q[3]) != (k[0], k[3]) or k[:3] != v[:3]:
        raise ShapeError(
            "fa_inductor.attention needs q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and "
            f"v (B, Hkv, Sk, Dv), got {described}."
        )
    if q[1] % k[1] != 0 if k[1] else q[1] != 0:
        raise ShapeError(f"The {q[1]} query heads are not a multiple of the {k[1]} key heads.")
    if len(set(dtypes)) != 1 or dtypes[0] not in _DTYPES:
        raise DtypeError(
            f"fa_inductor.attention takes one dtype of {[str(d) for d in _DTYPES]}, "
            f"got q {dtypes[0]}, k {dtypes[1]}, v {dtypes[2]}."
        )
    if len(set(devices)) != 1:
        raise DeviceError(
            f"q, k and v must be on one device, got {devices[0]}, {devices[1]} and {devices[2]}."
        )
    if causal not in CAUSAL_KINDS:
        raise ShapeError(f"causal={causal!r}: expected one of {CAUSAL_KINDS}.")
    if sorted(out_order) != [0, 1, 2, 3] or out_order[3] != 3:
        raise ShapeError(f"out_order={list(out_order)}: expected an order of 0, 1, 2 ending in 3.")


def check_gradient(
    shapes: Sequence[Sequence[Any]],
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
    causal: str,
    gradient: Sequence[tuple[str, Sequence[Any], torch.dtype, torch.device]],
) -> None:
    """`check_inputs`, and that out, lse and their gradients fit.

    gradient: (name, shape, dtype, device) of each of those that is given.
    """
    check_inputs(shapes, dtypes, devices, causal, BSHD_ORDER)
    rows, width = tuple(shapes[0][:3]), shapes[2][3]
    for name, shape, dtype, device in gradient:
        of_lse = name in ("lse", "grad_lse")
        wanted = rows if of_lse else (*rows, width)
        if tuple(shape) != wanted:
            raise ShapeError(f"{name} must be {wanted}, got {tuple(shape)}.")
        wanted_dtype = lse_dtype(dtypes[0]) if of_lse else dtypes[0]
        if dtype != wanted_dtype:
            raise DtypeError(f"{name} must be {wanted_dtype}, got {dtype}.")
        if device != devices[0]:
            raise DeviceError(f"{name} must be on {devices[0]}, got {device}.")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# What passed once passes again: the key is all that is looked at.
inputs_once = functools.lru_cache(maxsize=4096)(check_inputs)
gradient_once = functools.lru_cache(maxsize=4096)(check_gradient)


def metadata(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any, Any]:
    return (
        (q.shape, k.shape, v.shape),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
    )


def gradient_metadata(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Any, ...]:
    named = {"grad_out": grad_out, "grad_lse": grad_lse, "out": out, "lse": lse}
    return tuple((n, t.shape, t.dtype, t.device) for n, t in named.items() if t is not None)
