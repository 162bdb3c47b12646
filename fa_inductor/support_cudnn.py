"""What cuDNN's fused attention can run: its rows of the support table.

Limits without a library version were measured on an H200 with cuDNN 9.19.0, or are refusals in
cudnn-frontend 1.32's own words. A version is that of the library that is loaded.
"""

from __future__ import annotations

import functools

import torch

from . import support_row as check
from . import symbolic
from .spec import AttentionSpec
from .support_row import Check, Defect, Row
from .target import TESTED_LIBRARIES, Target

FRONTEND = "cudnn-frontend 1.32"
MEASURED = "measured on an H200, cuDNN 9.19.0"
_OLDEST = (9, 13, 0)


@functools.cache
def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def _version(target: Target) -> tuple[int, ...]:
    version = target.libraries.get("cudnn", "")
    return _numbers(version) if version else ()


def _too_old(_: AttentionSpec, target: Target) -> str | None:
    version = _version(target)
    if not version:
        return "this PyTorch has no cuDNN"
    return f"cuDNN {target.libraries['cudnn']}" if version < _OLDEST else None


def _between(first: tuple[int, ...], last: tuple[int, ...], objection: Check) -> Check:
    """`objection`, on cuDNN from `first` to `last`."""

    def bounded(spec: AttentionSpec, target: Target) -> str | None:
        if not first <= _version(target) <= last:
            return None
        value = objection(spec, target)
        return value and f"{value} with cuDNN {target.libraries['cudnn']}"

    return bounded


def _length_one(spec: AttentionSpec, _: Target) -> str | None:
    """The size that a symbolic length has never is 1: Dynamo makes graphs of their own for it."""
    return "Sq = Sk = 1" if all(symbolic.same(size, 1) for size in spec.lengths) else None


def _single_query(spec: AttentionSpec, _: Target) -> str | None:
    return "Sq = 1" if symbolic.same(spec.lengths[0], 1) else None


def _single_query_with_sink(spec: AttentionSpec, target: Target) -> str | None:
    return (
        f"{value} with a sink" if spec.has_sink and (value := _single_query(spec, target)) else None
    )


def _lengths_beside(spec: AttentionSpec, _: Target) -> str | None:
    if not spec.has_seqlens:
        return None
    if spec.has_sink:
        return "a sink with sequence lengths"
    return "a gradient of the mask with sequence lengths" if spec.bias_needs_grad else None


def _more_queries_than_keys(spec: AttentionSpec) -> str | None:
    sq, sk = spec.lengths
    if symbolic.guarded(sq <= sk):
        return None
    return f"Sq {symbolic.text(sq)} > Sk {symbolic.text(sk)}"


def _band_with_more_queries(spec: AttentionSpec, _: Target) -> str | None:
    left, right = spec.band
    if spec.causal == "top_left" and left is None:
        return None
    if left is None and right is None:
        return None
    return _more_queries_than_keys(spec)


def _bottom_right_extras(spec: AttentionSpec, _: Target) -> str | None:
    """Bias and dropout need a band that is top-left, or is both."""
    if not spec.mask and not spec.dropout_p:
        return None
    if spec.band == (None, None) or spec.causal == "top_left":
        return None
    sq, sk = spec.lengths
    if symbolic.guarded_same(sq, sk) and not spec.has_seqlens:
        return None
    return f"bottom-right with Sq {symbolic.text(sq)} and Sk {symbolic.text(sk)}"


def _large_mask(spec: AttentionSpec, _: Target) -> str | None:
    if spec.bias is None:
        return None
    sizes = [symbolic.as_int(n) for n in spec.bias.shape if symbolic.is_static(n)]
    elements = functools.reduce(lambda a, b: a * b, sizes, 1)
    return f"{spec.mask}: {elements} elements" if elements >= 1 << 31 else None


def _dropout_of_all(spec: AttentionSpec, _: Target) -> str | None:
    return "dropout_p=1.0" if spec.dropout_p >= 1.0 else None


def _deterministic_bias_gradient(spec: AttentionSpec, _: Target) -> str | None:
    return "a gradient of the mask" if spec.deterministic and spec.bias_needs_grad else None


def _half_filled_tile(spec: AttentionSpec, _: Target) -> str | None:
    if spec.causal != "none":
        return None
    length = spec.lengths[0]
    if symbolic.is_static(length):
        return f"Sq {length}" if symbolic.as_int(length) % 128 == 64 else None
    return f"Sq {symbolic.text(length)}" if symbolic.guarded(length % 128 == 64) else None


def _two_sided_window(spec: AttentionSpec, _: Target) -> str | None:
    return (
        f"window {spec.window}" if spec.window != (None, None) and spec.causal == "none" else None
    )


def _ragged_keys(spec: AttentionSpec, _: Target) -> str | None:
    length = spec.lengths[1]
    return None if symbolic.divides(128, length) else f"Sk {symbolic.text(length)}"


ROWS: tuple[Row, ...] = (
    Row("cudnn", "device", "CUDA only", FRONTEND, check.needs_gpu),
    Row(
        "cudnn",
        "frontend",
        f"exactly {TESTED_LIBRARIES['nvidia-cudnn-frontend']}",
        "raw-pointer execution is private to the frontend",
        check.needs_library("nvidia-cudnn-frontend"),
    ),
    Row(
        "cudnn", "version", "cuDNN 9.13 or newer", "sinks since 9.13; older ones not read", _too_old
    ),
    Row(
        "cudnn",
        "version",
        "9.14.0: no two-sided window",
        "cuDNN release notes: wrong for Sk > 1024",
        _between((9, 14, 0), (9, 14, 0), _two_sided_window),
        defect=Defect("cudnn", "9.14.0", "9.14.0"),
    ),
    Row(
        "cudnn",
        "version",
        "up to 9.15.0: Sk a multiple of 128 in the backward",
        "cuDNN release notes: illegal memory access",
        _between((9, 13, 0), (9, 15, 0), _ragged_keys),
        passes="bwd",
        defect=Defect("cudnn", "9.0", "9.15.0"),
    ),
    Row(
        "cudnn",
        "version",
        "before 9.26: Sq % 128 != 64 in a backward that is not causal: dQ is NaN once a row's "
        "lse is below -88.7",
        f"pytorch#196678; {MEASURED}",
        _between((9, 13, 0), (9, 25, 99), _half_filled_tile),
        (9,),
        "bwd",
        Defect("cudnn", "9.0", "9.25.99"),
    ),
    Row(
        "cudnn",
        "version",
        "9.25 and 9.26: no backward of a single query",
        "cudnn-frontend#1072",
        _between((9, 25, 0), (9, 26, 99), _single_query),
        (9,),
        "bwd",
        Defect("cudnn", "9.25", "9.26.99"),
    ),
    Row(
        "cudnn",
        "version",
        "9.19 to 9.25.0: no single query",
        "pytorch#193893: silently wrong (9.24.1 is not, and is not told apart)",
        _between((9, 19, 0), (9, 25, 0), _single_query),
        (10,),
        defect=Defect("cudnn", "9.19", "9.25.0"),
    ),
    Row(
        "cudnn",
        "deterministic",
        "before 9.18: no deterministic backward",
        "cuDNN release notes",
        _between((9, 13, 0), (9, 17, 99), check.deterministic),
        (10,),
        "bwd",
    ),
    Row(
        "cudnn", "arch", "sm_80, sm_90, sm_10x, sm_12x", FRONTEND, check.needs_family(8, 9, 10, 12)
    ),
    Row(
        "cudnn",
        "dtype",
        "float16, bfloat16",
        FRONTEND,
        check.needs_dtype(torch.float16, torch.bfloat16),
    ),
    Row(
        "cudnn",
        "head_dim",
        "multiples of 8 from 8 to 256",
        f"{FRONTEND}; {MEASURED}",
        check.needs_head_dims(lambda d, dv: all(8 <= x <= 256 and x % 8 == 0 for x in (d, dv))),
        (9,),
    ),
    Row(
        "cudnn",
        "head_dim",
        "multiples of 8 from 8 to 128, or (192, 128)",
        "cuDNN developer guide, attention",
        check.needs_head_dims(
            lambda d, dv: (
                (d, dv) == (192, 128) or all(8 <= x <= 128 and x % 8 == 0 for x in (d, dv))
            )
        ),
        (10,),
    ),
    Row(
        "cudnn",
        "head_dim",
        "multiples of 8 from 8 to 128",
        "cuDNN developer guide, attention",
        check.needs_head_dims(lambda d, dv: all(8 <= x <= 128 and x % 8 == 0 for x in (d, dv))),
        (8, 12),
    ),
    Row("cudnn", "length", "not one query on one key", FRONTEND, _length_one),
    Row(
        "cudnn",
        "sink",
        "more than one query",
        FRONTEND,
        _single_query_with_sink,
    ),
    Row(
        "cudnn",
        "lengths",
        "neither a sink nor a gradient of the mask beside sequence lengths",
        "a sequence without keys gives NaN before 9.25, which would reach what all share",
        _lengths_beside,
    ),
    Row(
        "cudnn",
        "causal, window",
        "bottom-right bands and windows need Sq <= Sk",
        FRONTEND,
        _band_with_more_queries,
    ),
    Row(
        "cudnn",
        "causal, window",
        "no mask and no dropout beside a bottom-right band",
        FRONTEND,
        _bottom_right_extras,
    ),
    Row("cudnn", "window", "bounds from 0 on", FRONTEND, check.negative_window),
    Row(
        "cudnn",
        "size",
        f"batch and heads up to {check.LARGEST_GRID}",
        f"{MEASURED}: the launch fails",
        check.large_grid,
    ),
    Row("cudnn", "mask", check.MASK_DTYPE, "fa_inductor/patterns", check.mask_of_another_dtype),
    Row("cudnn", "mask", "masks that the op can take", "fa_inductor/patterns", check.unknown_mask),
    Row("cudnn", "mask", "fewer than 2^31 elements", "pytorch#147585, not measured", _large_mask),
    Row(
        "cudnn",
        "mask",
        "no deterministic gradient of the mask",
        "its sum over batch and heads is not measured to repeat",
        _deterministic_bias_gradient,
        passes="bwd",
    ),
    Row("cudnn", "dropout", "below 1", "1 / (1 - p) is infinite", _dropout_of_all),
    Row("cudnn", "softcap", "no softcap", FRONTEND, check.softcap),
    Row(
        "cudnn",
        "sdpa_kernel",
        "runs where CUDNN_ATTENTION is first",
        check.SDPA_KERNEL,
        check.pinned_unless_first("CUDNN_ATTENTION"),
    ),
)
