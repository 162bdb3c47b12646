"""A covering sample of the attention problems that a kernel can run, as tensors of any device.

A configuration is a size, a kind of problem, a memory layout, a gradient and a sort of data. Every
pair of two of those that `ALLOWED` lets through and no row of the support table refuses is in the
sample; the rest of it is drawn at random, with a seed. `python tests/gpu/configurations.py` counts.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from judging import Call, problem_of
from torch import Tensor

from fa_inductor.problem import Inputs
from fa_inductor.support import rows_of
from fa_inductor.target import Target

KERNELS = ("fa4", "cudnn")
CONFIGURATIONS, WITH_BACKWARD = 640, 420  # of each kernel, at least

ALL = ("plain", "window", "lengths", "sink", "softcap", "bias", "mixed")
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True, eq=False)
class Size:
    """kinds: the groups of `Kind` that it is combined with. A kernel library compiles for each
    pair of a head dim and a kind, so few sizes have them all."""

    dtype: torch.dtype
    b: int
    hq: int
    hkv: int
    sq: int
    sk: int
    d: int
    dv: int
    kinds: tuple[str, ...] = ("plain",)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads, lengths = f"H{self.hq}/{self.hkv}", f"S{self.sq}/{self.sk}"
        return f"{dtype} B{self.b} {heads} {lengths} d{self.d}/{self.dv}"


SIZES = (
    Size(BF16, 2, 4, 4, 256, 256, 64, 64, ALL),
    Size(BF16, 2, 4, 4, 333, 333, 64, 64, ("plain", "window", "lengths", "bias")),
    Size(BF16, 1, 8, 2, 130, 300, 64, 64, ALL),
    Size(BF16, 2, 4, 1, 256, 128, 128, 128, ("plain", "window", "lengths")),
    Size(BF16, 2, 8, 2, 512, 512, 128, 128, ALL),
    Size(BF16, 1, 4, 4, 1024, 1024, 128, 128, ("plain", "bias")),
    Size(BF16, 1, 2, 2, 2048, 2048, 64, 64, ("plain", "window")),
    Size(BF16, 3, 2, 2, 40, 50, 64, 64, ("plain", "lengths", "bias")),
    Size(BF16, 2, 8, 2, 1, 300, 128, 128, ("plain", "lengths")),
    Size(BF16, 2, 4, 4, 200, 200, 96, 96),
    Size(BF16, 2, 4, 4, 200, 200, 32, 32),
    Size(BF16, 2, 4, 4, 200, 200, 80, 80),
    Size(BF16, 1, 4, 4, 256, 256, 256, 256),
    Size(BF16, 1, 4, 4, 300, 300, 192, 128),
    Size(FP16, 2, 4, 4, 256, 256, 64, 64, ALL),
    Size(FP16, 2, 8, 2, 192, 320, 128, 128, ("plain", "window", "lengths", "bias")),
    Size(FP16, 1, 4, 4, 512, 512, 64, 64),
    Size(FP16, 2, 4, 4, 200, 200, 128, 128, ("plain", "window")),
)


@dataclass(frozen=True, eq=False)
class Kind:
    """bias: which dimensions beside Sk are whole, of "bhs"; None for none.
    content: of the bias: "float", "bool" (0 or -inf), "rows" (the same, some rows without a key),
        "padding" (-inf past a length). lengths: "", "k", "qk"."""

    name: str
    group: str
    causal: str = "none"
    left: bool = False
    right: bool = False
    bias: str | None = None
    content: str = "float"
    bias_grad: bool = False
    lengths: str = ""
    sink: bool = False
    softcap: float = 0.0

    def __str__(self) -> str:
        return self.name


KINDS = (
    Kind("none", "plain"),
    Kind("top-left", "plain", "top_left"),
    Kind("bottom-right", "plain", "bottom_right"),
    Kind("top-left, left", "window", "top_left", left=True),
    Kind("bottom-right, left", "window", "bottom_right", left=True),
    Kind("left and right", "window", left=True, right=True),
    Kind("left", "window", left=True),
    Kind("right", "window", right=True),
    Kind("lengths k", "lengths", lengths="k"),
    Kind("lengths qk", "lengths", lengths="qk"),
    Kind("lengths qk, top-left", "lengths", "top_left", lengths="qk"),
    Kind("lengths qk, bottom-right", "lengths", "bottom_right", lengths="qk"),
    Kind("lengths k, left", "lengths", "bottom_right", left=True, lengths="k"),
    Kind("sink", "sink", sink=True),
    Kind("sink, bottom-right", "sink", "bottom_right", sink=True),
    Kind("sink, bottom-right, left", "sink", "bottom_right", left=True, sink=True),
    Kind("softcap", "softcap", softcap=15.0),
    Kind("softcap, bottom-right, left", "softcap", "bottom_right", left=True, softcap=15.0),
    Kind("bias bhs", "bias", bias="bhs", bias_grad=True),
    Kind("bias bs", "bias", bias="bs"),
    Kind("bias hs", "bias", bias="hs", bias_grad=True),
    Kind("bias s", "bias", bias="s", bias_grad=True),
    Kind("bias b", "bias", bias="b", bias_grad=True),
    Kind("bias h", "bias", bias="h"),
    Kind("bool bs", "bias", bias="bs", content="bool"),
    Kind("bool bs, empty rows", "bias", bias="bs", content="rows"),
    Kind("bool b", "bias", bias="b", content="padding"),
    Kind("bias bhs, top-left", "mixed", "top_left", bias="bhs", bias_grad=True),
    Kind("bias hs, left", "mixed", left=True, bias="hs"),
    Kind("bias bs, sink", "mixed", bias="bs", sink=True),
    Kind("bias hs, lengths k", "mixed", bias="hs", lengths="k"),
)

# Transformer Engine's names: the dimensions in memory, "3" and "2" packed tensors.
LAYOUTS = (
    *("sbhd_sbhd_sbhd", "bshd_bshd_bshd", "bhsd_bhsd_bhsd"),
    *("sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "bs3hd", "bsh3d", "bshd_bs2hd", "bshd_bsh2d"),
    *("sbhd_bshd_bshd", "bshd_sbhd_sbhd", "bhsd_bshd_bshd", "bshd_bhsd_bhsd"),
)
GRADS = ("none", "none, no lse", "as out", "bhsd", "expanded")  # layouts of grad_out
DATA = ("normal", "peaked", "outlier")


@dataclass(frozen=True)
class Configuration:
    size: Size
    kind: Kind
    layout: str
    grad: str
    data: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.size} | {self.kind} | {self.layout} | grad {self.grad} | {self.data}"

    @property
    def values(self) -> tuple[Any, ...]:
        return (self.size, self.kind, self.layout, self.grad, self.data)

    @property
    def needs_grad(self) -> bool:
        return not self.grad.startswith("none")

    def call(self, device: str) -> Call:
        """Its tensors, fresh; on "meta" they have everything but values."""
        torch.manual_seed(self.seed)
        size, kind = self.size, self.kind
        q, k, v = tensors(self.layout, size, device)
        if self.data == "peaked":
            q.mul_(5.0)
        elif self.data == "outlier":
            q[..., 3].mul_(8.0)
            k[..., 3].mul_(8.0)
        sink = torch.randn(size.hq, device=device) if kind.sink else None
        lengths = [
            _lengths(n, size.b, device) if letter in kind.lengths else None
            for letter, n in (("q", size.sq), ("k", size.sk))
        ]
        bias = None if kind.bias is None else _bias(kind, size, device)
        problem = problem_of(
            size.d,
            causal=kind.causal,
            window_left=max(1, size.sk // 5) if kind.left else None,
            window_right=max(1, size.sk // 9) if kind.right else None,
            softcap=kind.softcap,
        )
        order = "".join(c for c in self.layout.split("_")[0] if c.isalpha())
        return Call(
            problem,
            Inputs(q, k, v, bias, sink, *lengths),
            order.upper(),
            grad_out(self.grad, order, size, device) if self.needs_grad else None,
            kind.bias_grad and self.needs_grad,
            self.grad != "none, no lse",
            self.data != "normal",
        )


def tensors(layout: str, size: Size, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as (B, H, S, D) views of memory laid out so."""
    q = {"b": size.b, "h": size.hq, "s": size.sq, "d": size.d}
    k = {"b": size.b, "h": size.hkv, "s": size.sk, "d": size.d}
    found: list[Tensor] = []
    for part, sizes in zip(layout.split("_"), (q, k, {**k, "d": size.dv}), strict=False):
        shape = [int(c) if c.isdigit() else sizes[c] for c in part]
        whole = torch.randn(shape, device=device, dtype=size.dtype)
        packed = [place for place, c in enumerate(part) if c.isdigit()]
        letters = "".join(c for c in part if c.isalpha())
        order = [letters.index(c) for c in "bhsd"]
        each = whole.unbind(packed[0]) if packed else (whole,)
        found += [tensor.permute(order) for tensor in each]
    return found[0], found[1], found[2]


def grad_out(kind: str, order: str, size: Size, device: str) -> Tensor:
    shape = (size.b, size.hq, size.sq, size.dv)
    if kind == "expanded":
        return torch.randn((), device=device, dtype=size.dtype).expand(shape)
    if kind == "bhsd":
        return torch.randn(shape, device=device, dtype=size.dtype)
    places = ["bhsd".index(c) for c in order]
    whole = torch.randn([shape[p] for p in places], device=device, dtype=size.dtype)
    return whole.permute([places.index(dim) for dim in range(4)])


def _lengths(n: int, batch: int, device: str) -> Tensor:
    """From 0 to n; the last sequence is whole, where there are several."""
    lengths = torch.randint(0, n + 1, (batch,), device=device, dtype=torch.int32)
    if batch > 1:
        lengths[-1] = n
    return lengths


def _bias(kind: Kind, size: Size, device: str) -> Tensor:
    assert kind.bias is not None
    whole = {"b": size.b, "h": size.hq, "s": size.sq}
    shape = [n if letter in kind.bias else 1 for letter, n in whole.items()]
    if kind.content == "float":
        return torch.randn(*shape, size.sk, device=device, dtype=size.dtype)
    if kind.content == "padding":
        lengths = torch.randint(1, size.sk + 1, (*shape, 1), device=device)
        hidden = torch.arange(size.sk, device=device) >= lengths
    else:
        hidden = torch.rand(*shape, size.sk, device=device) < 0.5
        hidden[..., size.sk // 2] = False
        if kind.content == "rows":
            hidden[-1, :, ::7] = True
    return torch.where(hidden, float("-inf"), 0.0).to(size.dtype)


# --- The sample -----------------------------------------------------------------------------------


def allowed(kernel: str, values: Sequence[Any]) -> bool:
    """Whether these go together: layouts with sizes, and what keeps compiled kernels few."""
    size, kind, layout, grad, _ = values
    if kind.group not in size.kinds:
        return False
    equal = (size.hq, size.sq, size.d) == (size.hkv, size.sk, size.dv)
    if ("3" in layout and not equal) or ("2" in layout and size.d != size.dv):
        return False
    if grad == "none, no lse":
        return size.kinds == ALL and kind.group in ("plain", "bias")
    if grad == "expanded":  # FA4 compiles for strides of 0
        return kernel != "fa4" or (kind.group == "plain" and len(size.kinds) > 1)
    return True


@dataclass(frozen=True)
class Sample:
    """refused: (feature, limit) of the row -> configurations drawn that it refuses."""

    runnable: tuple[Configuration, ...]
    refused: Counter[tuple[str, str]]

    @property
    def backward(self) -> int:
        return sum(each.needs_grad for each in self.runnable)


def pairs(values: Sequence[Any]) -> set[tuple[Any, ...]]:
    return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(5), 2)}


@functools.cache
def refusal(
    kernel: str, target: Target, size: Size, kind: Kind, grad: bool
) -> tuple[tuple[str, str], ...]:
    """(feature, limit) of the rows that refuse it; on Hopper they do not ask for the layout."""
    found = Configuration(size, kind, LAYOUTS[1], "bhsd" if grad else "none", "normal")
    spec = found.call("meta").spec()
    rows = (row for row in rows_of(kernel) if row.reason(spec, target) is not None)
    return tuple((row.feature, row.limit) for row in rows)


@functools.cache
def sample(kernel: str, target: Target, seed: int = 0) -> Sample:
    """The same for the same support table."""
    draw = random.Random(f"{kernel} {seed}")
    factors = (SIZES, KINDS, LAYOUTS, GRADS, DATA)

    def refused_by(values: Sequence[Any]) -> tuple[tuple[str, str], ...]:
        return refusal(kernel, target, *values[:2], not values[3].startswith("none"))

    can_run = [
        values
        for values in itertools.product(*factors)
        if allowed(kernel, values) and not refused_by(values)
    ]
    missing = sorted({pair for values in can_run for pair in pairs(values)}, key=str)
    draw.shuffle(missing)
    by_pair: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {pair: [] for pair in missing}
    for values in can_run:
        for pair in pairs(values):
            by_pair[pair].append(values)
    chosen: dict[tuple[Any, ...], None] = {}
    uncovered = dict.fromkeys(missing)
    while uncovered:
        candidates = draw.choices(by_pair[next(iter(uncovered))], k=12)
        best = max(candidates, key=lambda values: len(pairs(values) & uncovered.keys()))
        chosen[best] = None
        for pair in pairs(best):
            uncovered.pop(pair, None)
    refused: Counter[tuple[str, str]] = Counter()
    backward = sum(not values[3].startswith("none") for values in chosen)
    while len(chosen) < CONFIGURATIONS or backward < WITH_BACKWARD:
        values = tuple(draw.choice(factor) for factor in factors)
        if not allowed(kernel, values) or values in chosen:
            continue
        if rows := refused_by(values):
            refused.update(rows)
            continue
        chosen[values] = None
        backward += not values[3].startswith("none")
    runnable = [Configuration(*values, seed=number) for number, values in enumerate(chosen)]
    runnable.sort(key=lambda each: (str(each.size), each.kind.name))
    return Sample(tuple(runnable), refused)


def summary(kernel: str, taken: Sample, failures: int) -> list[str]:
    lines = [
        f"{kernel}: {len(taken.runnable)} configurations, {taken.backward} with backward, "
        f"{failures} failures; refused by row:"
    ]
    for (feature, limit), count in taken.refused.most_common():
        lines.append(f"  {kernel}, {feature}, {count} ({limit})")
    return lines


if __name__ == "__main__":
    for each in KERNELS:
        print("\n".join(summary(each, sample(each, Target.of_name("sm_90a")), 0)))
