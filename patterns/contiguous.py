"""Copies around attention that only change the layout: what goes in needs none, what comes out
is written in the layout that is read."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from .. import layout, symbolic
from ..graph_writes import storages, written_storages
from ..spec import BSHD, TensorSpec
from .calls import call_of
from .family import example_of, tensor_objection
from .repeat_kv import passes_gradients
from .views import swapped, without_copies
from .writes import write_between


def uncopied(node: fx.Node, anchor: fx.Node) -> fx.Node:
    """What `anchor` can read in place of `node`: the (B, H, S, D) tensor of which `node` is a copy
    that nothing else reads, if kernels can read that as it is; else `node` itself."""
    source, copies = without_copies(node)
    if source is node or tensor_objection("", source):
        return node
    given = TensorSpec.of(example_of(source))
    repeats = any(
        symbolic.same(stride, 0) and not symbolic.same(size, 1)
        for size, stride in zip(given.shape, given.stride, strict=True)
    )
    if repeats or layout.copy_reason(given, given.dtype.itemsize):
        return node
    readers = dict(zip([source, *copies[::-1]], [*copies[::-1], anchor], strict=True))
    reads = [(reader, read) for read, reader in readers.items()]
    if any(set(copy.users) != {readers[copy]} for copy in copies):
        return node
    if not all(map(passes_gradients, copies)) or write_between(reads, anchor, ()):
        return node
    written = written_storages(node.graph)
    # What is kept for a backward must not change any more, as the copy would not.
    kept = [*copies, source] if example_of(anchor).requires_grad else copies
    return node if any(not written.isdisjoint(storages(each)) for each in kept) else source


def order_that_is_read(node: fx.Node) -> str | None:
    """The layout in which an attention's (B, H, S, D) output is read by all that read it, each
    through a copy that puts it in that layout; None if there is no such one.

    The copies then are views, so nothing may write to them or hand them out.
    """
    copies = []
    for user in node.users:
        if swapped(call_of(user), user) != (0, 2, 1, 3) or not user.users:
            return None
        copies += list(user.users)
    if not copies or not all(map(_makes_contiguous, copies)):
        return None
    kept = written_storages(node.graph) | set(_handed_out(node.graph))
    return BSHD if all(kept.isdisjoint(storages(copy)) for copy in copies) else None


def _makes_contiguous(node: fx.Node) -> bool:
    """Whether the node copies its input, and its result is contiguous whatever that is."""
    call = call_of(node)
    if call is None or call.name not in ("contiguous", "reshape", "flatten"):
        return False
    if call.name == "contiguous" and (call["rest"] or node.kwargs):
        return False
    return set(storages(node)).isdisjoint(storages(call["input"])) and passes_gradients(node)


def _handed_out(graph: fx.Graph) -> Iterator[int]:
    """The memory that the graph returns."""
    for node in graph.nodes:
        if node.op == "output":
            for value in node.all_input_nodes:
                yield from storages(value)
