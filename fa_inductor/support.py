"""The support table: which kernel can run which attention, as data.

Dispatch, `explain`'s reasons, `fa-inductor doctor`, the README's matrix and test ids are all
made from `ROWS`. A row is one limit of one kernel with the source it was read in; a kernel can
run a spec when no row objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from . import layout, symbolic
from .spec import AttentionSpec
from .target import TESTED_LIBRARIES, Target

FA4 = "flash-attn-4 4.0.0b36"
Check = Callable[[AttentionSpec, Target], "str | None"]


@dataclass(frozen=True)
class Row:
    """One limit.

    kernel: the kernel that has it.
    feature: what it is about, in a word or two.
    limit: what is possible, for people.
    source: where the limit was read or measured.
    objection: the value in a spec that breaks the limit, as text, or None.
    families: major compute capabilities it holds on; empty means every one.
    passes: "fwd", "bwd" or "fwd+bwd": a bwd row only bites when a backward can be asked for.
    """

    kernel: str
    feature: str
    limit: str
    source: str
    objection: Check
    families: tuple[int, ...] = ()
    passes: str = "fwd+bwd"

    def reason(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why this row keeps its kernel from running `spec` on `target`, or None."""
        if self.families and target.family not in self.families:
            return None
        if self.passes == "bwd" and not spec.needs_grad:
            return None
        value = self.objection(spec, target)
        return None if value is None else f"{value} ({self.limit}; {self.source})"


def _device(spec: AttentionSpec, target: Target) -> str | None:
    return None if target.family else f"device {spec.q.device.type}"


def _library(name: str) -> Check:
    def objection(_: AttentionSpec, target: Target) -> str | None:
        version = target.libraries.get(name, "")
        if version == TESTED_LIBRARIES[name]:
            return None
        return f"{name} {version}" if version else f"{name} is not installed"

    return objection


def _family(*families: int) -> Check:
    def objection(_: AttentionSpec, target: Target) -> str | None:
        return None if not target.family or target.family in families else target.arch

    return objection


def _dtype(*allowed: torch.dtype) -> Check:
    def objection(spec: AttentionSpec, _: Target) -> str | None:
        return None if spec.dtype in allowed else f"dtype {_name(spec.dtype)}"

    return objection


def _always(value: str) -> Check:
    return lambda spec, target: value


def _head_dims(allowed: Callable[[int, int], bool]) -> Check:
    def objection(spec: AttentionSpec, _: Target) -> str | None:
        if not all(map(symbolic.is_static, spec.head_dims)):
            return f"head_dim {', '.join(map(symbolic.text, spec.head_dims))} is symbolic"
        dim, dim_v = map(symbolic.as_int, spec.head_dims)
        if allowed(dim, dim_v):
            return None
        return f"head_dim {dim}" if dim == dim_v else f"head_dim (q·k {dim}, v {dim_v})"

    return objection


def _gqa_unequal_head_dims(spec: AttentionSpec, _: Target) -> str | None:
    if symbolic.same(*spec.heads) or symbolic.same(*spec.head_dims):
        return None
    heads, dims = (tuple(map(symbolic.text, pair)) for pair in (spec.heads, spec.head_dims))
    return f"{heads[0]} query heads on {heads[1]} with head_dim (q·k {dims[0]}, v {dims[1]})"


def _mask(spec: AttentionSpec, _: Target) -> str | None:
    return spec.mask


def _dropout(spec: AttentionSpec, _: Target) -> str | None:
    return f"dropout_p={spec.dropout_p} > 0" if spec.dropout_p else None


def _causal_top_left(spec: AttentionSpec, _: Target) -> str | None:
    sq, sk = spec.lengths
    if spec.causal != "top_left" or symbolic.guarded_same(sq, sk):
        return None
    return f"is_causal with Sq {symbolic.text(sq)} and Sk {symbolic.text(sk)}"


def _scale(spec: AttentionSpec, _: Target) -> str | None:
    if spec.scale is None or symbolic.guarded(spec.scale > 0):
        return None
    return f"scale {spec.scale}"


def _deterministic(spec: AttentionSpec, _: Target) -> str | None:
    return "a deterministic backward" if spec.deterministic else None


def _noncontiguous_hd256(spec: AttentionSpec, _: Target) -> str | None:
    if not symbolic.same(spec.head_dims[0], 256):
        return None
    if all(map(layout.is_contiguous_bshd, (spec.q, spec.k, spec.v))):
        return None
    return "head_dim 256 with inputs that are not contiguous (B, S, H, D)"


def _pinned(sdp_backend: str) -> Check:
    def objection(spec: AttentionSpec, _: Target) -> str | None:
        if spec.sdp_backends is None or spec.sdp_backends[:1] == (sdp_backend,):
            return None
        return f"sdpa_kernel({', '.join(spec.sdp_backends) or 'nothing'})"

    return objection


_SDPA_KERNEL = "torch.nn.attention.sdpa_kernel, set by the user"
_NO_MASK = "no attn_mask in this version of fa_inductor"

# (D, Dv) whose backward builds for sm_90a and was compared with float64 on an H200.
_SM90_BACKWARD_PAIRS = ((192, 128), (128, 64), (256, 128), (96, 64))

ROWS: tuple[Row, ...] = (
    Row("fa4", "device", "CUDA only", f"{FA4} interface.py", _device),
    Row(
        "fa4",
        "version",
        f"exactly {TESTED_LIBRARIES['flash-attn-4']}",
        "private functions of FA4 change between betas",
        _library("flash-attn-4"),
    ),
    Row(
        "fa4", "arch", "sm_80, sm_90, sm_10x, sm_12x", f"{FA4} interface.py", _family(8, 9, 10, 12)
    ),
    Row(
        "fa4", "backward", "forward only", f"{FA4} _flash_attn_bwd", _family(9, 10, 12), (8,), "bwd"
    ),
    Row(
        "fa4",
        "dtype",
        "float16, bfloat16",
        f"{FA4} interface.py",
        _dtype(torch.float16, torch.bfloat16),
    ),
    Row(
        "fa4",
        "head_dim",
        "multiples of 8 from 8 to 256, Dv <= D or Dv <= 128",
        f"{FA4} _validate_head_dims; larger Dv does not compile or fit in shared memory",
        _head_dims(
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
        _head_dims(lambda d, dv: d == dv or (d, dv) in _SM90_BACKWARD_PAIRS),
        (9,),
        "bwd",
    ),
    Row(
        "fa4",
        "head_dim",
        "D % 32 is 0 or 24, or 128 < D <= 192: else dQ is silently wrong",
        "flash-attention#2896, measured on an H200",
        _head_dims(lambda d, dv: d % 32 in (0, 24) or 128 < d <= 192),
        (9,),
        "bwd",
    ),
    Row(
        "fa4",
        "head_dim",
        "D and Dv multiples of 32 in the backward; others were wrong and are not measured since",
        "flash-attention#2698",
        _head_dims(lambda d, dv: d % 32 == dv % 32 == 0),
        (10, 12),
        "bwd",
    ),
    Row(
        "fa4",
        "head_dim",
        "multiples of 8 from 8 to 128, or (192, 128), or (256, 256)",
        f"{FA4} _validate_head_dims",
        _head_dims(
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
        _head_dims(lambda d, dv: all(8 <= x <= 128 and x % 8 == 0 for x in (d, dv))),
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
        _deterministic,
        (12,),
        "bwd",
    ),
    Row("fa4", "mask", _NO_MASK, "FA4 takes masks as mask_mod only", _mask),
    Row("fa4", "dropout", "FA4 has no dropout", f"{FA4} flash_attn_func", _dropout),
    Row(
        "fa4",
        "causal",
        "top-left causal needs Sq == Sk, FA4 aligns bottom-right",
        f"{FA4} mask.py",
        _causal_top_left,
    ),
    Row(
        "fa4",
        "scale",
        "a positive number: the row maximum is taken before scaling",
        f"{FA4} softmax.py",
        _scale,
    ),
    Row(
        "fa4",
        "sdpa_kernel",
        "runs where FLASH_ATTENTION is first",
        _SDPA_KERNEL,
        _pinned("FLASH_ATTENTION"),
    ),
    Row(
        "cudnn",
        "kernel",
        "not carried by this version of fa_inductor",
        "fa_inductor/kernels",
        _always("kernel cudnn"),
    ),
    Row("reference", "mask", _NO_MASK, "fa_inductor/kernels/reference.py", _mask),
    Row(
        "reference",
        "dropout",
        "no dropout in this version of fa_inductor",
        "fa_inductor/kernels/reference.py",
        _dropout,
    ),
    Row(
        "reference",
        "dtype",
        "float16, bfloat16, float32, float64",
        "fa_inductor/kernels/reference.py",
        _dtype(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ),
    Row("reference", "sdpa_kernel", "runs where nothing is pinned", _SDPA_KERNEL, _pinned("")),
)


def rows_of(kernel: str, extra: Sequence[Row] = ()) -> tuple[Row, ...]:
    """The rows of one kernel; `extra` are a plugin's own."""
    return tuple(row for row in (*ROWS, *extra) if row.kernel == kernel)


def reasons_against(
    kernel: str, spec: AttentionSpec, target: Target, extra: Sequence[Row] = ()
) -> list[str]:
    """Every reason why `kernel` cannot run `spec` on `target`; empty when it can."""
    found = (row.reason(spec, target) for row in rows_of(kernel, extra))
    return [reason for reason in found if reason is not None]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
