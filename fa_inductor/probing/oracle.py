"""Attention in float64 at a few rows, never holding Sq x Sk scores at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import exact

# Scores held at a time: 256 MiB in float64.
_CHUNK = 1 << 25


@dataclass(frozen=True)
class Attention:
    """What is computed: softmax(scale q kᵀ) v on (B, H, S, D), grouped heads.

    causal: query i sees keys j <= i. kept: (B, Sk) bool, the keys that are no padding; None: all.
    """

    scale: float
    causal: bool
    kept: Tensor | None = None

    def hidden(self, batch: int, rows: Tensor, keys: int) -> Tensor | None:
        """(rows, keys) bool of one sequence; None if nothing is hidden."""
        hidden = None
        if self.causal:
            hidden = torch.arange(keys, device=rows.device) > rows[:, None]
        if self.kept is not None:
            padding = ~self.kept[batch].expand(len(rows), -1)
            hidden = padding if hidden is None else hidden | padding
        return hidden


@dataclass(frozen=True)
class Sampled:
    """Float64 values at places of the output and of the gradients.

    out, dq: (B, H, rows, D) at the queries `rows`. dk, dv: (keys, D) at the keys `keys` of the
    first sequence's first key head; the gradients are None without a grad_out.
    noise: by name of a gradient, of each of its rows, see `fa_inductor.exact`.
    """

    rows: Tensor
    out: Tensor
    keys: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    noise: dict[str, Tensor] = field(default_factory=dict)

    def pairs(self, made: Sequence[Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, made, right) of each tensor of [out] or [out, dq, dk, dv]."""
        yield "out", made[0][:, :, self.rows], self.out
        if len(made) == 1:
            return
        assert self.dq is not None
        assert self.dk is not None
        assert self.dv is not None
        yield "dq", made[1][:, :, self.rows], self.dq
        yield "dk", made[2][0, 0, self.keys], self.dk
        yield "dv", made[3][0, 0, self.keys], self.dv


def sample(
    attention: Attention,
    tensors: Sequence[Tensor],
    grad_out: Tensor | None = None,
    count: int = 24,
    seed: int = 0,
) -> Sampled:
    """The oracle of q, k, v at both ends, next to blocks' edges and at `count` random places.

    tensors: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv). Rows that see no key give 0.
    """
    q, k, v = tensors
    rows = _places(q.shape[2], count, seed).to(q.device)
    out = torch.zeros(*q.shape[:2], len(rows), v.shape[3], dtype=torch.float64, device=q.device)
    dq = torch.zeros(*q.shape[:2], len(rows), q.shape[3], dtype=torch.float64, device=q.device)
    noise = torch.zeros_like(out[..., 0])
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        hidden = attention.hidden(b, rows, k.shape[2])
        for h in range(q.shape[1]):
            keys, values = k[b, h // group].double(), v[b, h // group].double()
            weights = _weights(q[b, h, rows].double() @ keys.mT * attention.scale, hidden)
            out[b, h] = weights @ values
            if grad_out is not None:
                grad = grad_out[b, h, rows].double()
                delta = (grad * out[b, h]).sum(-1, keepdim=True)
                terms = exact.score_gradients(weights, grad, values, delta) * attention.scale
                shift = exact.delta_noise(grad, out[b, h]) * attention.scale
                dq[b, h], noise[b, h] = exact.of_queries(terms, weights, keys, shift)
    if grad_out is None:
        return Sampled(rows, out)
    places = _places(k.shape[2], count, seed + 1).to(q.device)
    dk, dv, noise_dk = _of_keys(attention, tensors, grad_out, places, group)
    noises = {"dq": noise.sqrt(), "dk": noise_dk.sqrt()}
    return Sampled(rows, out, places, dq, dk, dv, noises)


def _of_keys(
    attention: Attention, tensors: Sequence[Tensor], grad_out: Tensor, places: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dk, dv and the squared noise of dk, of the first key head: every query takes part in it."""
    q, k, v = (tensor[0].double() for tensor in tensors)
    keys, values, grads = k[0], v[0], grad_out[0].double()
    dk = torch.zeros(len(places), keys.shape[1], dtype=torch.float64, device=q.device)
    dv = torch.zeros(len(places), values.shape[1], dtype=torch.float64, device=q.device)
    noise = torch.zeros_like(dk[:, 0])
    for h in range(group):
        for rows in torch.arange(q.shape[1], device=q.device).split(max(1, _CHUNK // len(keys))):
            hidden = attention.hidden(0, rows, len(keys))
            weights = _weights(q[h, rows] @ keys.mT * attention.scale, hidden)
            grad, out, seen = grads[h, rows], weights @ values, weights[:, places]
            delta = (grad * out).sum(-1, keepdim=True)
            terms = exact.score_gradients(seen, grad, values[places], delta) * attention.scale
            shift = exact.delta_noise(grad, out) * attention.scale
            of_rows, of_noise = exact.of_keys(terms, seen, q[h, rows], shift)
            dv, dk, noise = dv + seen.mT @ grad, dk + of_rows, noise + of_noise
    return dk, dv, noise


def _weights(scores: Tensor, hidden: Tensor | None) -> Tensor:
    if hidden is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)


def _places(size: int, count: int, seed: int) -> Tensor:
    edges = {0, 1, 63, 64, 127, 128, 129, size // 2, size - 129, size - 128, size - 2, size - 1}
    edges |= {size // 128 * 128 - 1, size // 128 * 128}
    drawn = torch.randint(size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.tensor(sorted(place for place in edges | set(drawn) if 0 <= place < size))
