"""The custom ops for attention over sequences of different lengths, packed without padding.

`torch.ops.fa_inductor.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
max_seqlen_k, scale, causal, deterministic, kernel, ...)` returns (out, lse);
`attention_varlen_backward(...)` the gradients of q, k, v and sink. Below autograd they become
`attention_varlen_forward` and `attention_varlen_gradients`, as in `ops.py`.

What the tensors are: `fa_inductor.varlen_problem.VarlenInputs`; the numbers:
`fa_inductor.problem.Problem`, with causal "none" or "bottom_right", per sequence.
out: (Tq, Hq, Dv), q's dtype, contiguous.
lse: (Hq, Tq), float32 (float64 for float64), contiguous, natural logarithm, the sink taken in.
Gradients: contiguous, of their input's shape and dtype; that of the sink (0,) if not asked for.

A row without a visible key gives 0, lse -inf (the sink's logit with a sink), and no gradient.
The bounds must hold and the lengths add up to Tq and Tk: nobody can check that without waiting
for the GPU. Autocast leaves the op alone, as it leaves FlashAttention-4.
"""

from __future__ import annotations

from .variant_ops import register
from .varlen_calls import VARLEN

(
    attention_varlen,
    attention_varlen_forward,
    attention_varlen_backward,
    attention_varlen_gradients,
) = register(
    VARLEN,
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float? scale, str causal",
    "",
    "Tensor? sink=None, int? window_left=None, int? window_right=None, float softcap=0.0",
)
