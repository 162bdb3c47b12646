"""`F.scaled_dot_product_attention`, in every spelling that Dynamo leaves in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.nn.functional as F
from torch import fx

from .. import symbolic
from ..spec import AttentionSpec, TensorSpec, default_scale
from .assumed import Assumed, assumed_mask
from .bias import bias_spec, emit_bias
from .contiguous import order_that_is_read, uncopied
from .family import (
    Emitter,
    Example,
    NotUnderstood,
    Scope,
    Site,
    Unbindable,
    bind,
    describe,
    example_of,
    tensor_objection,
)
from .masked import VisibleMask, emit_masked, takes_formula, visible_mask
from .packed import Packed, packed_source
from .repeat_kv import shared_heads
from .visible import band_of, words_of

NAME = "sdpa"
ANCHORS = (
    F.scaled_dot_product_attention,  # the same object as torch._C._nn.scaled_dot_product_attention
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)

_NAMES = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)
_DEFAULTS = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


@dataclass(frozen=True)
class _Call:
    """The normalised call: tensor arguments, how far each is broadcast (B, H), and the mask."""

    tensors: tuple[fx.Node, fx.Node, fx.Node]
    expand: tuple[tuple[Any, Any] | None, ...]
    scale: Any
    mask: fx.Node | None
    visible: VisibleMask | None
    assumed: Assumed | None = None


def match(node: fx.Node, scope: Scope) -> Union[Site, NotUnderstood, None]:
    """The attention that `node` computes, or why it is not understood."""
    try:
        arguments = bind(node, _NAMES, _DEFAULTS)
    except Unbindable as problem:
        return NotUnderstood(node, f"scaled_dot_product_attention: {problem}")
    objection = _objection(node, arguments)
    if objection:
        return NotUnderstood(node, objection)
    tensors = tuple(uncopied(arguments[name], node) for name in ("query", "key", "value"))
    examples = tuple(example_of(tensor) for tensor in tensors)
    out = example_of(node)
    enable_gqa = arguments["enable_gqa"]
    if not enable_gqa and (shared := shared_heads(*tensors[1:], node)):
        # Heads of its own for each query: the op shares them without a copy.
        tensors, enable_gqa = (tensors[0], *shared), True
        examples = tuple(example_of(tensor) for tensor in tensors)
    expand = _broadcast(examples, out.shape, enable_gqa)
    if isinstance(expand, str):
        return NotUnderstood(node, expand)
    q, k, v = (_expanded(TensorSpec.of(t), to) for t, to in zip(examples, expand, strict=True))
    scale = example_of(arguments["scale"])
    if scale is None and symbolic.is_static(q.shape[3]):
        scale = default_scale(symbolic.as_int(q.shape[3]))
    mask = arguments["attn_mask"]
    assumed = None
    causal, window, proven = "top_left" if arguments["is_causal"] else "none", (None, None), None
    scores = (*out.shape[:3], k.shape[2])
    if mask is not None and not arguments["is_causal"]:
        band = band_of(mask, scores, scope)
        if band is None:
            assumed = assumed_mask([(mask, False, False)], scores, scope)
            band = assumed and assumed.band
        if band is not None:
            causal, window, proven, mask = band.causal, band.window, band.words, None
    bias = None if mask is None else bias_spec(example_of(mask), scores)
    if isinstance(bias, str):
        return NotUnderstood(node, f"attn_mask has {bias}")
    visible = None if mask is None else visible_mask((mask, False, False), scores, scope)
    spec = AttentionSpec(
        q,
        k,
        v,
        out.dtype,
        causal=causal,
        scale=scale,
        mask=None if mask is None else _mask_in_words(mask, scores, scope),
        proven=proven,
        bias=bias,
        bias_needs_grad=mask is not None and example_of(mask).requires_grad,
        formula=visible and visible.spec,
        dropout_p=_dropout_p(arguments["dropout_p"]),
        window=window,
        needs_grad=out.requires_grad,
        deterministic=scope.deterministic,
        sdp_backends=scope.sdp_backends.get(node),
    )
    # Left alone, a site keeps its mask and its repeated heads: core was not measured with those.
    is_core = proven is None and enable_gqa == arguments["enable_gqa"]
    given = arguments["scale"]
    scale = given if isinstance(given, fx.Node) else scale
    return Site(node, spec, _Call(tensors, expand, scale, mask, visible, assumed), is_core=is_core)


def _mask_in_words(mask: fx.Node, scores: Sequence[Any], scope: Scope) -> str:
    words = words_of(mask, scores, scope)
    return describe("attn_mask", mask) + (f": {words}" if words else "")


def rewrite(site: Site, kernel: str) -> None:
    """Replace the call by the attention op on `kernel`, output laid out as it was traced."""
    emit = Emitter(site.node)
    call: _Call = site.details
    tensors = []
    for tensor, expand in zip(call.tensors, call.expand, strict=True):
        if example_of(tensor).dtype != site.spec.dtype:  # under autocast
            tensor = emit.call("to", tensor, site.spec.dtype)
        if expand is not None:
            sizes = [_size(emit, call, dim, size) for dim, size in enumerate(expand)]
            tensor = emit.call("expand", tensor, *sizes, -1, -1)
        tensors.append(tensor)
    out = example_of(site.node)
    dims = [dim for dim in symbolic.dimension_order(out.shape, out.stride()) if dim != 3]
    order = order_that_is_read(site.node) or "".join("BHS"[dim] for dim in dims) + "D"
    layout = (call.scale, order, kernel)
    if call.assumed is not None:
        call.assumed.emit_check(emit, tensors, site.spec.lengths)
    packed = _packed(call, site.spec, tensors)
    if packed is not None:
        emit.finish(emit.packed_attention(packed, site.spec, *layout))
    elif call.visible is not None and takes_formula(site.spec, kernel):
        emit.finish(emit_masked(emit, tensors, site.spec, call.visible, *layout))
    else:
        bias = None
        if call.mask is not None:
            bias, tensors[0] = emit_bias(emit, call.mask, site.spec, tensors[0])
        emit.finish(emit.attention(tensors, site.spec, *layout, bias))


def _packed(call: _Call, spec: AttentionSpec, tensors: Sequence[fx.Node]) -> Packed | None:
    """Where q, k and v come from, if their gradients can be written there together."""
    plain = not (spec.mask or spec.dropout_p) and spec.window == (None, None)
    if not spec.needs_grad or not plain or tuple(tensors) != call.tensors:
        return None
    return packed_source(call.tensors)


def _objection(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for name in ("query", "key", "value"):
        if objection := tensor_objection(name, arguments[name]):
            return objection
        if (rank := example_of(arguments[name]).dim()) != 4:
            return f"{name} has rank {rank}; only (B, H, S, D) is rewritten"
    mask = arguments["attn_mask"]
    if mask is not None and (objection := tensor_objection("attn_mask", mask)):
        return objection
    if not isinstance(example_of(node), torch.Tensor):
        return "the output has no recorded metadata"
    if not isinstance(arguments["is_causal"], bool):
        return "is_causal is symbolic"
    if not isinstance(arguments["enable_gqa"], bool):
        return "enable_gqa is symbolic"
    dropout_p = example_of(arguments["dropout_p"])
    if not isinstance(dropout_p, (int, float, torch.SymFloat)):
        return f"dropout_p is {type(dropout_p).__name__}"
    scale = example_of(arguments["scale"])
    if scale is not None and not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
        return f"scale is {type(scale).__name__}"
    return None


def _dropout_p(given: Any) -> float:
    """A symbolic probability is guarded to be what it is: PyTorch itself compiles one graph for
    each, so that it stays a symbol only in a first attempt."""
    return float(example_of(given))


def _broadcast(
    tensors: tuple[torch.Tensor, ...], out_shape: torch.Size, enable_gqa: bool
) -> tuple[tuple[Any, Any] | None, ...] | str:
    """(B, H) that each of q, k, v is expanded to, None where it fits; or why none would fit.

    A key and value head shared by all query heads needs no expansion: the op takes Hkv = 1.
    """
    q, k, v = tensors
    if not symbolic.guarded_same(k.shape[2], v.shape[2]):
        return f"key length {k.shape[2]} and value length {v.shape[2]} differ"
    batch, heads = out_shape[0], out_shape[1]
    kv_heads: Any = heads
    if symbolic.same(k.shape[1], v.shape[1]) and (enable_gqa or symbolic.same(k.shape[1], 1)):
        kv_heads = k.shape[1]
    elif enable_gqa:
        return f"enable_gqa with {k.shape[1]} key heads and {v.shape[1]} value heads"
    plan: list[tuple[Any, Any] | None] = []
    for name, tensor, wanted in (("query", q, heads), ("key", k, kv_heads), ("value", v, kv_heads)):
        if symbolic.same_all(tensor.shape[:2], (batch, wanted)):
            plan.append(None)
            continue
        sizes = tensor.shape[:2]
        fits = list(map(symbolic.guarded_same, sizes, (batch, wanted)))
        if not all(fit or symbolic.same(size, 1) for size, fit in zip(sizes, fits, strict=True)):
            return f"{name} {tuple(tensor.shape)} does not broadcast to {(batch, wanted)}"
        plan.append(None if all(fits) else (batch, wanted))
    return tuple(plan)


def _expanded(tensor: TensorSpec, to: tuple[Any, Any] | None) -> TensorSpec:
    if to is None:
        return tensor
    stride = [0 if symbolic.same(tensor.shape[dim], 1) else tensor.stride[dim] for dim in (0, 1)]
    return TensorSpec(
        (*to, *tensor.shape[2:]),
        (*stride, *tensor.stride[2:]),
        tensor.dtype,
        tensor.device,
        tensor.storage_offset,
    )


def _size(emit: Emitter, call: _Call, dim: int, size: Any) -> Any:
    """`size` as a graph value: an int, or read from the operand that has it."""
    if symbolic.is_static(size):
        return symbolic.as_int(size)
    for tensor in call.tensors:
        if symbolic.same(example_of(tensor).shape[dim], size):
            return emit.call("size", tensor, dim)
    raise AssertionError(f"no operand has size {size} in dimension {dim}")


# --- Examples -----------------------------------------------------------------------------------


def _qkv(
    hq: int = 4, hkv: int = 4, sq: int = 10, sk: int = 10, d: int = 8, dv: int = 8, b: int = 2
) -> Callable[[], tuple[torch.Tensor, ...]]:
    def make() -> tuple[torch.Tensor, ...]:
        return (
            torch.randn(b, hq, sq, d),
            torch.randn(b, hkv, sk, d),
            torch.randn(b, hkv, sk, dv),
        )

    return make


def examples() -> list[Example]:
    sdpa = F.scaled_dot_product_attention
    aten = torch.ops.aten.scaled_dot_product_attention
    return [
        Example("positional", lambda q, k, v: sdpa(q, k, v), _qkv()),
        Example("keywords", lambda q, k, v: sdpa(value=v, key=k, query=q), _qkv()),
        Example("six positional", lambda q, k, v: sdpa(q, k, v, None, 0.0, True), _qkv()),
        Example("causal keyword", lambda q, k, v: sdpa(q, k, v, is_causal=True), _qkv()),
        Example("causal, Sq < Sk", lambda q, k, v: sdpa(q, k, v, is_causal=True), _qkv(sq=5)),
        Example("scale", lambda q, k, v: sdpa(q, k, v, scale=0.3), _qkv()),
        Example("negative scale", lambda q, k, v: sdpa(q, k, v, scale=-0.25), _qkv()),
        Example("GQA", lambda q, k, v: sdpa(q, k, v, enable_gqa=True), _qkv(hkv=2)),
        Example("one shared key head", lambda q, k, v: sdpa(q, k, v), _qkv(hkv=1)),
        Example("batch broadcast", lambda q, k, v: sdpa(q, k[:1], v[:1]), _qkv()),
        Example("query broadcast", lambda q, k, v: sdpa(q[:, :1], k, v), _qkv()),
        Example("Dv != D", lambda q, k, v: sdpa(q, k, v), _qkv(dv=16)),
        Example(
            "torch._C._nn",
            lambda q, k, v: torch._C._nn.scaled_dot_product_attention(q, k, v),
            _qkv(),
        ),
        Example("aten packet", lambda q, k, v: aten(q, k, v, is_causal=True), _qkv()),
        Example("aten overload", lambda q, k, v: aten.default(q, k, v), _qkv()),
        Example("two in one graph", lambda q, k, v: sdpa(sdpa(q, k, v), k, v), _qkv(), sites=2),
        Example("output written to", lambda q, k, v: sdpa(q, k, v).mul_(2), _qkv()),
        Example("inputs written to before", lambda q, k, v: sdpa(q.clone().add_(1), k, v), _qkv()),
        Example("inputs written to after", _write_after, _qkv()),
        Example("bool mask", lambda q, k, v: sdpa(q, k, v, attn_mask=_MASK), _qkv()),
        Example("float mask", lambda q, k, v: sdpa(q, k, v, _MASK.float()), _qkv()),
        Example("dropout of everything", lambda q, k, v: sdpa(q, k, v, dropout_p=1.0), _qkv()),
    ]


_MASK = torch.ones(10, 10, dtype=torch.bool).tril()


def _write_after(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k = k * 2
    out = F.scaled_dot_product_attention(q, k, v)
    k.zero_()
    return out + k.sum()


def counterexamples() -> list[Example]:
    sdpa = F.scaled_dot_product_attention
    return [
        Example("mask of another dtype", _float_mask_beside_bfloat16, _qkv(), 0),
        Example("rank 3", lambda q, k, v: sdpa(q[0], k[0], v[0]), _qkv(), 0),
        Example("rank 5", lambda q, k, v: sdpa(q[None], k[None], v[None]), _qkv(), 0),
    ]


def _float_mask_beside_bfloat16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, _MASK.float()).float()
