"""One row of the support table, and the checks that rows are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from packaging.version import Version

from . import symbolic
from .spec import AttentionSpec
from .target import TESTED_LIBRARIES, Target

LARGEST_GRID = 65535  # CUDA programming guide, compute capabilities: blocks along y and z

Check = Callable[[AttentionSpec, Target], "str | None"]


@dataclass(frozen=True)
class Defect:
    """Versions of a library, of `target.TESTED_LIBRARIES`, that have a fault: first to last."""

    library: str
    first: str
    last: str

    def is_in(self, target: Target) -> bool:
        installed = target.libraries.get(self.library, "")
        if not installed:
            return False
        return Version(self.first) <= Version(installed) <= Version(self.last)


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
    defect: the versions in which going past the limit is silently wrong or faults, not refused.
    """

    kernel: str
    feature: str
    limit: str
    source: str
    objection: Check
    families: tuple[int, ...] = ()
    passes: str = "fwd+bwd"
    defect: Defect | None = None

    def reason(self, spec: AttentionSpec, target: Target) -> str | None:
        """Why this row keeps its kernel from running `spec` on `target`, or None."""
        if self.families and target.family not in self.families:
            return None
        if self.passes == "bwd" and not spec.needs_grad:
            return None
        value = self.objection(spec, target)
        return None if value is None else f"{value} ({self.limit}; {self.source})"


def needs_gpu(spec: AttentionSpec, target: Target) -> str | None:
    return None if target.family else f"device {spec.q.device.type}"


def needs_library(name: str) -> Check:
    """Exactly the tested version."""

    def objection(_: AttentionSpec, target: Target) -> str | None:
        version = target.libraries.get(name, "")
        if version == TESTED_LIBRARIES[name]:
            return None
        return f"{name} {version}" if version else f"{name} is not installed"

    return objection


def needs_family(*families: int) -> Check:
    def objection(_: AttentionSpec, target: Target) -> str | None:
        return None if not target.family or target.family in families else target.arch

    return objection


def needs_dtype(*allowed: torch.dtype) -> Check:
    def objection(spec: AttentionSpec, _: Target) -> str | None:
        return None if spec.dtype in allowed else f"dtype {dtype_name(spec.dtype)}"

    return objection


def needs_head_dims(allowed: Callable[[int, int], bool]) -> Check:
    def objection(spec: AttentionSpec, _: Target) -> str | None:
        if not all(map(symbolic.is_static, spec.head_dims)):
            return f"head_dim {', '.join(map(symbolic.text, spec.head_dims))} is symbolic"
        dim, dim_v = map(symbolic.as_int, spec.head_dims)
        if allowed(dim, dim_v):
            return None
        return f"head_dim {dim}" if dim == dim_v else f"head_dim (q·k {dim}, v {dim_v})"

    return objection


def pinned_unless_first(sdp_backend: str) -> Check:
    """What `torch.nn.attention.sdpa_kernel` asks for, unless it is `sdp_backend` first."""

    def objection(spec: AttentionSpec, _: Target) -> str | None:
        if spec.sdp_backends is None or spec.sdp_backends[:1] == (sdp_backend,):
            return None
        return f"sdpa_kernel({', '.join(spec.sdp_backends) or 'nothing'})"

    return objection


def mask_that_adds(spec: AttentionSpec, _: Target) -> str | None:
    """A mask that does more than to show and to hide, or beside which there is another one."""
    if spec.mask is None or (spec.formula is not None and spec.band == (None, None)):
        return None
    return spec.mask


def any_mask(spec: AttentionSpec, _: Target) -> str | None:
    return spec.mask


def deterministic_with_mask(spec: AttentionSpec, _: Target) -> str | None:
    return (
        f"a deterministic backward with {spec.mask}" if spec.deterministic and spec.mask else None
    )


def unknown_mask(spec: AttentionSpec, _: Target) -> str | None:
    """A mask that is not even understood as a bias."""
    return spec.mask if spec.bias is None else None


def mask_of_another_dtype(spec: AttentionSpec, _: Target) -> str | None:
    bias = spec.bias
    if bias is None or bias.dtype in (torch.bool, spec.q.dtype):
        return None
    return f"{spec.mask} beside a {dtype_name(spec.q.dtype)} query"


def dropout(spec: AttentionSpec, _: Target) -> str | None:
    return f"dropout_p={spec.dropout_p} > 0" if spec.dropout_p else None


def top_left_with_unequal_lengths(spec: AttentionSpec, _: Target) -> str | None:
    sq, sk = spec.lengths
    if spec.causal != "top_left":
        return None
    if spec.has_seqlens:
        return "is_causal with sequence lengths"
    if symbolic.guarded_same(sq, sk):
        return None
    return f"is_causal with Sq {symbolic.text(sq)} and Sk {symbolic.text(sk)}"


def large_grid(spec: AttentionSpec, _: Target) -> str | None:
    """More batch elements or heads than blocks in the second and third dimension of a grid."""
    for name, size in (("batch", spec.q.shape[0]), ("heads", spec.q.shape[1])):
        if symbolic.is_static(size) and symbolic.as_int(size) > LARGEST_GRID:
            return f"{name} {symbolic.text(size)}"
    return None


def negative_window(spec: AttentionSpec, _: Target) -> str | None:
    if all(side is None or side >= 0 for side in spec.window):
        return None
    return f"window {spec.window}"


def scale_not_positive(spec: AttentionSpec, _: Target) -> str | None:
    if spec.scale is None or symbolic.guarded(spec.scale > 0):
        return None
    return f"scale {spec.scale}"


def deterministic(spec: AttentionSpec, _: Target) -> str | None:
    return "a deterministic backward" if spec.deterministic else None


def softcap(spec: AttentionSpec, _: Target) -> str | None:
    return f"softcap {spec.softcap}" if spec.softcap else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


SDPA_KERNEL = "torch.nn.attention.sdpa_kernel, set by the user"
MASK_DTYPE = "bool, or the query's dtype: a cast would change the numbers"
