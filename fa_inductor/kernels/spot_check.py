"""What an attention's results are worth: a few of their rows, compared with float64.

Of up to `_PAIRS` sequences and key heads, drawn anew each time, some queries and some keys. Nothing
waits for the device, and nothing of Sq x Sk is held.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import exact, mask_text
from ..masked_problem import Blocks, MaskedInputs, Visible
from ..problem import Inputs, Problem, Saved, hidden_by_band
from ..varlen_problem import VarlenInputs, as_bhsd

_PAIRS = 4
_PLACES = 8
# Relative errors of output and gradients that no right kernel makes. A kernel that is right is a
# tenth of it away (`probing.judging.TOLERANCES` are a row's, these all sampled ones'), and one that
# drops a block or reads a wrong row is off by 0.1 to 1.
LIMITS = {
    torch.bfloat16: (3e-2, 1e-1),
    torch.float16: (1e-2, 5e-2),
    torch.float32: (2e-3, 2e-2),
    torch.float64: (1e-5, 1e-4),
}
_TINY = 1e-30
# Not PyTorch's generator: looking must not change what a program draws.
_random = random.Random()

AnyInputs = Inputs | MaskedInputs | VarlenInputs


def forward(problem: Problem, inputs: AnyInputs, out: Tensor) -> Tensor:
    """The relative error of `out`, 0-d.

    NaN where only that is, and 0 where the inputs are not finite either. 0 with dropout, which
    draws its own.
    """
    out = _bhsd(out)
    if problem.dropout_p:
        return out.new_zeros((), dtype=torch.float64)
    wrong, right = _Sum(out), _Sum(out)
    for one in _sampled(problem, inputs):
        rows = one.places(one.q.shape[-2])
        exactly = one.softmax(rows) @ one.v
        wrong.add(_rows(one.of_queries(out), rows) - exactly)
        right.add(exactly)
    return _relative(wrong, right)


def backward(
    problem: Problem, inputs: AnyInputs, saved: Saved, grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The relative errors of dq, dk and dv, which are `grads`; an exact sum that cancels counts for
    its noise."""
    out, lse, grad_out, grad_lse = saved
    if problem.dropout_p:
        zero = out.new_zeros((), dtype=torch.float64)
        return zero, zero, zero
    out, grad_out = _bhsd(out), _bhsd(grad_out)
    lse = _bhs(lse)
    dq, dk, dv = map(_bhsd, grads)
    sums = [(_Sum(out), _Sum(out)) for _ in range(3)]
    for one in _sampled(problem, inputs):
        of_out, of_grad = one.of_queries(out), one.of_queries(grad_out)
        of_lse = one.of_queries(lse[..., None])
        delta = (of_out * of_grad).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - one.of_queries(_bhs(grad_lse)[..., None])
        shift = exact.delta_noise(of_grad, of_out) * problem.scale
        rows = one.places(one.q.shape[-2])
        weights, terms = one.gradient(rows, None, *_each(rows, of_lse, of_grad, delta))
        made = exact.of_queries(terms, weights, one.k, _rows(shift, rows))
        _compare(sums[0], _rows(one.of_queries(dq), rows), *made)
        keys = one.places(one.k.shape[-2])
        weights, terms = one.gradient(None, keys, of_lse, of_grad, delta)
        made_k, noise = exact.of_keys(terms, weights, one.q, shift)
        _compare(sums[1], _rows(one.of_keys(dk), keys), made_k.sum(0), noise.sum(0))
        made_v = (weights.mT @ of_grad).sum(0)
        _compare(sums[2], _rows(one.of_keys(dv), keys), made_v, torch.zeros_like(noise[0]))
    dq_error, dk_error, dv_error = (_relative(*each) for each in sums)
    return dq_error, dk_error, dv_error


def rebuilding(inputs: AnyInputs) -> Callable[[Sequence[Any]], AnyInputs]:
    """What makes such inputs of the tensors of a repeated call, without keeping these."""
    if isinstance(inputs, Inputs):
        return lambda tensors: Inputs(*tensors[: len(Inputs._fields)])
    if isinstance(inputs, VarlenInputs):
        longest = (inputs.max_seqlen_q, inputs.max_seqlen_k)
        return lambda tensors: VarlenInputs(*[*tensors[:6], *longest])
    text, count = inputs.visible.text, len(inputs.visible.tensors)

    def masked(tensors: Sequence[Any]) -> MaskedInputs:
        q, k, v, sink, *rest = tensors[: 4 + count]
        blocks = Blocks(*tensors[4 + count : 8 + count])
        return MaskedInputs(q, k, v, Visible(text, tuple(rest), blocks, None), sink)

    return masked


class _Sum:
    """Of squares."""

    def __init__(self, like: Tensor) -> None:
        self.value = like.new_zeros((), dtype=torch.float64)

    def add(self, tensor: Tensor) -> None:
        self.value = self.value + tensor.square().sum()

    @property
    def root(self) -> Tensor:
        return self.value.sqrt()


def _relative(wrong: _Sum, right: _Sum) -> Tensor:
    error = wrong.root / right.root.clamp_min(_TINY)
    return torch.where(right.value.isfinite(), error, 0.0)


def _compare(sums: tuple[_Sum, _Sum], made: Tensor, right: Tensor, noise: Tensor) -> None:
    wrong, norm = sums
    wrong.add(made - right)
    norm.add(torch.maximum(right.square().sum(-1), noise).sqrt())


@dataclass
class _One:
    """One sequence and one key head, with the G query heads that read it, in float64.

    q: (G, Sq, D); k: (Sk, D); v: (Sk, Dv).
    """

    problem: Problem
    inputs: AnyInputs
    batch: int
    head: int

    def __post_init__(self) -> None:
        dense = self.inputs if isinstance(self.inputs, Inputs) else self.inputs.dense
        self.dense, self.device = dense, dense.q.device
        group = dense.q.shape[1] // dense.k.shape[1]
        self.heads = slice(self.head * group, (self.head + 1) * group)
        self.q = self.of_queries(dense.q)
        self.k, self.v = self.of_keys(dense.k), self.of_keys(dense.v)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Of a (B, Hq, Sq, ...) tensor."""
        return tensor[self.batch, self.heads].double()

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Of a (B, Hkv, Sk, ...) tensor."""
        return tensor[self.batch, self.head].double()

    def places(self, size: int) -> Tensor:
        """The last one, and others at random."""
        drawn = {size - 1, *(_random.randrange(size) for _ in range(_PLACES - 1))}
        return torch.tensor(sorted(drawn), device=self.device)

    def scores(self, rows: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """(G, rows, keys), -inf where hidden, and their derivative by the uncapped ones."""
        scores = _rows(self.q, rows) @ _rows(self.k, keys).mT * self.problem.scale
        slope: Tensor | float = 1.0
        if self.problem.softcap:
            capped = torch.tanh(scores / self.problem.softcap)
            scores, slope = capped * self.problem.softcap, 1 - capped**2
        if self.dense.bias is not None:
            scores = scores + self._bias(rows, keys)
        i = torch.arange(self.q.shape[-2], device=self.device) if rows is None else rows
        j = torch.arange(self.k.shape[-2], device=self.device) if keys is None else keys
        hidden = self._hidden(i[:, None], j[None, :])
        return (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)), slope

    def softmax(self, rows: Tensor) -> Tensor:
        """(G, rows, Sk); 0 in a row that sees nothing."""
        scores, _ = self.scores(rows, None)
        if self.dense.sink is not None:
            sink = self.dense.sink[self.heads].double()[:, None, None]
            scores = torch.cat((scores, sink.expand(*scores.shape[:2], 1)), -1)
        weights = scores.softmax(-1).masked_fill(scores.isneginf(), 0.0)
        return weights[..., : self.k.shape[-2]]

    def gradient(
        self, rows: Tensor | None, keys: Tensor | None, lse: Tensor, grad: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(weights, dS times what scales q·k), (G, rows, keys); lse, delta: (G, rows, 1)."""
        scores, slope = self.scores(rows, keys)
        weights = torch.exp(scores - lse).masked_fill(scores.isneginf(), 0.0)
        terms = exact.score_gradients(weights, grad, _rows(self.v, keys), delta)
        return weights, terms * slope * self.problem.scale

    def _bias(self, rows: Tensor | None, keys: Tensor | None) -> Tensor:
        bias = self.dense.bias
        assert bias is not None
        batch = self.batch if bias.shape[0] > 1 else 0
        part = bias[batch, self.heads if bias.shape[1] > 1 else slice(None)]
        if rows is not None and bias.shape[2] > 1:
            part = part[:, rows]
        if keys is not None and bias.shape[3] > 1:
            part = part[:, :, keys]
        return part.double()

    def _hidden(self, i: Tensor, j: Tensor) -> Tensor | None:
        """(G or 1, rows, keys): which scores are masked. i: (rows, 1); j: (1, keys)."""
        inputs, problem = self.inputs, self.problem
        sizes = (self.q.shape[-2], self.k.shape[-2])
        if isinstance(inputs, MaskedInputs):
            first, last, _ = self.heads.indices(self.dense.q.shape[1])
            heads = torch.arange(first, last, device=self.device).view(-1, 1, 1)
            places = (torch.full_like(heads, self.batch), heads, i, j)
            shown = mask_text.shown_at(inputs.visible.text, inputs.visible.tensors, places, sizes)
            return ~shown
        if isinstance(inputs, VarlenInputs):
            starts_q, starts_k = inputs.cu_seqlens_q.long(), inputs.cu_seqlens_k.long()
            of_i, of_j = (
                torch.searchsorted(starts[1:].contiguous(), place.contiguous(), right=True)
                for starts, place in ((starts_q, i), (starts_k, j))
            )
            last = len(starts_q) - 2
            at_i, at_j = of_i.clamp(max=last), of_j.clamp(max=last)
            lengths = ((starts[1:] - starts[:-1])[at_i] for starts in (starts_q, starts_k))
            hidden = hidden_by_band(problem, i - starts_q[at_i], j - starts_k[at_j], *lengths)
            return (of_i != of_j) | (of_i > last) | hidden
        given = (inputs.seqlens_q, inputs.seqlens_k)
        if problem.band == (None, None) and given == (None, None):
            return None
        len_q, len_k = (
            size if lengths is None else lengths[self.batch]
            for lengths, size in zip(given, sizes, strict=True)
        )
        return hidden_by_band(problem, i, j, len_q, len_k)


def _sampled(problem: Problem, inputs: AnyInputs) -> Iterator[_One]:
    dense = inputs if isinstance(inputs, Inputs) else inputs.dense
    batch, heads = dense.k.shape[:2]
    for pair in _random.sample(range(batch * heads), min(_PAIRS, batch * heads)):
        yield _One(problem, inputs, *divmod(pair, heads))


def _rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Of a (..., S, D) tensor."""
    return tensor if rows is None else tensor[..., rows, :]


def _each(rows: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [_rows(tensor, rows) for tensor in tensors]


def _bhsd(tensor: Tensor) -> Tensor:
    """Variable lengths have (T, H, D) tensors."""
    return as_bhsd(tensor) if tensor.dim() == 3 else tensor


def _bhs(tensor: Tensor) -> Tensor:
    """Of a (B, H, S) lse, or one of variable lengths, (H, T)."""
    return tensor[None] if tensor.dim() == 2 else tensor
