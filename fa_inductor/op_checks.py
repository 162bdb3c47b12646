"""What the attention ops ask of their arguments, the same for fake and real tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import DeviceError, DtypeError, ShapeError
from .op_memory import lse_dtype
from .problem import Inputs, Problem, Saved
from .spec import BSHD, CAUSAL_KINDS
from .symbolic import Dim

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(inputs: Inputs, problem: Problem, out_order: str = BSHD) -> None:
    """Raise unless the metadata of the inputs and the arguments form an attention problem."""
    q, k, v = (tuple(tensor.shape) for tensor in inputs[:3])
    described = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip("qkv", inputs[:3], strict=True))
    if any(len(shape) != 4 for shape in (q, k, v)):
        raise ShapeError(f"fa_inductor.attention takes (B, H, S, D) tensors, got {described}.")
    if (q[0], q[3]) != (k[0], k[3]) or k[:3] != v[:3]:
        raise ShapeError(
            "fa_inductor.attention needs q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and "
            f"v (B, Hkv, Sk, Dv), got {described}."
        )
    if q[1] % k[1] != 0 if k[1] else q[1] != 0:
        raise ShapeError(f"The {q[1]} query heads are not a multiple of the {k[1]} key heads.")
    dtypes = [tensor.dtype for tensor in inputs[:3]]
    if len(set(dtypes)) != 1 or dtypes[0] not in DTYPES:
        raise DtypeError(
            f"fa_inductor.attention takes one dtype of {[str(d) for d in DTYPES]}, "
            f"got q {dtypes[0]}, k {dtypes[1]}, v {dtypes[2]}."
        )
    _check_extras(inputs, (q[0], q[1], q[2], k[2]))
    check_devices(inputs._asdict())
    _check_numbers(problem, inputs.rng)
    if sorted(out_order) != sorted(BSHD) or out_order[3] != "D":
        raise ShapeError(f"out_order={out_order!r}: expected an order of B, H, S ending in D.")


def _check_extras(inputs: Inputs, scores: Sequence[Any]) -> None:
    """scores: (B, Hq, Sq, Sk)."""
    bias, heads, batch = inputs.bias, scores[1], scores[0]
    if bias is not None:
        fits = len(bias.shape) == 4 and all(
            size in (1, full) for size, full in zip(bias.shape, scores, strict=True)
        )
        if not fits:
            raise ShapeError(f"bias {tuple(bias.shape)} does not broadcast to {tuple(scores)}.")
        if not bias.dtype.is_floating_point:
            raise DtypeError(f"bias must be of a float dtype, got {bias.dtype}.")
    sink = inputs.sink
    if sink is not None and (tuple(sink.shape) != (heads,) or not sink.dtype.is_floating_point):
        raise ShapeError(f"sink must be ({heads},) floats, got {sink.dtype} {tuple(sink.shape)}.")
    for name in ("seqlens_q", "seqlens_k"):
        lengths = getattr(inputs, name)
        if lengths is None:
            continue
        if tuple(lengths.shape) != (batch,) or lengths.dtype != torch.int32:
            raise ShapeError(
                f"{name} must be ({batch},) int32, got {lengths.dtype} {tuple(lengths.shape)}."
            )


def _check_numbers(problem: Problem, rng: Tensor | None) -> None:
    if problem.causal not in CAUSAL_KINDS:
        raise ShapeError(f"causal={problem.causal!r}: expected one of {CAUSAL_KINDS}.")
    if not 0.0 <= problem.dropout_p <= 1.0:
        raise ShapeError(f"dropout_p={problem.dropout_p}: expected a probability from 0 to 1.")
    if problem.softcap < 0:
        raise ShapeError(f"softcap={problem.softcap}: expected 0.0 (none) or a positive number.")
    if problem.dropout_p and rng is None:
        raise ShapeError("dropout_p > 0 needs rng, an int64 tensor (seed, offset).")
    if rng is not None and (tuple(rng.shape) != (2,) or rng.dtype != torch.int64):
        raise ShapeError(f"rng must be (2,) int64, got {rng.dtype} {tuple(rng.shape)}.")


def check_devices(tensors: Mapping[str, Tensor | None]) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        described = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise DeviceError(f"All tensors of an attention must be on one device, got {described}.")


def check_gradient(
    inputs: Inputs, problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, *saved: Tensor
) -> None:
    """`check_inputs`, and that the `saved` (out, lse) and their gradients fit."""
    check_inputs(inputs, problem)
    rows, width = tuple(inputs.q.shape[:3]), inputs.v.shape[3]
    out, lse = saved
    check_saved(inputs.q, (out, lse, grad_out, grad_lse), (*rows, width), rows)


def check_saved(
    q: Tensor, saved: Saved, out_size: tuple[Dim, ...], lse_size: tuple[Dim, ...]
) -> None:
    """Raise unless out, lse and their gradients are of these sizes, of q's dtypes and device."""
    out, lse, grad_out, grad_lse = saved
    named = {"grad_out": grad_out, "grad_lse": grad_lse, "out": out, "lse": lse}
    for name, tensor in named.items():
        if tensor is None:
            continue
        of_lse = name in ("lse", "grad_lse")
        wanted = lse_size if of_lse else out_size
        if tuple(tensor.shape) != wanted:
            raise ShapeError(f"{name} must be {wanted}, got {tuple(tensor.shape)}.")
        wanted_dtype = lse_dtype(q.dtype) if of_lse else q.dtype
        if tensor.dtype != wanted_dtype:
            raise DtypeError(f"{name} must be {wanted_dtype}, got {tensor.dtype}.")
    check_devices({"q": q, **named})


def check_wanted(inputs: Inputs, bias_grad: bool, sink_grad: bool) -> None:
    """Raise where a gradient is asked for of what is not there."""
    for name, wanted in (("bias", bias_grad), ("sink", sink_grad)):
        if wanted and getattr(inputs, name) is None:
            raise ShapeError(f"{name}_grad=True needs a {name}, got None.")
