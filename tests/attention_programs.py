"""Hand-written attention, drawn at random: masks of `mask_programs.py`, applied in all ways."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mask_programs import SIZES, Builder, Recording, mask_inputs
from torch import Tensor, fx

LOWEST = torch.finfo(torch.float32).min
HEAD_DIM = 8


@dataclass
class AttentionProgram:
    """A traced program, and what it gives: rows that see nothing but -inf are 0."""

    module: fx.GraphModule
    inputs: Mapping[str, Tensor]
    expected: Tensor


def attention_program(seed: int) -> AttentionProgram:
    """Softmax attention in float32 with none to three masks, and what else scores go through."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = draw.choice(SIZES)
    b, h, sq, sk = shape
    masks = mask_inputs(shape)
    lengths = {"q": sq, "k": sk, "v": sk}
    operands = {name: torch.randn(b, h, size, HEAD_DIM) for name, size in lengths.items()}
    inputs = {**masks, **operands}
    graph = fx.Graph()
    with Recording(graph, inputs) as recording:
        value = _attend(draw, Builder(draw, shape), masks, **operands)
    graph.output(recording.nodes[id(value)])
    return AttentionProgram(fx.GraphModule({}, graph), inputs, value.nan_to_num(0.0))


def _attend(
    draw: random.Random, builder: Builder, inputs: Mapping[str, Tensor], q: Any, k: Any, v: Any
) -> Any:
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.3
    if draw.random() < 0.2:
        scores = torch.tanh(scores / 2.0) * 2.0
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        mask = builder.mask(*inputs.values())
        if draw.random() < 0.5:  # more of what may be a band than the builder would draw
            mask = draw.choice((builder.band, builder.triangle))()
        scores = _masked(draw, builder, scores, mask)
        if draw.random() < 0.2:
            scores = scores * draw.choice((0.5, 2.0))
    return torch.matmul(scores.softmax(-1), v)


def _masked(draw: random.Random, builder: Builder, scores: Any, mask: Any) -> Any:
    """Scores less what `mask` does not show."""
    if mask.is_floating_point():
        return draw.choice((torch.add, lambda s, m: m + s))(scores, mask)
    value = draw.choice((float("-inf"), LOWEST, LOWEST))
    kind = draw.randrange(7)
    if kind == 0:
        return scores.masked_fill(torch.logical_not(mask), value)
    if kind == 1:
        return torch.where(mask, scores, value)
    if kind == 2:
        return torch.where(mask.logical_not(), value, scores)
    if kind == 3:  # what `mask` shows is what is hidden
        return scores.masked_fill(mask, value)
    if kind == 4:
        return scores + torch.where(mask, torch.tensor(0.0), value)
    if kind == 5:  # as models have it whose masks come as 0 and 1
        return scores + (1.0 - mask.to(torch.float32)) * LOWEST
    return torch.add(scores, torch.zeros(builder.shape).masked_fill(mask == 0, value))
