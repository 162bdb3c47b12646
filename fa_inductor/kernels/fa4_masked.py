"""FlashAttention-4 with a mask as text: its `mask_mod`, and lists of the blocks to look at.

FA4 evaluates the function at every place of the partial blocks, also at rows past the last query,
which it throws away later: reads are kept inside their tensors here.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import mask_text
from ..layout import packed_strides
from ..masked_problem import QUERY_BLOCK, Blocks, MaskedInputs, key_block
from ..problem import Gradients, Problem
from ..torch_compat import view_as_any
from . import fa4
from .fa4_launch import Repeat, recording

_INDICES = mask_text.INDICES


def check(problem: Problem, inputs: MaskedInputs) -> None:
    """The limits that hold on every GPU."""
    fa4.check_variant(problem, inputs.dense)


def forward(problem: Problem, inputs: MaskedInputs, out: Tensor, lse: Tensor) -> Repeat | None:
    """See `fa_inductor.kernels.variants`."""
    entry = fa4._interface()._flash_attn_fwd
    blocks, made = _packed(inputs.visible.by_query), fa4._bshd(out)
    given = _given(inputs, blocks)
    arguments = _arguments(problem, inputs, blocks)
    with recording((entry,)) as noted:
        entry(*given[:3], **arguments, return_lse=True, out=made, lse=lse)
    return noted.repeat([*given, made, lse])


def backward(
    problem: Problem,
    inputs: MaskedInputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grads: Gradients,
) -> Repeat | None:
    """See `fa_inductor.kernels.variants`."""
    assert inputs.visible.by_key is not None
    blocks = _packed(inputs.visible.by_key)
    saved = (fa4._bshd(out), lse, fa4._bshd(grad_out), grad_lse)
    made = [fa4._bshd(grad) for grad in grads[:3]]
    given = [*_given(inputs, blocks), *saved, *made]
    arguments = _arguments(problem, inputs, blocks)
    noted, results = fa4.noted_backward(problem, given[:3], saved, made, arguments)
    if inputs.sink is None:
        return noted.repeat(given)
    if grads.sink is None:
        return None
    grads.sink.copy_(results[3])
    return noted.repeat([*given, None], {len(given): results[3]})


def _given(inputs: MaskedInputs, blocks: list[Tensor]) -> list[Tensor | None]:
    """The tensors as FA4's kernels take them, in the order of a repeated call.

    The block lists are expanded, as FA4 does. It is not given them so: it packs the heads of a
    group only if it sees that they share one list.
    """
    qkv = [fa4._bshd(tensor) for tensor in inputs[:3]]
    sink = None if inputs.sink is None else inputs.sink.detach()
    batch, heads = inputs.q.shape[:2]
    expanded = [each.expand(batch, heads, *each.shape[2:]) for each in blocks]
    return [*qkv, sink, *inputs.visible.tensors, *expanded]


def _packed(blocks: Blocks) -> list[Tensor]:
    """FA4 looks at the strides of dimensions of size 1 too."""
    return [view_as_any(each, each.shape, packed_strides(each), 0) for each in blocks]


def _arguments(problem: Problem, inputs: MaskedInputs, blocks: list[Tensor]) -> dict[str, Any]:
    """Arguments that FA4's forward and backward share."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    size = (QUERY_BLOCK, key_block(inputs.q.shape[3]))
    return {
        "softmax_scale": problem.scale,
        "softcap": problem.softcap,
        "learnable_sink": None if inputs.sink is None else inputs.sink.detach(),
        "mask_mod": mask_function(inputs.visible.text),
        "aux_tensors": list(inputs.visible.tensors) or None,
        "block_sparse_tensors": BlockSparseTensorsTorch(*blocks, block_size=size),
    }


# --- The function that FA4 calls ------------------------------------------------------------------


@functools.cache
def mask_function(text: str) -> Callable[..., Any]:
    """`text` as FA4's `mask_mod`, with the key of what FA4 compiles for it."""
    import cutlass
    from flash_attn.cute import utils

    source = mask_source(text)
    names: dict[str, Any] = {"cutlass": cutlass, "utils": utils}
    exec(compile(source, f"<mask {text}>", "exec"), names)  # only what `mask_text.parsed` lets in
    function: Callable[..., Any] = names["mask_mod"]
    function.__cute_hash__ = hashlib.sha256(source.encode()).hexdigest()  # type: ignore[attr-defined]
    return function


def mask_source(text: str) -> str:
    """The source of `mask_mod` for a mask as text."""
    tree = ast.fix_missing_locations(_AsCute().visit(mask_text.copied(text)))
    return (
        "def mask_mod(batch, head, query, key, lengths, tensors):\n"
        "    b, h, i, j = batch[0], head[0], query[0], key[0]\n"
        "    Sq, Sk = lengths.seqlen_q, lengths.seqlen_k\n"
        f"    visible = cutlass.Boolean({ast.unparse(tree)})\n"
        "    return utils.scalar_to_ssa(visible, cutlass.Boolean)\n"
    )


class _AsCute(ast.NodeTransformer):
    """Without short cuts, of which CuTe has none for values, and with reads inside of tensors."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        join: ast.operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        first, *others = (self.visit(value) for value in node.values)
        for other in others:
            first = ast.BinOp(first, join, other)
        return first

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        if not isinstance(node.op, ast.Not):
            return ast.UnaryOp(node.op, operand)
        return ast.parse(f"cutlass.Boolean({ast.unparse(operand)}) == False", mode="eval").body

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        assert isinstance(node.value, ast.Name)
        tensor = f"tensors[{mask_text.tensor_number(node.value.id)}]"
        places = [
            _inside(self.visit(place), f"{tensor}.shape[{dim}]")
            for dim, place in enumerate(mask_text.index_of(node))
        ]
        return ast.parse(f"{tensor}[{', '.join(places)}]", mode="eval").body


def _inside(place: ast.expr, size: str) -> str:
    """An index kept inside of its dimension; batch, head and numbers that count always are."""
    text = ast.unparse(place)
    if text in _INDICES[:2] or text == "0":
        return text
    bounded = f"cutlass.min({text}, {size} - 1)"
    return bounded if text in _INDICES else f"cutlass.max({bounded}, 0)"
