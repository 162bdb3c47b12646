"""Attention written out by hand: a product, a softmax, a product.

Found from the second product backwards (`scores.py`). Everything from the first product on must
belong to the attention alone, and nothing that is read may be written to before the second
product, where the op then stands. The scores are kept in float32 (float64 for float64) by the op:
where the code rounds them, the result is nearer to the truth than the code's.

What is added to the scores becomes the op's bias. Scores that are replaced by a number are another
matter: in a row that is masked as a whole, softmax sees the number alone. It is taken where
float32 arithmetic cannot tell both apart, for -inf and for numbers of -1e30 and less; in float16,
which cannot hold those, for -inf only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import fx

from .. import symbolic
from ..graph_writes import storages, written_storages, written_to
from ..spec import AttentionSpec
from ..support_row import dtype_name
from .assumed import Assumed
from .calls import Symbol, describe_call
from .contiguous import order_that_is_read
from .eager_examples import counterexamples, examples
from .family import Emitter, NotUnderstood, Scope, Site, example_of, tensor_objection
from .masked import VisibleMask, emit_masked, takes_formula
from .operands import Found, Leading, Operand, emit_all, fitted, objection, simplified, with_heads
from .packed import Packed, packed_source
from .products import Product, values_product
from .repeat_kv import passes_gradients
from .score_band import assumed_steps, band_of_steps, visible_steps, without_idle, words_of_steps
from .score_bias import Bias, bias_of
from .score_steps import NotAttention, Scaled, Step, Unclear
from .scores import Scores, scores_of
from .views import View
from .visible import Band
from .writes import write_between

__all__ = ["ANCHORS", "NAME", "counterexamples", "examples", "match", "rewrite"]

NAME = "eager"
_NO_BAND = Band("none", (None, None), "")
ANCHORS = (torch.matmul, torch.bmm, torch.einsum, operator.matmul, "matmul", "bmm", "__matmul__")


@dataclass(frozen=True)
class _Details:
    """symbols: factors of the scores that are not known.

    order: the dimensions of the code's output, out of (leading..., Sq, Dv).

    passed: the nodes that are left over, for those that nothing else uses.
    """

    operands: tuple[Operand, Operand, Operand]
    symbols: list[Symbol]
    bias: Bias | None
    visible: VisibleMask | None
    sink: fx.Node | None
    assumed: Assumed | None
    out_order: str
    order: tuple[int, ...]
    passed: tuple[fx.Node, ...]


def match(node: fx.Node, scope: Scope) -> Union[Site, NotUnderstood, None]:
    """The attention that ends in the product `node`, or why it is not taken."""
    out = example_of(node)
    product = values_product(node) if isinstance(out, torch.Tensor) else None
    if (
        product is None
        or not out.is_floating_point()
        or tensor_objection("weights", _left(product))
    ):
        return None
    try:
        scores = scores_of(_left(product), node)
        return _understand(node, scope, product, scores)
    except NotAttention:
        return None
    except Unclear as problem:
        return NotUnderstood(node, str(problem))


def _left(product: Product) -> fx.Node:
    return product.left.node


def _understand(node: fx.Node, scope: Scope, product: Product, scores: Scores) -> Site:
    out = example_of(node)
    shape = example_of(scores.node).shape
    written = written_storages(node.graph)
    found = Found(list(scores.reads), [], written, out.requires_grad)
    first = scores.product
    found.reads += [(scores.node, first.left.node), (scores.node, first.right.node)]
    found.reads.append((node, product.right.node))
    q, by_query = simplified(first.left, out.dtype, found)
    k, by_key = simplified(first.right.mT(), out.dtype, found)
    v, _ = simplified(product.right, out.dtype, found, scalable=False)
    _check_dtypes(node, scores, (q, k, v))
    if problem := objection(q, k, v, shape):
        raise Unclear(problem)
    leading = scores.leading
    q, k, v = (with_heads(view, leading, found) for view in (q, k, v))
    heads = leading or (example_of(_left(product)).shape[0], 1)
    operands = fitted(q, k, v, heads, found, node)
    scale, softcap = _scale(scores, by_query * by_key)
    full = (*heads, *shape[-2:])
    band = band_of_steps(scores.steps, full, scope)
    assumed = None
    if band is None:
        assumed = assumed_steps(scores.steps, full, scope)
        band = _NO_BAND if assumed is None else assumed.band
    steps = [] if band.words else without_idle(scores.steps, full, scope)
    bias = bias_of(steps, leading, full, out.dtype)
    visible = visible_steps(steps, full, scope)
    _check_gradients(node, scores)
    _check_writes(node, scores, found)
    canonical = out.permute(*_inverse(product.order))
    read = order_that_is_read(node) if product.order == (0, 1, 2, 3) else None
    described = [operand.spec(out.dtype) for operand in operands]
    spec = AttentionSpec(
        q=described[0],
        k=described[1],
        v=described[2],
        dtype=out.dtype,
        causal=band.causal,
        scale=scale,
        mask=None if bias is None else _in_words(bias, steps, full, scope),
        proven=band.words or None,
        bias=None if bias is None else bias.spec,
        bias_needs_grad=bias is not None and bias.needs_grad and out.requires_grad,
        formula=None if visible is None else visible.spec,
        dropout_p=scores.dropout_p,
        window=band.window,
        softcap=softcap,
        has_sink=scores.sink is not None,
        needs_grad=out.requires_grad,
        deterministic=scope.deterministic,
        sdp_backends=scope.sdp_backends.get(node),
    )
    details = _Details(
        operands,
        scores.symbols,
        bias,
        visible,
        scores.sink,
        assumed,
        read or _out_order(canonical, leading),
        product.order,
        (*scores.chain, *found.passed),
    )
    return Site(node, spec, details, is_core=False)


def _in_words(bias: Bias, steps: Sequence[Step], shape: Sequence[Any], scope: Scope) -> str:
    words = words_of_steps(steps, shape, scope)
    return bias.text + (f": {words}" if words else "")


def _scale(scores: Scores, factor: float) -> tuple[float, float]:
    """(scale, softcap) of the op: without tanh the product of all factors; with it, what stands in
    front of tanh is the cap."""
    outer = math.prod(step.factor for step in scores.steps if isinstance(step, Scaled))
    if scores.slope is None:
        scale, softcap = factor * outer, 0.0
    else:
        scale, softcap = factor * scores.slope * outer, outer
        if softcap <= 0:
            raise Unclear(f"tanh of the scores times {softcap}")
    if not math.isfinite(scale) or not math.isfinite(softcap):
        raise Unclear(f"the scale is {scale}")
    return scale, softcap


def _check_dtypes(node: fx.Node, scores: Scores, operands: tuple[View, View, View]) -> None:
    """The op computes in the output's dtype: what is narrower is cast up, which changes nothing;
    what is wider may be cast down only where the product itself does so, under autocast."""
    out = example_of(node)
    of_scores = example_of(scores.node).dtype
    for name, view, computed in zip(
        ("query", "key", "value"), operands, (of_scores, of_scores, out.dtype), strict=True
    ):
        dtype = example_of(view.node).dtype
        if not dtype.is_floating_point:
            raise Unclear(f"{name} is {dtype}")
        wider = dtype.itemsize > out.dtype.itemsize and dtype == computed
        other = dtype.itemsize == out.dtype.itemsize and dtype != out.dtype
        if wider or other:
            raise Unclear(f"a {dtype_name(dtype)} {name} beside {dtype_name(out.dtype)} values")


def _check_gradients(node: fx.Node, scores: Scores) -> None:
    """Each step must pass on gradients as autograd would, or none may be asked for."""
    if not example_of(node).requires_grad:
        return
    for each in scores.chain:
        if each not in scores.maxima and not passes_gradients(each):
            raise Unclear(f"gradients stop at {describe_call(each)}, before the output")


def _check_writes(node: fx.Node, scores: Scores, found: Found) -> None:
    """The op reads its operands at `node`: nothing may write to them after the code has read them.
    To the scores nothing else may write at any time, nor to an output with gradients: the op keeps
    it for its backward, which the second product would not."""
    if any(tensor in scores.chain for _, tensor in found.reads):
        raise Unclear("the scores or weights are used twice")
    if problem := write_between(found.reads, node, scores.chain):
        raise Unclear(problem)
    kept = [*scores.chain, *([node] if example_of(node).requires_grad else [])]
    memory = {part: each for each in kept for part in storages(each)}
    for writer in node.graph.nodes:
        if writer in scores.chain:
            continue
        for part in (part for value in written_to(writer) for part in storages(value)):
            if part in memory:
                raise Unclear(f"{memory[part].name} is written to by {describe_call(writer)}")


def _out_order(out: torch.Tensor, leading: Leading | None) -> str:
    """The dimensions in memory of the output (leading..., Sq, Dv), as the op has them."""
    rank = out.dim()
    order = symbolic.dimension_order(out.shape, out.stride())
    if order[-1] != rank - 1:
        raise Unclear("an output whose head_dim is not innermost in memory")
    names = "BHSD" if rank == 4 else ("BH", "S", "D")
    return "".join(names[dim] for dim in order)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(dim) for dim in range(len(order)))


def rewrite(site: Site, kernel: str) -> None:
    """Put the op where the second product is, and remove what nothing uses any more."""
    emit = Emitter(site.node)
    details: _Details = site.details
    spec = site.spec
    q, k, v = emit_all(emit, details.operands, spec.dtype)
    for factor in details.symbols:  # as the op's scale each value would be a graph of its own
        q = factor.emit(emit, q)
    if details.assumed is not None:
        details.assumed.emit_check(emit, (q, k, v), spec.lengths)
    sink = None
    if details.sink is not None:
        sink = details.sink
        for dim in (3, 2, 0):
            sink = emit.call("select", sink, dim, 0)
    rank = example_of(site.node).dim()
    layout = (spec.scale, details.out_order, kernel)
    plain = details.bias is sink is None and not details.symbols
    packed = _packed(details.operands, spec) if plain else None
    if packed is not None:
        out = emit.packed_attention(packed, spec, *layout)
    elif details.visible is not None and takes_formula(spec, kernel):
        out = emit_masked(emit, (q, k, v), spec, details.visible, *layout, sink)
    else:
        bias = None
        if details.bias is not None:
            bias, q = details.bias.emit(emit, q, spec.has_sink)
        out = emit.attention((q, k, v), spec, *layout, bias, sink)
    if rank == 3:
        out = emit.call("flatten", out, 0, 1)
    if details.order != tuple(range(rank)):
        out = emit.call("permute", out, *details.order)
    emit.finish(out)
    _remove(details.passed)


def _packed(operands: tuple[Operand, Operand, Operand], spec: AttentionSpec) -> Packed | None:
    """Where q, k and v come from, if their gradients can be written there together."""
    plain = not (spec.dropout_p or spec.softcap) and spec.window == (None, None)
    if not spec.needs_grad or not plain:
        return None
    if any(operand.view.steps or operand.expand for operand in operands):
        return None
    return packed_source([operand.view.node for operand in operands])


def _remove(nodes: tuple[fx.Node, ...]) -> None:
    """Last first, so that what only they used goes too."""
    for node in sorted(set(nodes), reverse=True):
        if not node.users and node.op in ("call_function", "call_method"):
            node.graph.erase_node(node)
