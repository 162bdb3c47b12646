"""The custom ops for attention whose mask is an expression over its places.

`torch.ops.fa_inductor.attention_masked(q, k, v, mask, mask_tensors, blocks, scale, out_order,
deterministic, kernel, sink, softcap)` returns (out, lse); `attention_masked_backward(...)` the
gradients of q, k, v and sink. Below autograd they become `attention_masked_forward` and
`attention_masked_gradients`, as in `ops.py`.

q, k, v, scale, out_order, kernel, sink, softcap, out, lse and gradients: as in `ops.py`.
mask: which (b, h, i, j) are visible, in the language of `fa_inductor.mask_text`.
mask_tensors: what it reads as t0, t1, ...; bool, uint8, int32 or int64.
blocks: the four results of `mask_blocks` for blocks of `masked_problem.QUERY_BLOCK` queries and
    `key_block(D)` keys, and, for a backward, its four by key. They must say what the mask says:
    a block that is not listed is never looked at. Nobody can check that without waiting for the
    GPU.

A row without a visible key gives 0, lse -inf (the sink's logit with a sink), and no gradient.
"""

from __future__ import annotations

from .masked_calls import MASKED
from .variant_ops import register

(
    attention_masked,
    attention_masked_forward,
    attention_masked_backward,
    attention_masked_gradients,
) = register(
    MASKED,
    "str mask, Tensor[] mask_tensors, Tensor[] blocks, float? scale",
    ", str out_order",
    "Tensor? sink=None, float softcap=0.0",
)
