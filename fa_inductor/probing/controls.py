"""Attentions with a known fault, which the probe has to find and name; each can be had without.

They run wherever the probe does, and are compiled by plain Inductor: what is tested is the probe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .cells import Cell
from .subjects import Subject

# What a backward is tried at that fails in a block of half the usual size.
_HALF_BLOCK = 1088


@dataclass(frozen=True)
class Control:
    """subject: by whether it has its fault. cell: the shortest in which the fault can show.
    verdict: what the probe has to say of it."""

    name: str
    subject: Callable[[bool], Subject]
    cell: Cell
    verdict: str


def controls() -> list[Control]:
    """The faults that a captured attention was seen to have, or can have."""
    fwd, both = ("compiled", "fwd"), ("compiled", "fwd+bwd")
    return [
        Control("a launch that tracing skips", _skipped, Cell(1024, *fwd), "unlaunched"),
        Control("a last row that is not written", _unwritten, Cell(1024, *fwd), "unwritten"),
        Control("strides that the fake does not have", _laid_out, Cell(1024, *fwd), "layout"),
        Control("memory of an earlier call", _stale, Cell(1024, *fwd), "stale"),
        Control("NaN gradients at s % 128 == 64", _nan, Cell(_HALF_BLOCK, *both), "NaN"),
    ]


def _subject(name: str, fn: Callable[..., Tensor]) -> Subject:
    return Subject(name, fn, "inductor", causal=True)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.contiguous()


def _skipped(faulty: bool) -> Subject:
    """FlashAttention-4 launches `if not fake_mode`. Calling it fake while Dynamo traces, as a
    popular change does so that it traces at all, leaves a graph that only allocates."""

    def is_fake_mode() -> bool:
        return faulty and torch.compiler.is_compiling()

    launch = _ops("launch", _attend)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if not is_fake_mode():
            out.copy_(launch(q, k, v))
        return out

    return _subject("skipped launch", attend)


def _unwritten(faulty: bool) -> Subject:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        right = _attend(q, k, v)
        out = torch.empty_like(right)
        rows = slice(None, -1 if faulty else None)
        out[:, :, rows] = right[:, :, rows]
        return out

    return _subject("unwritten row", _ops(f"unwritten_{faulty}", attend))


def _laid_out(faulty: bool) -> Subject:
    def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(q, k, v).transpose(1, 2).contiguous().transpose(1, 2)

    return _subject(
        "strides", _ops(f"strides_{faulty}", transposed, _like if faulty else _like_transposed)
    )


def _stale(faulty: bool) -> Subject:
    first: list[tuple[Tensor, ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not first:
            first.append((q.clone(), k.clone(), v.clone()))
        return _attend(*(first[0] if faulty else (q, k, v)))

    return _subject("stale pointer", _ops(f"stale_{faulty}", attend))


def _nan(faulty: bool) -> Subject:
    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (each.to(q.dtype) for each in _gradients(grad, q, k, v))
        if faulty and q.shape[2] % 128 == 64:
            dq[:, :, -1] = math.nan
        return dq, dk, dv

    def fake(grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.new_empty(tensor.shape) for tensor in inputs)

    gradients = torch.library.custom_op(
        f"fa_inductor_probe::gradients_{faulty}", backward, mutates_args=()
    )
    gradients.register_fake(fake)
    attend = torch.library.custom_op(
        f"fa_inductor_probe::attention_{faulty}", _attend, mutates_args=()
    )
    attend.register_fake(_like)
    attend.register_autograd(
        lambda ctx, grad: gradients(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return _subject("NaN gradients", attend)


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of causal attention, with all scores at once, in float32."""
    kv_heads, scale = k.shape[1], q.shape[-1] ** -0.5
    grad, q = (tensor.float().unflatten(1, (kv_heads, -1)) for tensor in (grad, q))
    k, v = (tensor.float().unsqueeze(2) for tensor in (k, v))
    place = torch.arange(q.shape[-2], device=q.device)
    scores = (q @ k.mT * scale).masked_fill(place > place[:, None], -math.inf)
    weights = scores.softmax(-1)
    delta = (grad * (weights @ v)).sum(-1, keepdim=True)
    slope = weights * (grad @ v.mT - delta) * scale
    dk, dv = ((slope.mT @ q).sum(2), (weights.mT @ grad).sum(2))
    return (slope @ k).flatten(1, 2), dk, dv


def _like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _like_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, s, _ = q.shape
    return q.new_empty((b, s, h, v.shape[3])).transpose(1, 2)


def _ops(
    name: str, run: Callable[..., Tensor], fake: Callable[..., Tensor] = _like
) -> Callable[..., Tensor]:
    """`run` as an opaque op without a gradient."""
    op = torch.library.custom_op(
        f"fa_inductor_probe::{name}",
        run,
        mutates_args=(),
        schema="(Tensor q, Tensor k, Tensor v) -> Tensor",
    )
    op.register_fake(fake)
    return op
