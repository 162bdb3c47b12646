"""What FlashAttention-4 can run: its rows of the support table."""

from __future__ import annotations

import torch

from . import layout, symbolic
from . import support_row as check
from .spec import AttentionSpec
from .support_row import Defect, Row
from .target import TESTED_LIBRARIES, Target

FA4 = "flash-attn-4 4.0.0b36"

# (D, Dv) whose backward builds for sm_90a and was compared with float64 on an H200.
_SM90_BACKWARD_PAIRS = ((192, 128), (128, 64), (256, 128), (96, 64))


def _gqa_unequal_head_dims(spec: AttentionSpec, _: Target) -> str | None:
    if symbolic.same(*spec.heads) or symbolic.same(*spec.head_dims):
        return None
    heads, dims = (tuple(map(symbolic.text, pair)) for pair in (spec.heads, spec.head_dims))
    return f"{heads[0]} query heads on {heads[1]} with head_dim (q·k {dims[0]}, v {dims[1]})"


def _noncontiguous_hd256(spec: AttentionSpec, _: Target) -> str | None:
    if not symbolic.same(spec.head_dims[0], 256):
        return None
    if all(map(layout.is_contiguous_bshd, (spec.q, spec.k, spec.v))):
        return None
    return "head_dim 256 with inputs that are not contiguous (B, S, H, D)"


def _softcap_or_sink(spec: AttentionSpec, target: Target) -> str | None:
    return check.softcap(spec, target) or ("a sink" if spec.has_sink else None)


def _hd256_extras(spec: AttentionSpec, target: Target) -> str | None:
    value = _softcap_or_sink(spec, target)
    return f"{value} at head_dim 256" if value and symbolic.same(spec.head_dims[0], 256) else None


ROWS: tuple[Row, ...] = (
    Row("fa4", "device", "CUDA only", f"{FA4} interface.py", check.needs_gpu),
    Row(
        "fa4",
        "version",
        f"exactly {TESTED_LIBRARIES['flash-attn-4']}",
        "private functions of FA4 change between betas",
        check.needs_library("flash-attn-4"),
    ),
    Row(
        "fa4",
        "arch",
        "sm_80, sm_90, sm_10x, sm_12x",
        f"{FA4} interface.py",
        check.needs_family(8, 9, 10, 12),
    ),
    Row(
        "fa4",
        "backward",
        "forward only",
        f"{FA4} _flash_attn_bwd",
        check.needs_family(9, 10, 12),
        (8,),
        "bwd",
    ),
    Row(
        "fa4",
        "dtype",
        "float16, bfloat16",
        f"{FA4} interface.py",
        check.needs_dtype(torch.float16, torch.bfloat16),
    ),
    Row(
        "fa4",
        "head_dim",
        "multiples of 8 from 8 to 256, Dv <= D or Dv <= 128",
        f"{FA4} _validate_head_dims; larger Dv does not compile or fit in shared memory",
        check.needs_head_dims(
            lambda d, dv: (
                all(8 <= x <= 256 and x % 8 == 0 for x in (d, dv)) and (dv <= d or dv <= 128)
            )
        ),
        (9,),
    ),
    Row(
        "fa4",
        "head_dim",
        "D == Dv, or one of " + ", ".join(map(str, _SM90_BACKWARD_PAIRS)),
        f"{FA4} compiled for sm_90a: other pairs do not build or exceed shared memory",
        check.needs_head_dims(lambda d, dv: d == dv or (d, dv) in _SM90_BACKWARD_PAIRS),
        (9,),
        "bwd",
    ),
    Row(
        "fa4",
        "head_dim",
        "D % 32 is 0 or 24, or 128 < D <= 192: else dQ is silently wrong",
        "flash-attention#2896, measured on an H200",
        check.needs_head_dims(lambda d, dv: d % 32 in (0, 24) or 128 < d <= 192),
        (9,),
        "bwd",
        Defect("flash-attn-4", "4.0.0b16", "4.0.0b36"),
    ),
    Row(
        "fa4",
        "head_dim",
        "D and Dv multiples of 32 in the backward; others were wrong and are not measured since",
        "flash-attention#2698",
        check.needs_head_dims(lambda d, dv: d % 32 == dv % 32 == 0),
        (10, 12),
        "bwd",
    ),
    Row(
        "fa4",
        "head_dim",
        "multiples of 8 from 8 to 128, or (192, 128), or (256, 256)",
        f"{FA4} _validate_head_dims",
        check.needs_head_dims(
            lambda d, dv: (
                (d, dv) in ((192, 128), (256, 256))
                or all(8 <= x <= 128 and x % 8 == 0 for x in (d, dv))
            )
        ),
        (10,),
    ),
    Row(
        "fa4",
        "head_dim",
        "multiples of 8 from 8 to 128",
        "not validated by FA4 on this arch; what its own tests cover",
        check.needs_head_dims(lambda d, dv: all(8 <= x <= 128 and x % 8 == 0 for x in (d, dv))),
        (8, 12),
    ),
    Row(
        "fa4",
        "GQA head_dim",
        "grouped queries need equal head dims in the backward",
        f"{FA4} flash_bwd_sm90.py",
        _gqa_unequal_head_dims,
        (9,),
        "bwd",
    ),
    Row(
        "fa4",
        "layout",
        "contiguous (B, S, H, D) only",
        "flash-attention#2886, #2665, #2541",
        _noncontiguous_hd256,
        (10,),
    ),
    Row(
        "fa4",
        "deterministic",
        "no deterministic backward",
        f"{FA4} _flash_attn_bwd",
        check.deterministic,
        (12,),
        "bwd",
    ),
    Row(
        "fa4",
        "size",
        f"batch and heads up to {check.LARGEST_GRID}",
        "measured on an H200: the launch fails",
        check.large_grid,
    ),
    Row(
        "fa4",
        "mask",
        "masks that only show and hide",
        "FA4's mask_mod; what is added to the scores is left to cuDNN",
        check.mask_that_adds,
    ),
    Row(
        "fa4",
        "mask",
        "only where its blocks were compared with float64: sm_90",
        "run on an H200; FA4 has other tiles elsewhere, and no backward with masks on sm_12x",
        check.any_mask,
        (8, 10, 12),
    ),
    Row(
        "fa4",
        "mask",
        "no deterministic backward with block lists",
        f"{FA4} flash_bwd_sm90.py",
        check.deterministic_with_mask,
        (9,),
        "bwd",
    ),
    Row("fa4", "dropout", "FA4 has no dropout", f"{FA4} flash_attn_func", check.dropout),
    Row(
        "fa4",
        "causal",
        "top-left causal needs Sq == Sk, FA4 aligns bottom-right",
        f"{FA4} mask.py",
        check.top_left_with_unequal_lengths,
    ),
    Row(
        "fa4",
        "window",
        "bounds from 0 on: a negative one is no bound or an empty band",
        f"{FA4} _resolve_causal_local_window",
        check.negative_window,
    ),
    Row(
        "fa4",
        "softcap, sink",
        "neither at head_dim 256",
        f"{FA4} _flash_attn_bwd",
        _hd256_extras,
        (10,),
        "bwd",
    ),
    Row(
        "fa4",
        "softcap, sink",
        "neither in the backward",
        f"{FA4} _flash_attn_bwd",
        _softcap_or_sink,
        (12,),
        "bwd",
    ),
    Row(
        "fa4",
        "scale",
        "a positive number: the row maximum is taken before scaling",
        f"{FA4} softmax.py",
        check.scale_not_positive,
    ),
    Row(
        "fa4",
        "sdpa_kernel",
        "runs where FLASH_ATTENTION is first",
        check.SDPA_KERNEL,
        check.pinned_unless_first("FLASH_ATTENTION"),
    ),
)
