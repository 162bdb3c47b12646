"""Hand-written attention that is rewritten, and that is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .family import Example

_LOWEST = torch.finfo(torch.float32).min
_HIDDEN = torch.ones(6, 6, dtype=torch.bool).triu(1)
_MASK = torch.zeros(6, 6).masked_fill(_HIDDEN, _LOWEST)
_SLOPES = 2.0 ** -torch.arange(1.0, 5.0).view(4, 1, 1)
_ALIBI = -_SLOPES * (torch.arange(6)[:, None] - torch.arange(6)).abs()
_Attention = Callable[..., Tensor]


def _qkv(heads: int = 4, kv_heads: int = 4, keys: int = 6) -> Callable[[], tuple[Tensor, ...]]:
    def make() -> tuple[Tensor, ...]:
        shapes = ((2, heads, 6, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 10))
        return tuple(torch.randn(shape) for shape in shapes)

    return make


def _sequence_first() -> tuple[Tensor, ...]:
    """(B, S, H, D)."""
    return tuple(torch.randn(2, 6, 4, 8) for _ in range(3))


def _single_head() -> tuple[Tensor, ...]:
    return tuple(torch.randn(3, 6, 8) for _ in range(3))


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-2, -1)) * 0.3


def _with(change: Callable[[Tensor], Tensor]) -> _Attention:
    """`change` between scores and softmax."""
    return lambda q, k, v: change(_scores(q, k)).softmax(-1) @ v


def _after(change: Callable[[Tensor], Tensor]) -> _Attention:
    """`change` between softmax and the values."""
    return lambda q, k, v: change(_scores(q, k).softmax(-1)) @ v


def _causal(length: int) -> Tensor:
    """As Hugging Face makes it."""
    places, lowest = torch.arange(length), torch.finfo(torch.float32).min
    return torch.where(places[None] <= places[:, None], torch.tensor(0.0), lowest)


def _hugging_face(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5 + _MASK
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def _repeat_kv(x: Tensor, groups: int) -> Tensor:
    batch, heads, length, dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, groups, length, dim)
    return x.reshape(batch, heads * groups, length, dim)


def _grouped(repeat: Callable[[Tensor], Tensor]) -> _Attention:
    return lambda q, k, v: _scores(q, repeat(k)).softmax(-1) @ repeat(v)


def _repeated_sequence_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v))
    return _scores(q, k).softmax(-1) @ v


def _repeated_key_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k * 1.0, v * 1.0
    repeated_k, repeated_v = _repeat_kv(k, 2), _repeat_kv(v, 2)
    k[:, :, 0] = 0.0
    return _scores(q, repeated_k).softmax(-1) @ repeated_v + k.sum()


def _scaled_key_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Read as they are: what is written to was not in the keys that they were made from."""
    k = k.detach() * 2.0
    k[:, :, 0] = 1.0
    return _scores(q, k).softmax(-1) @ v


def _scaled_without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        scaled = q * 0.5
    return _scores(scaled, k).softmax(-1) @ v + q.sum()


def _in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 0.3
    scores += _ALIBI
    scores.masked_fill_(_HIDDEN, float("-inf"))
    return scores.softmax(-1) @ v


def _with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-OSS has it, with sinks that depend on the input."""
    scores = _scores(q, k) + _MASK
    sinks = q[0, :, 0, 0].reshape(1, -1, 1, 1).expand(2, -1, 6, -1)
    combined = torch.cat([scores, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    weights = F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
    return torch.matmul(weights, v)


def _baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As BLOOM has it."""
    q, k, v = (tensor.reshape(8, 6, -1) for tensor in (q, k, v))
    alibi = _ALIBI[:, -1:].repeat(2, 1, 1)
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.3)
    weights = (scores.view(2, 4, 6, 6) + _MASK).softmax(-1)
    return torch.bmm(weights.view(8, 6, 6), v)


def _unused_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    unused = torch.empty(3, 6, 6)
    scores = torch.baddbmm(unused, q, k.transpose(-1, -2), beta=0, alpha=0.3)
    return torch.bmm(scores.softmax(dim=-1), v)


def _einsum(scores: str, out: str) -> _Attention:
    return lambda q, k, v: torch.einsum(
        out, (torch.einsum(scores, q, k) / math.sqrt(8)).softmax(-1), v
    )


def _two_layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = _scores(q, k).softmax(-1) @ v[..., :8]
    return _scores(first, k).softmax(-1) @ v


def _bfloat16_upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores in float32, all else in bfloat16; inputs that bfloat16 holds exactly."""
    q, k, v = (tensor.sign().bfloat16() for tensor in (q, k, v))
    weights = (q.float() @ k.float().mT * 1e-3).softmax(-1)
    return (weights.to(v.dtype) @ v).float() * 1e-6


def examples() -> list[Example]:
    cap = 5.0
    inf = float("-inf")
    return [
        Example("as in Hugging Face's models", _hugging_face, _qkv()),
        Example("no mask", _with(lambda s: s), _qkv()),
        Example("other key length", _with(lambda s: s), _qkv(keys=9)),
        Example("scaled queries", lambda q, k, v: ((q * 0.3) @ k.mT).softmax(-1) @ v, _qkv()),
        Example(
            "scaled queries and keys",
            lambda q, k, v: ((q * 0.5) @ (k / 2).mT).softmax(-1) @ v,
            _qkv(),
        ),
        Example("scale in a tensor", _with(lambda s: s / torch.sqrt(torch.tensor(8.0))), _qkv()),
        Example("negative scale", _with(lambda s: s * -1.5), _qkv()),
        Example("mask with masked_fill", _with(lambda s: s.masked_fill(_HIDDEN, inf)), _qkv()),
        Example("mask with where", _with(lambda s: torch.where(~_HIDDEN, s, _LOWEST)), _qkv()),
        Example("mask made in the graph", _with(lambda s: s + _causal(6)), _qkv()),
        Example("mask before the scale", _with(lambda s: (s + _MASK) * 0.5), _qkv()),
        Example("ALiBi", _with(lambda s: s + _ALIBI), _qkv()),
        Example("nothing added", _with(lambda s: 0 + (s + 0.0)), _qkv()),
        Example("ALiBi subtracted", _with(lambda s: s - _SLOPES * torch.arange(6)), _qkv()),
        Example("two biases and a mask", _with(lambda s: _ALIBI + s + _ALIBI + _MASK), _qkv()),
        Example("operations in place", _in_place, _qkv()),
        Example("less the maximum", _with(lambda s: s - s.amax(-1, keepdim=True)), _qkv()),
        Example("softcap", _with(lambda s: cap * torch.tanh(s / cap) + _MASK), _qkv()),
        Example("sink", _with_sink, _qkv()),
        Example("repeat_kv", _grouped(lambda x: _repeat_kv(x, 2)), _qkv(kv_heads=2)),
        Example(
            "repeat_interleave",
            _grouped(lambda x: torch.repeat_interleave(x, 2, dim=1)),
            _qkv(kv_heads=2),
        ),
        Example("repeated before transposing", _repeated_sequence_first, _qkv(kv_heads=2)),
        Example("keys written to when repeated", _repeated_key_written_to, _qkv(kv_heads=2)),
        Example("scaled keys written to", _scaled_key_written_to, _qkv()),
        Example("scaled without gradient", _scaled_without_gradient, _qkv()),
        Example("one shared key head", _with(lambda s: s), _qkv(kv_heads=1)),
        Example("tiled heads", _grouped(lambda x: x.repeat(1, 2, 1, 1)), _qkv(kv_heads=2)),
        Example("einsum", _einsum("bhid,bhjd->bhij", "bhij,bhjd->bhid"), _qkv()),
        Example(
            "einsum, sequence first", _einsum("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"), _sequence_first
        ),
        Example("einsum, ellipsis", _einsum("...id,...jd->...ij", "...ij,...jd->...id"), _qkv()),
        Example("rank 3", _with(lambda s: s), _single_head),
        Example("bmm of batch and heads", _baddbmm, _qkv()),
        Example("baddbmm without input", _unused_baddbmm, _single_head),
        Example("dropout in evaluation", _after(lambda p: F.dropout(p, 0.3, False)), _qkv()),
        Example("dropout of everything", _after(lambda p: F.dropout(p, 1.0)), _qkv()),
        Example("scores cast up", _bfloat16_upcast, _qkv()),
        Example("two in one graph", _two_layers, _qkv(), sites=2),
        Example("values that are the keys", lambda q, k, v: _with(lambda s: s)(q, k, k), _qkv()),
    ]


# --- Left alone -----------------------------------------------------------------------------------


def _weights_used(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).softmax(-1)
    return weights @ v + weights.mean()


def _scores_used(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    return scores.softmax(-1) @ v + scores.mean()


def _two_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = _scores(q, k).softmax(-1)
    return weights @ v + weights @ (v * 2)


def _key_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k.detach() * 1.0
    scores = _scores(q.detach(), k)
    k.zero_()
    return scores.softmax(-1) @ v + k.sum()


def _mask_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = _ALIBI.clone()
    weights = (_scores(q, k) + mask).softmax(-1)
    mask[..., 2:] = 0.0
    return weights @ v + mask.sum()


def _scores_written_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    scores[..., 0].zero_()
    return scores.softmax(-1) @ v


def _bias_that_takes_the_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = _ALIBI.expand(2, -1, -1, -1).clone()
    bias += _scores(q, k)
    return bias.softmax(-1) @ v


def _scale_learned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (_scores(q, k) * v.mean()).softmax(-1) @ v


def _without_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        weights = _scores(q, k).softmax(-1)
    return weights @ v + q.sum() + k.sum()


def _sink_for_each_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    combined = torch.cat([_scores(q, k), q[..., :1]], dim=-1)
    return combined.softmax(-1)[..., :-1] @ v


def _sink_beside_shifted_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    scores = scores - scores.amax(-1, keepdim=True)
    combined = torch.cat([scores, torch.ones(1, 1, 1, 1).expand(2, 4, 6, 1)], dim=-1)
    return combined.softmax(-1)[..., :-1] @ v


def _two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat([_scores(q, k), _scores(q, k * 2)], dim=-1)
    return scores.softmax(-1) @ torch.cat([v, v], dim=-2)


def _float32_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (_scores(q, k).softmax(-1).bfloat16() @ v.bfloat16()).float() * 1e-6


def _five_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _with(lambda s: s)(q[None], k[None], v[None])


def _transposed_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _scores(q, k).softmax(-1).transpose(-1, -2) @ v


def _linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def counterexamples() -> list[Example]:
    def left(name: str, fn: Callable[..., Any], make: Any = None) -> Example:
        return Example(name, fn, make or _qkv(), 0)

    hidden = _HIDDEN & ~torch.eye(6, dtype=torch.bool)
    return [
        left("weights used", _weights_used),
        left("scores used", _scores_used),
        left("weights applied twice", _two_values),
        left("weights multiplied", _after(lambda p: p * _SLOPES)),
        left("weights masked", _after(lambda p: p.masked_fill(_HIDDEN, 0.0))),
        left("weights transposed", _transposed_weights),
        left("dropout of the scores", _with(lambda s: F.dropout(s, 0.0, True))),
        left("softmax over queries", lambda q, k, v: _scores(q, k).softmax(-2) @ v),
        left("softmax over heads", lambda q, k, v: F.softmax(_scores(q, k), dim=1) @ v),
        left("learned scale", _scale_learned),
        left("number added", _with(lambda s: s + 1.0)),
        left("masked by -1e9", _with(lambda s: s.masked_fill(hidden, -1e9))),
        left("masked, then scaled up to little", _with(_scaled_to_little)),
        left("masked inside tanh", _with(lambda s: torch.tanh((s + _ALIBI) / 5.0) * 5.0)),
        left("scores clamped", _with(lambda s: s.clamp(-1.0, 1.0))),
        left("scores added to themselves", _with(lambda s: s + s)),
        left("key written to", _key_written_to),
        left("mask written to", _mask_written_to),
        left("scores written through a view", _scores_written_through_a_view),
        left("scores written into the bias", _bias_that_takes_the_scores),
        left("no gradient to the weights", _without_gradient),
        left("sink for each query", _sink_for_each_query),
        left("sink beside shifted scores", _sink_beside_shifted_scores),
        left("no attention: two products in one softmax", _two_products),
        left("float32 queries beside bfloat16 values", _float32_queries),
        left("rank 5", _five_dimensions),
        left("no attention", _linear_attention),
    ]


def _scaled_to_little(scores: Tensor) -> Tensor:
    return scores.masked_fill(_HIDDEN, _LOWEST) * 1e-20
