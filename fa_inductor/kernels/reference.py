"""The reference kernel: attention by its definition, on any device.

float32 inside (float64 for float64 inputs). It is the specification that the other kernels
are tested against, and what the whole pipeline runs on where there is no GPU.
Queries are taken in blocks, so memory stays at `BLOCK_ELEMENTS` scores a block instead of
growing with Sq·Sk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..problem import Gradients, Inputs, Problem, hidden_by_band

BLOCK_ELEMENTS = 1 << 26  # scores held at a time: 256 MiB in float32


def forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor | None) -> None:
    """out = dropout(softmax(softcap(scale · q kᵀ) + bias)) v, and the log-sum-exp of each row."""
    block = _Block(problem, inputs)
    values = _grouped(inputs.v, block.dtype)
    for rows in _blocks(inputs.q, inputs.k):
        scores, _ = block.scores(rows)
        weights, _, row_lse = block.softmax(scores)
        out[:, :, rows] = _ungrouped(block.dropped(weights, rows) @ values).to(out.dtype)
        if lse is not None:
            lse[:, :, rows] = row_lse.flatten(1, 2)


def backward(
    problem: Problem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grads: Gradients,
) -> None:
    """Gradients of `forward`; the formulas of FlashAttention (arXiv:2205.14135), appendix B.2,
    and d lse / d scores = weights for the gradient of lse. Always deterministic.
    """
    block = _Block(problem, inputs)
    groups, dtype = block.groups, block.dtype
    keys, values = _grouped(inputs.k, dtype), _grouped(inputs.v, dtype)
    sum_k, sum_v = torch.zeros_like(keys[:, :, 0]), torch.zeros_like(values[:, :, 0])
    sum_bias = None if grads.bias is None else torch.zeros_like(grads.bias, dtype=dtype)
    sum_sink = torch.zeros(inputs.q.shape[1], dtype=dtype, device=out.device)
    for rows in _blocks(inputs.q, inputs.k):
        scores, slope = block.scores(rows)
        weights, sink_weights, own_lse = block.softmax(scores)
        share = _share(own_lse, lse[:, :, rows].unflatten(1, (groups, -1)))
        weights, sink_weights = weights * share[..., None], sink_weights * share
        grad = _split_heads(grad_out[:, :, rows], groups, dtype)
        delta = (grad * _split_heads(out[:, :, rows], groups, dtype)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta -= grad_lse[:, :, rows].to(dtype).unflatten(1, (groups, -1))[..., None]
        grad_scores = weights * (block.dropped(grad @ values.mT, rows) - delta)
        if sum_bias is not None:
            assert grads.bias is not None
            along = slice(None) if grads.bias.shape[2] == 1 else rows
            part = sum_bias[:, :, along]
            part += _ungrouped(grad_scores).sum_to_size(part.shape)
        sum_sink -= (sink_weights * delta[..., 0]).sum((0, 3)).flatten()
        grad_scores = grad_scores * slope * problem.scale
        queries = _split_heads(inputs.q[:, :, rows], groups, dtype)
        grads.q[:, :, rows] = _ungrouped(grad_scores @ keys).to(grads.q.dtype)
        sum_k += torch.einsum("bhgij,bhgid->bhjd", grad_scores, queries)
        sum_v += torch.einsum("bhgij,bhgid->bhjd", block.dropped(weights, rows), grad)
    grads.k.copy_(sum_k)
    grads.v.copy_(sum_v)
    if grads.bias is not None and sum_bias is not None:
        grads.bias.copy_(sum_bias)
    if grads.sink is not None:
        grads.sink.copy_(sum_sink)


class _Block:
    """What is computed for some query rows: tensors are (B, Hkv, Hq/Hkv, rows, Sk)."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self.problem, self.inputs = problem, inputs
        self.groups = inputs.k.shape[1]
        self.dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
        self.keys = _grouped(inputs.k, self.dtype)
        self.sink = None
        if inputs.sink is not None:
            self.sink = inputs.sink.to(self.dtype).view(1, self.groups, -1, 1)
        self.seed = [] if inputs.rng is None else inputs.rng.tolist()

    def scores(self, rows: slice) -> tuple[Tensor, Tensor | float]:
        """Scores, -inf where masked, and their derivative by the uncapped ones."""
        q, problem = self.inputs.q, self.problem
        scores = _split_heads(q[:, :, rows], self.groups, self.dtype) @ self.keys.mT
        scores = scores * problem.scale
        slope: Tensor | float = 1.0
        if problem.softcap:
            capped = torch.tanh(scores / problem.softcap)
            scores, slope = capped * problem.softcap, 1 - capped**2
        bias = self.inputs.bias
        if bias is not None:
            part = bias.to(self.dtype).expand(-1, q.shape[1], -1, -1)
            part = part if bias.shape[2] == 1 else part[:, :, rows]
            scores = scores + part.unflatten(1, (self.groups, -1))
        hidden = self._hidden(rows)
        return (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))), slope

    def _hidden(self, rows: slice) -> Tensor | None:
        """Which scores the band and the sequence lengths mask, broadcast to the scores."""
        inputs = self.inputs
        lengths = inputs.seqlens_q, inputs.seqlens_k
        if self.problem.band == (None, None) and lengths == (None, None):
            return None
        device, sk = inputs.q.device, inputs.k.shape[2]
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(sk, device=device)[None, :]
        len_q, len_k = (
            torch.tensor(size, device=device) if given is None else given.view(-1, 1, 1, 1, 1)
            for given, size in zip(lengths, (inputs.q.shape[2], sk), strict=True)
        )
        return hidden_by_band(self.problem, i, j, len_q, len_k)

    def softmax(self, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(weights of the keys, weight of the sink, lse); a row without either weighs 0.

        Not exp(scores - lse): beside scores of -3.4e38, which are in use as masks, the logarithm
        of their number is lost, and each key would weigh 1.
        """
        top = scores.amax(-1)
        if self.sink is not None:
            top = torch.maximum(top, self.sink)
        top = top.masked_fill(top.isneginf(), 0.0)
        weights = torch.exp(scores - top[..., None])
        sink = torch.zeros_like(top) if self.sink is None else torch.exp(self.sink - top)
        total = weights.sum(-1) + sink
        row_lse = top + torch.log(total)
        total = total.masked_fill(total == 0.0, 1.0)
        return weights / total[..., None], sink / total, row_lse

    def dropped(self, weights: Tensor, rows: slice) -> Tensor:
        """Some of the weights set to 0 and the rest scaled up; the same ones for the same rows."""
        p = self.problem.dropout_p
        if p == 0.0:
            return weights
        generator = torch.Generator(weights.device)
        generator.manual_seed(hash((*self.seed, rows.start)) % (1 << 62))
        keep = torch.rand(weights.shape, generator=generator, device=weights.device) >= p
        return weights * keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0)


def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Ranges of query rows whose scores fit into `BLOCK_ELEMENTS`."""
    per_row = q.shape[0] * q.shape[1] * k.shape[2]
    step = max(1, BLOCK_ELEMENTS // max(1, per_row))
    for start in range(0, q.shape[2], step):
        yield slice(start, min(start + step, q.shape[2]))


def _split_heads(tensor: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """(B, Hq, S, D) -> (B, Hkv, Hq/Hkv, S, D) in the dtype of the computation."""
    return tensor.to(dtype).unflatten(1, (groups, -1))


def _grouped(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, Hkv, S, D) -> (B, Hkv, 1, S, D), so that it broadcasts over a group of query heads."""
    return tensor.to(dtype).unsqueeze(2)


def _ungrouped(tensor: Tensor) -> Tensor:
    return tensor.flatten(1, 2)


def _share(own_lse: Tensor, lse: Tensor) -> Tensor:
    """What these keys and the sink are of all that `lse` is taken over: 1 unless the caller holds
    other keys elsewhere, 0 on rows where every key is masked."""
    return torch.exp(own_lse - lse).masked_fill(own_lse.isneginf(), 0.0)
