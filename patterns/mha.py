"""`nn.MultiheadAttention`, which Dynamo leaves as one `F.multi_head_attention_forward` node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..spec import AttentionSpec, TensorSpec, default_scale
from ..symbolic import Dim
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

NAME = "nn.MultiheadAttention"
# In evaluation without gradients PyTorch may fold the module, or the encoder layer around it,
# into one op: its attention is out of sight.
_FUSED = (torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd)
ANCHORS = (F.multi_head_attention_forward, *_FUSED)

_REQUIRED = (
    "query",
    "key",
    "value",
    "embed_dim_to_check",
    "num_heads",
    "in_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "add_zero_attn",
    "dropout_p",
    "out_proj_weight",
    "out_proj_bias",
)
_DEFAULTS: dict[str, Any] = {
    "training": True,
    "key_padding_mask": None,
    "need_weights": True,
    "attn_mask": None,
    "use_separate_proj_weight": False,
    "q_proj_weight": None,
    "k_proj_weight": None,
    "v_proj_weight": None,
    "static_k": None,
    "static_v": None,
    "average_attn_weights": True,
    "is_causal": False,
}
_ABSENT = ("bias_k", "bias_v", "static_k", "static_v")

# Memory order of the attention's output: (S, B, H, D), so that the output projection reads
# it as (S, B, E) without a copy.
_SBHD_ORDER = (2, 0, 1, 3)


@dataclass(frozen=True)
class _Details:
    arguments: dict[str, Any]
    heads: int
    embed_dim: int


def match(node: fx.Node, scope: Scope) -> Union[Site, NotUnderstood, None]:
    """The attention inside `node`, or why it must stay whole."""
    if node.target in _FUSED:
        return NotUnderstood(
            node,
            "attention inside one of PyTorch's fused inference layers; "
            "torch.backends.mha.set_fastpath_enabled(False) brings it to light",
        )
    try:
        arguments = bind(node, (*_REQUIRED, *_DEFAULTS), _DEFAULTS)
    except Unbindable as problem:
        return NotUnderstood(node, f"multi_head_attention_forward: {problem}")
    objection = _objection(node, arguments)
    if objection:
        return NotUnderstood(node, f"nn.MultiheadAttention: {objection}")
    heads, embed_dim = arguments["num_heads"], arguments["embed_dim_to_check"]
    details = _Details(arguments, heads, embed_dim)
    out = example_of(node)[0]
    is_causal, mask = _mask(arguments)
    packed = _packing(arguments)
    spec = AttentionSpec(
        *(
            _projected(details, name, width, out)
            for name, width in zip(("query", "key", "value"), packed, strict=True)
        ),
        dtype=out.dtype,
        causal="top_left" if is_causal else "none",
        scale=default_scale(embed_dim // heads),
        mask=mask,
        dropout_p=float(arguments["dropout_p"]) if arguments["training"] else 0.0,
        needs_grad=out.requires_grad,
        deterministic=scope.deterministic,
        sdp_backends=scope.sdp_backends.get(node),
    )
    return Site(node, spec, details)


def rewrite(site: Site, kernel: str) -> None:
    """Write the module out: input projections, the attention op, output projection."""
    emit = Emitter(site.node)
    arguments = site.details.arguments
    q, k, v = (emit.call("permute", t, 1, 2, 0, 3) for t in _project(emit, site.details))
    attention = emit.call(
        torch.ops.fa_inductor.attention.default,
        q,
        k,
        v,
        site.spec.scale,
        site.spec.causal,
        list(_SBHD_ORDER),
        site.spec.deterministic,
        kernel,
    )
    out = emit.call("permute", emit.call(operator.getitem, attention, 0), 2, 0, 1, 3)
    out = emit.call("flatten", out, 2)
    out = emit.call(F.linear, out, arguments["out_proj_weight"], arguments["out_proj_bias"])
    for user in list(site.node.users):
        if user.args[1] == 0:
            out.meta.update(user.meta)
            user.replace_all_uses_with(out)
        user.graph.erase_node(user)
    site.node.graph.erase_node(site.node)


def _objection(node: fx.Node, arguments: dict[str, Any]) -> str | None:
    for name in ("query", "key", "value"):
        if objection := tensor_objection(name, arguments[name]):
            return objection
        if (rank := example_of(arguments[name]).dim()) != 3:
            return f"{name} has rank {rank}; only batched input is rewritten"
    for name in _ABSENT:
        if arguments[name] is not None:
            return f"{name} is given"
    if arguments["add_zero_attn"] is not False:
        return "add_zero_attn=True"
    for name in ("embed_dim_to_check", "num_heads"):
        if not isinstance(arguments[name], int):
            return f"{name} is symbolic"
    if not isinstance(arguments["dropout_p"], (int, float)):
        return "dropout_p is symbolic"
    for name in ("training", "is_causal", "need_weights"):
        if not isinstance(arguments[name], bool):
            return f"{name} is symbolic"
    for user in node.users:
        if user.target is not operator.getitem:
            return "its outputs are used as a tuple"
        if user.args[1] == 1 and user.users:
            return f"need_weights={arguments['need_weights']}: the attention weights are used"
    return None


def _mask(arguments: dict[str, Any]) -> tuple[bool, str | None]:
    """(is causal, what else is masked). PyTorch takes `is_causal` as a promise about
    `attn_mask` when there is no padding mask and no weights are asked for; else it reads
    `attn_mask` itself."""
    padding, mask = arguments["key_padding_mask"], arguments["attn_mask"]
    if padding is not None:
        return False, describe("key_padding_mask", padding)
    if arguments["is_causal"] and not arguments["need_weights"]:
        return True, None
    return False, None if mask is None else describe("attn_mask", mask)


def _packing(arguments: dict[str, Any]) -> tuple[int, int, int]:
    """How many projections share one linear, for each of q, k, v."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if arguments["use_separate_proj_weight"] or key is not value:
        return 1, 1, 1
    return (3, 3, 3) if query is key else (1, 2, 2)


def _projected(details: _Details, name: str, width: int, out: torch.Tensor) -> TensorSpec:
    """(B, H, S, D) view of a projection (S, B, width·E); offsets are multiples of E."""
    source = example_of(details.arguments[name])
    length, batch = source.shape[0], source.shape[1]
    head_dim = details.embed_dim // details.heads
    row = width * details.embed_dim
    shape: tuple[Dim, ...] = (batch, details.heads, length, head_dim)
    stride: tuple[Dim, ...] = (row, head_dim, batch * row, 1)
    return TensorSpec(shape, stride, out.dtype, source.device)


def _project(emit: Emitter, details: _Details) -> list[fx.Node]:
    """q, k and v as (S, B, H, D) nodes."""
    arguments, embed_dim = details.arguments, details.embed_dim
    sources = [arguments[name] for name in ("query", "key", "value")]
    bias = arguments["in_proj_bias"]
    if arguments["use_separate_proj_weight"]:
        weights = [arguments[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
        projected = [
            emit.call(F.linear, source, weight, _rows(emit, bias, index, 1, embed_dim))
            for index, (source, weight) in enumerate(zip(sources, weights, strict=True))
        ]
        return [_split(emit, p, 1, details)[0] for p in projected]
    packed, found, index = _packing(arguments), [], 0
    while index < 3:
        width = packed[index]
        weight = _rows(emit, arguments["in_proj_weight"], index, width, embed_dim)
        projection = emit.call(
            F.linear, sources[index], weight, _rows(emit, bias, index, width, embed_dim)
        )
        found.extend(_split(emit, projection, width, details))
        index += width
    return found


def _rows(emit: Emitter, packed: Any, start: int, width: int, embed_dim: int) -> Any:
    """Rows of a packed weight or bias that project to q (0), k (1), v (2)."""
    if packed is None or width == 3:
        return packed
    return emit.call("narrow", packed, 0, start * embed_dim, width * embed_dim)


def _split(emit: Emitter, projection: fx.Node, width: int, details: _Details) -> list[fx.Node]:
    sizes = (width, details.heads, details.embed_dim // details.heads)
    parts = emit.call("unflatten", projection, -1, sizes)
    return [emit.call("select", parts, 2, index) for index in range(width)]


# --- Examples -----------------------------------------------------------------------------------


def _module(**options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(16, 2, **options)


def _inputs(count: int, *lengths: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: tuple(torch.randn(2, lengths[i % len(lengths)], 16) for i in range(count))


def _call(
    module: nn.MultiheadAttention, order: Sequence[int], **options: Any
) -> Callable[..., Any]:
    options.setdefault("need_weights", False)
    return lambda *x: module(*(x[i] for i in order), **options)[0]


def examples() -> list[Example]:
    first = {"batch_first": True}
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    return [
        Example("self-attention", _call(_module(**first), (0, 0, 0)), _inputs(1, 6)),
        Example("weights not used", lambda x: _WEIGHTS(x, x, x)[0], _inputs(1, 6)),
        Example("sequence first", _call(_module(), (0, 0, 0)), _inputs(1, 6)),
        Example("no bias", _call(_module(bias=False, **first), (0, 0, 0)), _inputs(1, 6)),
        Example("cross-attention", _call(_module(**first), (0, 1, 1)), _inputs(2, 6, 9)),
        Example("three inputs", _call(_module(**first), (0, 1, 2)), _inputs(3, 6)),
        Example(
            "own weights", _call(_module(kdim=16, vdim=16, **first), (0, 1, 1)), _inputs(2, 6, 9)
        ),
        Example("other widths", _other_widths, _inputs(1, 6)),
        Example(
            "causal",
            _call(_module(**first), (0, 0, 0), attn_mask=mask, is_causal=True),
            _inputs(1, 6),
        ),
    ]


_WIDE = nn.MultiheadAttention(16, 2, kdim=4, vdim=12, batch_first=True)


def _other_widths(x: torch.Tensor) -> torch.Tensor:
    return _WIDE(x, x[..., :4], x[..., :12], need_weights=False)[0]


def _fused_layer(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fused = _ENCODER_LAYER(x)
    return fused + x


_ENCODER_LAYER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()


def counterexamples() -> list[Example]:
    first = {"batch_first": True}
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return [
        Example("weights returned", lambda x: _module_with_weights(x), _inputs(1, 6), 0),
        Example("weights and a causal hint", _hinted, _inputs(1, 6), 0),
        Example("attn_mask", _call(_module(**first), (0, 0, 0), attn_mask=mask), _inputs(1, 6), 0),
        Example(
            "padding mask",
            _call(_module(**first), (0, 0, 0), key_padding_mask=padding),
            _inputs(1, 6),
            0,
        ),
        Example("encoder layer in inference", _fused_layer, _inputs(1, 6), 0),
        Example("bias_k", _call(_module(add_bias_kv=True, **first), (0, 0, 0)), _inputs(1, 6), 0),
        Example(
            "zero attn", _call(_module(add_zero_attn=True, **first), (0, 0, 0)), _inputs(1, 6), 0
        ),
        Example(
            "unbatched",
            lambda x: _WEIGHTS(x[0], x[0], x[0], need_weights=False)[0],
            _inputs(1, 6),
            0,
        ),
    ]


_WEIGHTS = nn.MultiheadAttention(16, 2, batch_first=True)


def _hinted(x: torch.Tensor) -> torch.Tensor:
    """With weights asked for, PyTorch applies the mask as it is, whatever the hint says."""
    mask = torch.ones(6, 6, dtype=torch.bool).tril(-1)
    return _WEIGHTS(x, x, x, attn_mask=mask, is_causal=True)[0]


def _module_with_weights(x: torch.Tensor) -> torch.Tensor:
    out, weights = _WEIGHTS(x, x, x)
    return out + weights.sum()
