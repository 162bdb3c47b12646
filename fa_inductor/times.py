"""Measured times of attention kernels, from which the default choice is made.

One table for each GPU architecture, written by `benchmarks/attention.py --write-table` on that GPU
and shipped in `fa_inductor/data/`. A problem that was not measured takes the times of the measured
one that is most like it: what counts for a choice is their ratio.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from . import symbolic
from .spec import AttentionSpec
from .target import Target

CORE = "core"  # the name of PyTorch's own attention among the kernels of a table


@dataclass(frozen=True)
class Measured:
    """One measured problem: bfloat16, sizes as in `AttentionSpec`.

    passes: "fwd" (inference, no log-sum-exp) or "bwd" (forward and backward together).
    kind: what else there is: "plain", "causal", "window", "bias" (added to the scores), "dropout";
        or a mask: "padding" (of keys), "causal mask" or "mask".
    microseconds: GPU time by kernel; a kernel that cannot run it is left out.
    """

    passes: str
    kind: str
    batch: int
    heads_q: int
    heads_kv: int
    sq: int
    sk: int
    d: int
    dv: int
    microseconds: Mapping[str, float]


def of(spec: AttentionSpec, target: Target) -> Mapping[str, float]:
    """Microseconds by kernel of the measured problem most like `spec`; empty if none is alike.

    Symbolic sizes count as what they are in the call that is being compiled.
    """
    passes, kind = ("bwd" if spec.needs_grad else "fwd"), kind_of(spec)
    rows = [row for row in _table(target.arch) if (row.passes, row.kind) == (passes, kind)]
    if not rows:
        return {}
    return min(rows, key=lambda row: _distance(row, spec)).microseconds


@functools.cache
def _table(arch: str) -> tuple[Measured, ...]:
    file = resources.files(__package__) / "data" / f"times_{arch}.json"
    if not file.is_file():
        return ()
    return tuple(Measured(**row) for row in json.loads(file.read_text())["rows"])


def kind_of(spec: AttentionSpec) -> str:
    """`Measured.kind` of a problem."""
    if spec.dropout_p:
        return "dropout"
    if spec.formula is not None:
        return {"keys": "padding", "causal": "causal mask"}.get(spec.formula.kind, "mask")
    if spec.bias is not None:
        return "bias"
    if spec.window != (None, None):
        return "window"
    return "plain" if spec.causal == "none" else "causal"


def _distance(row: Measured, spec: AttentionSpec) -> float:
    """How unlike two problems are, in powers of two. Lengths and head dim decide how the work is
    tiled; batch and heads only how many tiles there are."""
    batch, heads, sq, d = (symbolic.hint(size) for size in spec.q.shape)
    kv_heads, sk = (symbolic.hint(size) for size in spec.k.shape[1:3])
    dv = symbolic.hint(spec.v.shape[3])
    return (
        0.5 * _apart(row.batch * row.heads_q, batch * heads)
        + 0.5 * _apart(row.heads_q / row.heads_kv, heads / max(1, kv_heads))
        + _apart(row.sq, sq)
        + _apart(row.sk, sk)
        + 2.0 * _apart(row.d, d)
        + _apart(row.dv, dv)
    )


def _apart(left: float, right: float) -> float:
    return abs(math.log2(max(left, 1)) - math.log2(max(right, 1)))
