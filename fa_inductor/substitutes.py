"""What Dynamo traces in place of FlashAttention-4's functions: our ops, or a graph break.

Each substitute has the original's signature. Arguments that the ops do not carry break the graph
with their name, and then the original runs, eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import (
    ops,  # noqa: F401  (registers an op that the substitutes call)
    varlen_ops,  # noqa: F401  (another)
)
from .spec import BSHD

# Arguments that the ops do not carry, with the value that means "unused".
NOT_CARRIED: dict[str, Any] = {
    "qv": None,
    "gather_kv_indices": None,
    "num_splits": 1,
    "pack_gqa": None,
    "score_mod": None,
    "score_mod_bwd": None,
    "mask_mod": None,
    "aux_tensors": None,
    "aux_scalars": None,
    "block_sparse_tensors": None,
    "block_sparse_tensors_bwd": None,
    "gather_bwd_recompute_p": False,
    "gather_bwd_token_chunk": None,
}
VARLEN_NOT_CARRIED: dict[str, Any] = {
    **{name: value for name, value in NOT_CARRIED.items() if name != "block_sparse_tensors_bwd"},
    "min_seqlen_k": None,
    "page_table": None,
    "scheduler_metadata": None,
    "seqlen_k_per_split": None,
    "disable_scheduler_metadata": False,
}

_WINDOW = "window_size with one negative bound"
_SOFTCAP = "a softcap that is not a number from 0 on"
_MLA = "k is v, head_dim 512"
_AUTOCAST = "under autocast to another dtype"
_LENGTHS = "neither packed with cu_seqlens_q and cu_seqlens_k alone nor padded without them"
_OTHER = (_WINDOW, _SOFTCAP, _MLA, _AUTOCAST, _LENGTHS)


def _graph_breaks(original: Callable[..., Any], not_carried: Mapping[str, Any]) -> dict[str, Any]:
    """`original` for each thing that the ops do not carry, breaking the graph with that reason."""
    reasons = {name: f"{name}=..." for name in not_carried} | {name: name for name in _OTHER}
    prefix = f"fa_inductor: {original.__name__}"
    return {
        name: torch._dynamo.disable(original, reason=f"{prefix}({text}) is not carried by its op")
        for name, text in reasons.items()
    }


def _not_carried(
    given: Mapping[str, Any],
    not_carried: Mapping[str, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: tuple[int | None, int | None],
    softcap: Any,
) -> str | None:
    """The key in `_graph_breaks` of the first thing that the ops do not carry."""
    for name, unused in not_carried.items():
        value = given[name]
        if value is not unused and not (
            isinstance(value, (bool, int, float, tuple)) and value == unused
        ):
            return name
    if any(side is not None and side < 0 for side in window):
        return _WINDOW
    if not isinstance(softcap, (int, float)) or softcap < 0:
        return _SOFTCAP
    if k is v and v.shape[-1] == 512:  # FA4 takes this as multi-head latent attention
        return _MLA
    device = q.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != q.dtype:
        return _AUTOCAST  # the op would cast, FA4 does not
    return None


def _window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """The bounds as FA4 resolves them, None where unbounded.

    Two negative bounds are no window; one alone stays as it is, and hides keys. causal replaces
    the right bound.
    """
    left, right = window_size[0], window_size[1]
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    return left, None if causal else right


def _needs_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _results(out: Tensor, lse: Tensor, return_lse: bool, needs_grad: bool) -> Any:
    """FA4 gives an lse that no gradient flows through when it was not asked for one."""
    if return_lse:
        return out, lse
    return out, lse.detach() if needs_grad else None


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float,
    sink: Tensor | None,
    deterministic: bool,
    return_lse: bool,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
) -> Any:
    """FA4's results for (B, S, H, D) tensors."""
    kind = "bottom_right" if causal else "none"
    extras = (None, sink, seqlens_q, seqlens_k, None, 0.0, *window, float(softcap))
    needs_grad = _needs_grad(q, k, v, sink)
    if not (return_lse or needs_grad):
        op = torch.ops.fa_inductor.attention_inference
        return op(q, k, v, scale, kind, BSHD, "fa4", *extras), None
    out, lse = torch.ops.fa_inductor.attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        scale,
        kind,
        BSHD,
        deterministic,
        "fa4",
        *extras,
    )
    return _results(out.transpose(1, 2), lse, return_lse, needs_grad)


def make_flash_attn_func(original: Callable[..., Any]) -> Callable[..., Any]:
    eager = _graph_breaks(original, NOT_CARRIED)

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Any = None,
        gather_kv_indices: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Any = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        aux_tensors: Any = None,
        aux_scalars: Any = None,
        block_sparse_tensors: Any = None,
        block_sparse_tensors_bwd: Any = None,
        return_lse: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> Any:
        """FA4's own contract: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv);
        returns (out (B, Sq, Hq, Dv), lse (B, Hq, Sq) or None)."""
        given = {
            "qv": qv,
            "gather_kv_indices": gather_kv_indices,
            "num_splits": num_splits,
            "pack_gqa": pack_gqa,
            "score_mod": score_mod,
            "score_mod_bwd": score_mod_bwd,
            "mask_mod": mask_mod,
            "aux_tensors": aux_tensors,
            "aux_scalars": aux_scalars,
            "block_sparse_tensors": block_sparse_tensors,
            "block_sparse_tensors_bwd": block_sparse_tensors_bwd,
            "gather_bwd_recompute_p": gather_bwd_recompute_p,
            "gather_bwd_token_chunk": gather_bwd_token_chunk,
        }
        carried = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "learnable_sink": learnable_sink,
            "softcap": softcap,
            "deterministic": deterministic,
            "return_lse": return_lse,
        }
        window = _window(window_size, causal)
        reason = _not_carried(given, NOT_CARRIED, q, k, v, window, softcap)
        if reason is not None:
            return eager[reason](q, k, v, **given, **carried)
        numbers = (softmax_scale, causal, window, softcap)
        return _dense(q, k, v, *numbers, learnable_sink, deterministic, return_lse)

    return flash_attn_func


def make_flash_attn_varlen_func(original: Callable[..., Any]) -> Callable[..., Any]:
    eager = _graph_breaks(original, VARLEN_NOT_CARRIED)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Any = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: Any = None,
        max_seqlen_k: Any = None,
        min_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        gather_kv_indices: Any = None,
        page_table: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Any = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        block_sparse_tensors: Any = None,
        aux_tensors: Any = None,
        aux_scalars: Any = None,
        return_lse: bool = False,
        scheduler_metadata: Any = None,
        seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> Any:
        """FA4's own contract: with cu_seqlens (batch + 1,), q (Tq, Hq, D), k (Tk, Hkv, D) and
        v (Tk, Hkv, Dv) give (out (Tq, Hq, Dv), lse (Hq, Tq) or None); else as `flash_attn_func`,
        with seqused (batch,) of the rows."""
        given = {
            "qv": qv,
            "min_seqlen_k": min_seqlen_k,
            "gather_kv_indices": gather_kv_indices,
            "page_table": page_table,
            "num_splits": num_splits,
            "pack_gqa": pack_gqa,
            "score_mod": score_mod,
            "score_mod_bwd": score_mod_bwd,
            "mask_mod": mask_mod,
            "block_sparse_tensors": block_sparse_tensors,
            "aux_tensors": aux_tensors,
            "aux_scalars": aux_scalars,
            "scheduler_metadata": scheduler_metadata,
            "seqlen_k_per_split": seqlen_k_per_split,
            "disable_scheduler_metadata": disable_scheduler_metadata,
            "gather_bwd_recompute_p": gather_bwd_recompute_p,
            "gather_bwd_token_chunk": gather_bwd_token_chunk,
        }
        carried = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "seqused_q": seqused_q,
            "seqused_k": seqused_k,
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "learnable_sink": learnable_sink,
            "softcap": softcap,
            "deterministic": deterministic,
            "return_lse": return_lse,
        }
        window = _window(window_size, causal)
        reason = _not_carried(given, VARLEN_NOT_CARRIED, q, k, v, window, softcap)
        if reason is not None:
            return eager[reason](q, k, v, **given, **carried)
        if cu_seqlens_q is None and cu_seqlens_k is None:
            numbers = (softmax_scale, causal, window, softcap)
            flags = (learnable_sink, deterministic, return_lse)
            return _dense(q, k, v, *numbers, *flags, seqused_q, seqused_k)
        if (
            cu_seqlens_q is None
            or cu_seqlens_k is None
            or seqused_q is not None
            or seqused_k is not None
        ):
            return eager[_LENGTHS](q, k, v, **given, **carried)
        out, lse = torch.ops.fa_inductor.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            _bound(max_seqlen_q),
            _bound(max_seqlen_k),
            softmax_scale,
            "bottom_right" if causal else "none",
            deterministic,
            "fa4",
            learnable_sink,
            *window,
            float(softcap),
        )
        return _results(out, lse, return_lse, _needs_grad(q, k, v, learnable_sink))

    return flash_attn_varlen_func


def _bound(max_seqlen: Any) -> Any:
    """An upper bound of the lengths, 0 where it is not known on the host.

    FA4 only sizes its work by it, and takes Tq and Tk where it is None. A tensor would have to
    be waited for, so it is not read.
    """
    return 0 if max_seqlen is None or isinstance(max_seqlen, Tensor) else max_seqlen
