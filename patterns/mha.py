"""`nn.MultiheadAttention`, which Dynamo leaves as one `F.multi_head_attention_forward` node."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.nn.functional as F
from torch import fx

from ..spec import AttentionSpec, TensorSpec, default_scale
from ..symbolic import Dim
from .assumed import Assumed, assumed_mask
from .bias import additive, without_lost_rows
from .family import (
    Emitter,
    NotUnderstood,
    Scope,
    Site,
    Unbindable,
    bind,
    describe,
    example_of,
    tensor_objection,
)
from .mha_examples import counterexamples, examples
from .visible import Band, band_of_all

__all__ = ["ANCHORS", "NAME", "counterexamples", "examples", "match", "rewrite"]

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


@dataclass(frozen=True)
class _Details:
    arguments: dict[str, Any]
    heads: int
    embed_dim: int
    masks: tuple[str, ...]  # the arguments that mask, where the op has to
    assumed: Assumed | None


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
    is_causal, masks = _masks(arguments)
    out = example_of(node)[0]
    band, assumed = _band(arguments, masks, scope)
    if band is not None:
        masks = ()
    details = _Details(arguments, heads, embed_dim, masks, assumed)
    packed = _packing(arguments)
    spec = AttentionSpec(
        *(
            _projected(details, name, width, out)
            for name, width in zip(("query", "key", "value"), packed, strict=True)
        ),
        dtype=out.dtype,
        causal="top_left" if is_causal else "none" if band is None else band.causal,
        scale=default_scale(embed_dim // heads),
        mask=" and ".join(describe(name, arguments[name]) for name in masks) or None,
        proven=None if band is None else band.words,
        window=(None, None) if band is None else band.window,
        bias=_bias(details),
        bias_needs_grad=any(example_of(arguments[name]).requires_grad for name in masks),
        # A symbol is guarded to be what it is, as in the `sdpa` family.
        dropout_p=float(example_of(arguments["dropout_p"])) if arguments["training"] else 0.0,
        needs_grad=out.requires_grad,
        deterministic=scope.deterministic,
        sdp_backends=scope.sdp_backends.get(node),
    )
    return Site(node, spec, details)


def rewrite(site: Site, kernel: str) -> None:
    """Write the module out: input projections, the attention op, output projection."""
    emit = Emitter(site.node)
    details: _Details = site.details
    arguments = details.arguments
    q, k, v = (emit.call("permute", t, 1, 2, 0, 3) for t in _project(emit, details))
    bias = None
    if details.assumed is not None:
        details.assumed.emit_check(emit, (q, k, v), site.spec.lengths)
    if details.masks:
        bias, q = _emit_bias(emit, details, site.spec.dtype, q)
    scale = site.spec.scale
    out = emit.attention((q, k, v), site.spec, scale, "SBHD", kernel, bias)
    # In memory (S, B, H, D): the output projection reads (S, B, E) without a copy.
    out = emit.call("permute", out, 2, 0, 1, 3)
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
    if not isinstance(example_of(arguments["dropout_p"]), (int, float, torch.SymFloat)):
        return "dropout_p is not a number"
    for name in ("training", "is_causal", "need_weights"):
        if not isinstance(arguments[name], bool):
            return f"{name} is symbolic"
    for user in node.users:
        if user.target is not operator.getitem:
            return "its outputs are used as a tuple"
        if user.args[1] == 1 and user.users:
            return f"need_weights={arguments['need_weights']}: the attention weights are used"
    return None


def _masks(arguments: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """(is causal, the arguments that mask). PyTorch takes `is_causal` as a promise about
    `attn_mask` when there is no padding mask and no weights are asked for; else it reads
    `attn_mask` itself."""
    given = tuple(n for n in ("attn_mask", "key_padding_mask") if arguments[n] is not None)
    promised = arguments["is_causal"] and not arguments["need_weights"]
    if promised and arguments["key_padding_mask"] is None:
        return True, ()
    return False, given


def _band(
    arguments: dict[str, Any], masks: tuple[str, ...], scope: Scope
) -> tuple[Band | None, Assumed | None]:
    """What the mask (Sq, Sk) is proven, or else promised, to be, where it is the only one."""
    if masks != ("attn_mask",) or arguments["need_weights"]:
        return None, None
    mask = arguments["attn_mask"]
    if example_of(mask).dim() != 2:
        return None, None
    queries, keys = (example_of(arguments[name]).shape for name in ("query", "key"))
    scores = (queries[1], arguments["num_heads"], queries[0], keys[0])
    parts = [(mask, example_of(mask).dtype == torch.bool, False)]
    band = band_of_all(parts, scores, scope)
    if band is not None:
        return band, None
    assumed = assumed_mask(parts, scores, scope)
    return (None, None) if assumed is None else (assumed.band, assumed)


def _bias(details: _Details) -> TensorSpec | None:
    """What the masks together are as a bias; None where they cannot be taken as one.

    With weights asked for, PyTorch's row without a key is NaN, and not 0 as in the op.
    """
    arguments, masks = details.arguments, details.masks
    if not masks or arguments["need_weights"]:
        return None
    examples = {name: example_of(arguments[name]) for name in masks}
    sizes: list[Dim] = [1, 1, 1, example_of(arguments["key"]).shape[0]]
    if "attn_mask" in examples:
        sizes[2] = example_of(arguments["query"]).shape[0]
        if examples["attn_mask"].dim() == 3:
            sizes[1] = details.heads
    if "key_padding_mask" in examples or sizes[1] != 1:
        sizes[0] = example_of(arguments["query"]).shape[1]
    floats = [e.dtype for e in examples.values() if e.dtype != torch.bool]
    stride: list[Dim] = [1, 1, 1, 1]
    for dim in (2, 1, 0):
        stride[dim] = stride[dim + 1] * sizes[dim + 1]
    dtype = floats[0] if floats else torch.bool
    return TensorSpec(tuple(sizes), tuple(stride), dtype, examples[masks[0]].device)


def _emit_bias(
    emit: Emitter, details: _Details, dtype: torch.dtype, q: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """(bias, q): the masks added up; True in a bool mask of this module is hidden."""
    parts, is_float = [], False
    for name in details.masks:
        node = details.arguments[name]
        example = example_of(node)
        if name == "key_padding_mask":
            node = emit.call("unsqueeze", emit.call("unsqueeze", node, 1), 1)
        elif example.dim() == 2:
            node = emit.call("unsqueeze", emit.call("unsqueeze", node, 0), 0)
        else:
            node = emit.call("unflatten", node, 0, (-1, details.heads))
        is_float |= example.dtype != torch.bool
        parts.append(node if example.dtype != torch.bool else additive(emit, node, dtype))
    bias = parts[0] if len(parts) == 1 else emit.call(torch.add, *parts)
    return without_lost_rows(emit, bias, q) if is_float else (bias, q)


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
