"""Masks that the user promises to be a band (`fa.assume_mask`): taken at their word, and checked.

The check is a part of the graph: one pass over the mask, once for all sites that share it, and an
assertion on its device that nothing waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import symbolic
from ..graph_writes import changing_storages, storages
from .family import Emitter, Scope, Value, example_of, source_of
from .masked import SharedMask, has_sizes
from .visible import Band, Part

# A number this low, added to a score, leaves exp() of it 0 in float32: BERT's masks are of -10000.
_HIDDEN_BELOW = -1e4
_BANDS = {"causal": "top_left", "full": "none"}


@dataclass(frozen=True)
class Assumed:
    """band: what the masks are taken for. masks: those that have to be it, all together."""

    kind: str
    band: Band
    masks: tuple[Part, ...]
    shared: SharedMask

    def emit_check(self, emit: Emitter, tensors: Sequence[Value], lengths: Sequence[Any]) -> None:
        """Assert it for the nodes (q, k, v) of a site with `lengths` (Sq, Sk)."""
        node = self.shared.node
        changes = not changing_storages(node.graph).isdisjoint(storages(node))
        if len(self.masks) == 1 and not changes and has_sizes(example_of(node), lengths):
            owners: list[tuple[fx.Node, int]] = [(node, -2), (node, -1)]
            place: Callable[..., Any] = self.shared.once
        else:
            owners = [(tensors[0], 2), (tensors[1], 2)]

            def place(key: Any, make: Callable[[Emitter], list[fx.Node]]) -> None:
                make(emit)

        place(("assumed", self.kind), lambda emit: [self._check(emit, owners, lengths)])

    def _check(
        self, emit: Emitter, owners: Sequence[tuple[fx.Node, int]], lengths: Sequence[Any]
    ) -> fx.Node:
        shown, hidden = zip(*(_shown_and_hidden(emit, mask) for mask in self.masks), strict=True)
        all_show = functools.reduce(lambda a, b: emit.call(torch.logical_and, a, b), shown)
        one_hides = functools.reduce(lambda a, b: emit.call(torch.logical_or, a, b), hidden)
        right = all_show
        if self.kind == "causal":
            device = example_of(self.masks[0][0]).device
            i, j = (
                emit.call(torch.arange, _size(emit, owner, length), device=device)
                for owner, length in zip(owners, lengths, strict=True)
            )
            visible = emit.call(torch.le, j, emit.call("unsqueeze", i, 1))
            right = emit.call(torch.where, visible, all_show, one_hides)
        return emit.call(
            torch._assert_async,
            emit.call(torch.all, right),
            f"fa.assume_mask={self.kind!r}: the mask at {source_of(self.masks[-1][0])} is not "
            f"{_in_words(self.kind)}. Remove the option, or compile what has such masks alone.",
        )


def assumed_mask(masks: Sequence[Part], shape: Sequence[Any], scope: Scope) -> Assumed | None:
    """What the user promised all masks of scores `shape` (B, H, Sq, Sk) to be, or None.

    A learned mask is none, and causal is only meant where Sq = Sk: else it could start from either
    corner.
    """
    kind = scope.assumed_mask
    if kind is None or any(example_of(node).requires_grad for node, _, _ in masks):
        return None
    if kind == "causal" and not symbolic.guarded_same(*shape[2:]):
        return None
    node, hides, _ = masks[-1]
    key = ("assumed", node, *map(str, shape))
    shared = scope.understood.setdefault(key, SharedMask(node, hides))
    words = (
        f"{_in_words(kind)}, assumed of the mask at {source_of(node)} (fa.assume_mask) and "
        "asserted on its device"
    )
    return Assumed(kind, Band(_BANDS[kind], (None, None), words), tuple(masks), shared)


def _in_words(kind: str) -> str:
    return {"causal": "causal", "full": "visible everywhere"}[kind]


def _shown_and_hidden(emit: Emitter, mask: Part) -> tuple[fx.Node, fx.Node]:
    node, hides, _ = mask
    if example_of(node).dtype == torch.bool:
        other = emit.call(torch.logical_not, node)
        return (other, node) if hides else (node, other)
    return emit.call(torch.eq, node, 0), emit.call(torch.le, node, _HIDDEN_BELOW)


def _size(emit: Emitter, owner: tuple[fx.Node, int], length: Any) -> Value:
    return symbolic.as_int(length) if symbolic.is_static(length) else emit.call("size", *owner)
