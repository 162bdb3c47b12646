"""What is measured: our ops, PyTorch's attentions, FA4's own entry, flex_attention.

Ours are called as a compiled graph calls them: below autograd, forward and gradients each on its
own. The others are called as a user does, under autograd. A compiled graph also makes a few
pointwise kernels around our op that are not in these figures: it draws the dropout's seed, and
shifts a float mask. The conversion of a bool mask is in them, as PyTorch's own is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from grid import DTYPE, MASKS, Shape, Tensors
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_inductor import mask_blocks, masked_ops, ops
from fa_inductor.errors import FaInductorError
from fa_inductor.kernels.variants import MASKED
from fa_inductor.masked_problem import QUERY_BLOCK, key_block

# Takes a set of inputs; gives out, and after a backward the gradients of q, k and v.
Call = Callable[[Tensors], tuple[Tensor, ...]]

OURS = {"fa4": "ours fa4", "cudnn": "ours cudnn"}  # by kernel
CORE_DEFAULT, CORE_CUDNN, FA4_EAGER = "core default", "core cuDNN", "FA4 eager"
FLEX, FLEX_FLASH = "flex", "flex FLASH"


class Refused(Exception):
    """A contestant has no way to compute a shape."""


# What a contestant's refusal may raise: PyTorch's RuntimeError, FA4's assertions, ours.
REFUSALS = (Refused, RuntimeError, AssertionError, FaInductorError)


@dataclass(frozen=True)
class Contestant:
    """build: (shape, whether with backward) to a call, or `Refused`. context: is held around its
    calls, and costs no call anything."""

    name: str
    build: Callable[[Shape, bool], Call]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def _with_backward(forward: Callable[..., Tensor]) -> Call:
    """`forward(q, k, v, inputs)` and its gradients by autograd."""

    def call(given: Tensors) -> tuple[Tensor, ...]:
        out = forward(*given.leaves, given)
        return (out, *torch.autograd.grad(out, given.leaves, given.grad_out))

    return call


def _under_autograd(forward: Callable[..., Tensor], backward: bool) -> Call:
    if backward:
        return _with_backward(forward)

    def call(given: Tensors) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (forward(given.q, given.k, given.v, given),)

    return call


# --- Ours -----------------------------------------------------------------------------------------


def _ours(kernel: str) -> Callable[[Shape, bool], Call]:
    def build(shape: Shape, backward: bool) -> Call:
        if shape.bias in MASKS and kernel in MASKED.modules:
            return _masked(kernel, shape, backward)
        scale, causal = shape.dims[0] ** -0.5, shape.causal
        ends = (shape.dropout, shape.window, None if shape.window is None else 0, 0.0)
        visible: list[Tensor] = []  # 0 and -inf, made once

        def bias_of(given: Tensors) -> Tensor | None:
            if shape.bias not in MASKS:
                return given.mask
            if not visible:
                like = {"dtype": DTYPE, "device": given.q.device}
                visible.extend(torch.tensor(value, **like) for value in (0.0, float("-inf")))
            assert given.mask is not None
            return torch.where(given.mask, *visible)

        @torch.no_grad()
        def call(given: Tensors) -> tuple[Tensor, ...]:
            q, k, v = given.q, given.k, given.v
            extras = (bias_of(given), None, None, None, given.rng, *ends)
            out, lse = ops.attention_forward(
                *(q, k, v, scale, causal, shape.out_order, False, kernel), *extras, backward
            )
            if not backward:
                return (out,)
            grads = ops.attention_gradients(
                *(given.grad_out, None, q, k, v, out, lse, scale, causal, False, kernel), *extras
            )
            return (out, *grads)

        return call

    return build


def _masked(kernel: str, shape: Shape, backward: bool) -> Call:
    """With the block lists of each set made once, as for all layers of a model."""
    scale, text = shape.dims[0] ** -0.5, MASKS[shape.bias].text
    keys = key_block(shape.dims[0])
    lists: dict[int, list[Tensor]] = {}

    def blocks_of(given: Tensors) -> list[Tensor]:
        if id(given) not in lists:
            assert given.mask is not None
            whole = given.mask.expand(-1, -1, *shape.lengths)
            pad = (-whole.shape[3] % keys, -whole.shape[2] % QUERY_BLOCK)
            padded = F.pad(whole, (0, pad[0], 0, pad[1]))
            tiles = padded.unflatten(3, (-1, keys)).unflatten(2, (-1, QUERY_BLOCK))
            count = tiles.sum((3, 5), dtype=torch.int32)
            made = [mask_blocks.mask_blocks(count, QUERY_BLOCK * keys, by) for by in (False, True)]
            lists[id(given)] = [tensor for each in made for tensor in each]
        return lists[id(given)]

    @torch.no_grad()
    def call(given: Tensors) -> tuple[Tensor, ...]:
        q, k, v = given.q, given.k, given.v
        mask = (text, [given.read], blocks_of(given), scale)
        out, lse = masked_ops.attention_masked_forward(
            q, k, v, *mask, shape.out_order, False, kernel
        )
        if not backward:
            return (out,)
        made = masked_ops.attention_masked_gradients(
            given.grad_out, None, q, k, v, out, lse, *mask, False, kernel, False
        )
        return (out, *made[:3])

    return call


# --- PyTorch's ------------------------------------------------------------------------------------


def core_arguments(shape: Shape, given: Tensors) -> dict[str, Any]:
    """Arguments of `F.scaled_dot_product_attention` beside q, k and v."""
    return {
        "attn_mask": given.mask,
        "dropout_p": shape.dropout,
        "is_causal": shape.causal != "none",
        "enable_gqa": shape.heads[0] != shape.heads[1],
    }


def _core(shape: Shape, backward: bool) -> Call:
    if shape.window is not None:
        raise Refused("F.scaled_dot_product_attention has no sliding window")
    if shape.causal == "bottom_right":
        raise Refused("is_causal of F.scaled_dot_product_attention is aligned top-left")

    def forward(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **core_arguments(shape, given))

    return _under_autograd(forward, backward)


def core_backend(shape: Shape, backward: bool, given: Tensors) -> str | None:
    """The name of the backend that PyTorch picks by itself; None for what it cannot say."""
    if shape.window is not None or shape.causal == "bottom_right":
        return None
    q, k, v = given.leaves if backward else (given.q, given.k, given.v)
    with torch.set_grad_enabled(backward):
        choice = torch._fused_sdp_choice(q, k, v, **core_arguments(shape, given))
    return SDPBackend(choice).name


# --- FA4's entry, flex_attention ------------------------------------------------------------------


def _fa4_eager(shape: Shape, backward: bool) -> Call:
    if shape.bias != "none":
        raise Refused("flash_attn_func takes no mask")
    if shape.dropout:
        raise Refused("flash_attn_func has no dropout")
    from flash_attn.cute import flash_attn_func  # takes seconds, and needs a GPU

    window = (None, None) if shape.window is None else (shape.window, 0)

    def forward(q: Tensor, k: Tensor, v: Tensor, _: Tensors) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = flash_attn_func(q, k, v, causal=shape.causal != "none", window_size=window)
        return out[0].transpose(1, 2)

    return _under_autograd(forward, backward)


def _flex(backend: str) -> Callable[[Shape, bool], Call]:
    """`kernel_options["BACKEND"]` "TRITON", or "FLASH", FA4. Compiled anew for each shape: Dynamo's
    limit of recompiles is never met."""

    def build(shape: Shape, backward: bool) -> Call:
        if shape.bias == "heads" or shape.dropout or shape.causal == "bottom_right":
            raise Refused("not written as a flex_attention here")
        if backend == "FLASH" and shape.bias == "batch":
            raise Refused("not written as a flex_attention here")
        from torch.nn.attention import flex_attention as flex

        torch._dynamo.reset()
        left = max(shape.lengths) if shape.window is None else shape.window

        def mask_of(given: Tensors) -> Any:
            read = given.read

            def banded(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return (j <= i) & (i - j <= left)

            def masked(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                assert read is not None
                if shape.bias == "documents":
                    return read[b, i] == read[b, j]
                return read[b, j] if shape.bias == "padding" else read[b, j] & (j <= i)

            if shape.bias in MASKS:
                sizes = (shape.batch, None, *shape.lengths)
                return flex.create_block_mask(masked, *sizes, device="cuda")
            if shape.causal == "none":
                return None
            return flex.create_block_mask(banded, None, None, *shape.lengths, device="cuda")

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block_mask: Any) -> Tensor:
            def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                assert bias is not None
                return score + bias[b, 0, i, j]

            out = flex.flex_attention(
                *(q, k, v),
                score_mod=None if bias is None else biased,
                block_mask=block_mask,
                enable_gqa=shape.heads[0] != shape.heads[1],
                kernel_options={"BACKEND": backend},
            )
            assert isinstance(out, Tensor)
            return out

        compiled = torch.compile(attend, dynamic=False, fullgraph=True)
        masks: dict[int, Any] = {}

        def forward(q: Tensor, k: Tensor, v: Tensor, given: Tensors) -> Tensor:
            if id(given) not in masks:
                masks[id(given)] = mask_of(given)
            bias = None if shape.bias in MASKS else given.mask
            return compiled(q, k, v, bias, masks[id(given)])

        return _under_autograd(forward, backward)

    return build


def contestants(flex: str, cpu: bool = False) -> Iterator[Contestant]:
    """All of them, in the order of the tables. flex: "all", "some" or "none" of the shapes.
    cpu: with the reference kernel in place of both of ours, to try the benchmark without a GPU."""

    def pinned(backend: SDPBackend) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: sdpa_kernel(backend)

    for kernel, name in OURS.items():
        yield Contestant(name, _ours("reference" if cpu else kernel))
    yield Contestant(FA4_EAGER, _fa4_eager)
    yield Contestant(CORE_CUDNN, _core, pinned(SDPBackend.CUDNN_ATTENTION))
    yield Contestant("core flash", _core, pinned(SDPBackend.FLASH_ATTENTION))
    yield Contestant("core efficient", _core, pinned(SDPBackend.EFFICIENT_ATTENTION))
    yield Contestant(CORE_DEFAULT, _core)

    def some(build: Callable[[Shape, bool], Call]) -> Callable[[Shape, bool], Call]:
        def if_marked(shape: Shape, backward: bool) -> Call:
            if not shape.flex:
                raise Refused("not measured, see --flex")
            return build(shape, backward)

        return if_marked

    if flex != "none":
        for name, backend in ((FLEX, "TRITON"), (FLEX_FLASH, "FLASH")):
            yield Contestant(name, _flex(backend) if flex == "all" else some(_flex(backend)))
