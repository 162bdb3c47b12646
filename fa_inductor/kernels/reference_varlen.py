"""The reference kernel for variable lengths: one sequence after another.

Rows that belong to no sequence give what a row without a key gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..problem import Gradients, Inputs, Problem
from ..varlen_problem import VarlenInputs, as_bhsd
from . import reference


def check(problem: Problem, inputs: VarlenInputs) -> None:
    """It takes everything."""


def forward(problem: Problem, inputs: VarlenInputs, out: Tensor, lse: Tensor) -> None:
    """See `fa_inductor.kernels.variants`."""
    out.zero_()
    lse.copy_(torch.tensor(float("-inf")) if inputs.sink is None else inputs.sink[:, None])
    for rows, keys in _sequences(inputs):
        one = _one(inputs, rows, keys)
        reference.forward(problem, one, as_bhsd(out[rows]), lse[None, :, rows])


def backward(
    problem: Problem,
    inputs: VarlenInputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grads: Gradients,
) -> None:
    """See `fa_inductor.kernels.variants`."""
    for grad in grads[:3]:
        grad.zero_()
    sum_sink = torch.zeros(lse.shape[0], dtype=lse.dtype, device=lse.device)
    without_keys = torch.ones(lse.shape[1], dtype=torch.bool, device=lse.device)
    for rows, keys in _sequences(inputs):
        of_sink = torch.zeros_like(sum_sink)
        reference.backward(
            problem,
            _one(inputs, rows, keys),
            as_bhsd(out[rows]),
            lse[None, :, rows],
            as_bhsd(grad_out[rows]),
            None if grad_lse is None else grad_lse[None, :, rows],
            Gradients(
                as_bhsd(grads.q[rows]),
                as_bhsd(grads.k[keys]),
                as_bhsd(grads.v[keys]),
                sink=None if grads.sink is None else of_sink,
            ),
        )
        sum_sink += of_sink
        without_keys[rows] = False
    if grad_lse is not None:  # the lse of a row without keys is the sink
        sum_sink += grad_lse[:, without_keys].sum(1)
    if grads.sink is not None:
        grads.sink.copy_(sum_sink)


def _sequences(inputs: VarlenInputs) -> Iterator[tuple[slice, slice]]:
    """(rows of q, rows of k) of each sequence that has both."""
    starts = zip(inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist(), strict=True)
    for (first_q, first_k), (last_q, last_k) in itertools.pairwise(starts):
        if first_q < last_q and first_k < last_k:
            yield slice(first_q, last_q), slice(first_k, last_k)


def _one(inputs: VarlenInputs, rows: slice, keys: slice) -> Inputs:
    q, k, v = as_bhsd(inputs.q[rows]), as_bhsd(inputs.k[keys]), as_bhsd(inputs.v[keys])
    return Inputs(q, k, v, sink=inputs.sink)
