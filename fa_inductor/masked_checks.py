"""What the masked ops ask of their arguments and what they allocate, fake and real alike."""

from __future__ import annotations

import torch
from torch import Tensor

from . import mask_text, op_checks, op_memory
from .errors import DtypeError, ShapeError
from .masked_problem import QUERY_BLOCK, Blocks, MaskedCall, blocks_in, key_block


def check_call(call: MaskedCall) -> None:
    """Raise unless the metadata and the arguments form a masked attention problem."""
    op_checks.check_inputs(call.inputs.dense, call.problem, call.out_order)
    wanted = mask_text.tensors_in(call.mask)
    if len(call.mask_tensors) != wanted:
        raise ShapeError(
            f"The mask {call.mask!r} reads {wanted} tensors, got {len(call.mask_tensors)}."
        )
    ranks = mask_text.ranks_in(call.mask)
    for number, tensor in enumerate(call.mask_tensors):
        if tensor.dtype not in mask_text.TENSOR_DTYPES:
            raise DtypeError(
                f"t{number} of a mask must be of {[str(d) for d in mask_text.TENSOR_DTYPES]}, "
                f"got {tensor.dtype}."
            )
        if ranks.get(number, tensor.dim()) != tensor.dim():
            raise ShapeError(
                f"The mask {call.mask!r} reads t{number} with {ranks[number]} indices, got "
                f"{tuple(tensor.shape)}."
            )
    _check_blocks(call)
    tensors = {f"t{number}": tensor for number, tensor in enumerate(call.mask_tensors)}
    blocks = {f"blocks[{number}]": tensor for number, tensor in enumerate(call.blocks)}
    op_checks.check_devices({"q": call.q, **tensors, **blocks})


def _check_blocks(call: MaskedCall) -> None:
    if len(call.blocks) not in (4, 8):
        raise ShapeError(f"blocks must be 4 or 8 tensors of `mask_blocks`, got {len(call.blocks)}.")
    batch, heads, queries, keys = call.scores
    tile = key_block(int(call.q.shape[3]))
    rows, columns = blocks_in(queries, QUERY_BLOCK), blocks_in(keys, tile)
    for place in range(0, len(call.blocks), 4):
        sizes = (rows, columns) if place == 0 else (columns, rows)
        for name, tensor in zip(Blocks._fields, call.blocks[place : place + 4], strict=True):
            wanted = sizes[:1] if name.endswith("count") else sizes
            fits = tensor.dim() == 2 + len(wanted) and tuple(tensor.shape[2:]) == wanted
            if not fits or tensor.shape[0] not in (1, batch) or tensor.shape[1] not in (1, heads):
                raise ShapeError(
                    f"blocks of {QUERY_BLOCK} queries and {tile} keys: {name} must be "
                    f"({batch} or 1, {heads} or 1, {', '.join(map(str, wanted))}), got "
                    f"{tuple(tensor.shape)}."
                )
            if tensor.dtype != torch.int32:
                raise DtypeError(f"blocks: {name} must be int32, got {tensor.dtype}.")


def check_gradient(
    call: MaskedCall, grad_out: Tensor, grad_lse: Tensor | None, *saved: Tensor
) -> None:
    """`check_call`, and that the `saved` (out, lse) and their gradients fit."""
    check_call(call)
    op_checks.check_gradient(call.inputs.dense, call.problem, grad_out, grad_lse, *saved)
    if len(call.blocks) != 8:
        raise ShapeError("The gradient of a masked attention needs the blocks by key too, got 4.")


def outputs(call: MaskedCall) -> tuple[Tensor, Tensor]:
    return op_memory.outputs(call.q, call.v, call.out_order, True)


def gradients(call: MaskedCall, sink_grad: bool) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and sink; the last without an element if not wanted."""
    made = op_memory.gradients(call.q, call.k, call.v)
    return (*made, op_memory.optional_gradient(call.sink, sink_grad, call.q))
