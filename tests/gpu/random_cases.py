"""Attention calls in memory layouts drawn at random: what is refused, copied or run as it lies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from judging import Call, attempt, judge, problem_of
from torch import Tensor

from fa_inductor import layout, repairs
from fa_inductor.problem import Inputs
from fa_inductor.spec import TensorSpec
from fa_inductor.support import rows_of
from fa_inductor.target import Target

CASES = 2200
ODD_STRIDE = 3331333  # of dimensions of size 1, which never move in memory
ORDERS = ("BSHD", "BHSD", "SBHD", "HBSD", "SHBD", "HSBD")

# (B, Hq, Hkv, Sq, Sk, D). Few, as FA4 compiles for head dims, groups and single blocks.
SHAPES = (
    (2, 4, 4, 200, 200, 64),
    (2, 4, 4, 200, 200, 64),
    (1, 4, 4, 200, 200, 64),
    (2, 1, 1, 200, 200, 64),
    (2, 4, 4, 96, 96, 64),
    (1, 1, 1, 96, 96, 64),
    (2, 4, 4, 1, 200, 64),
    (3, 4, 2, 130, 150, 64),
    (2, 8, 1, 200, 200, 128),
    (1, 8, 1, 200, 200, 128),
)
CUDNN_SHAPES = (*SHAPES, (2, 4, 2, 40, 70, 72), (1, 2, 2, 128, 128, 128), (2, 3, 1, 65, 33, 8))
UNSUPPORTED = (2, 4, 4, 33, 33, 36)


def kernel_of(number: int) -> str:
    """A quarter of the cases are cuDNN's: it builds a plan for each layout."""
    return "cudnn" if number % 4 == 3 else "fa4"


@dataclass
class Outcome:
    """refused: rows of the support table that refuse it. copied: what was copied, planned: what
    the plan says is. wrong: what is wrong, in words."""

    number: int
    described: str
    backward: bool
    refused: list[tuple[str, str]] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Drawn:
    """One case: `call` has its tensors, `described` says how they lie."""

    def __init__(self, number: int, device: str) -> None:
        self.draw = draw = random.Random(f"layouts {number}")
        torch.manual_seed(number)
        self.device, self.number, self.kernel = device, number, kernel_of(number)
        self.shape = list(draw.choice(SHAPES if self.kernel == "fa4" else CUDNN_SHAPES))
        if draw.random() < 0.02:
            self.shape = list(UNSUPPORTED)
        self.words: list[str] = []
        self.empty = draw.random() < 0.04
        if self.empty:
            self.shape[draw.choice((0, 3, 4))] = 0
        self.half = self.shape == list(SHAPES[0]) and draw.random() < 0.2
        self.dtype = torch.float16 if self.half else torch.bfloat16
        self.call = self._call()
        self.described = f"{self.kernel} {self.number}: {self.shape} " + ", ".join(self.words)

    def _call(self) -> Call:
        b, hq, hkv, sq, sk, d = self.shape
        draw = self.draw
        causal = draw.choice(("none", "none", "top_left", "bottom_right"))
        window = (None, None)
        plain = self.shape == list(SHAPES[0])
        if plain and not self.half and draw.random() < 0.15:
            window = (40, 20)
        backward = draw.random() < 0.4
        expand = ""
        if plain and not self.half and window[0] is None and draw.random() < 0.25:
            expand, causal = draw.choice(("kv heads", "kv batch", "q batch")), "none"
        self.words += [causal, f"window {window}", expand or "not expanded"]
        q = self.tensor("q", (b, hq, sq, d), "B" if expand == "q batch" else "")
        along = {"kv heads": "H", "kv batch": "B"}.get(expand, "")
        k, v = (self.tensor(name, (b, hkv, sk, d), along) for name in "kv")
        bias = self.bias((b, hq, sq, sk)) if draw.random() < self._bias_share() else None
        softcap = 15.0 if self.kernel == "cudnn" and draw.random() < 0.02 else 0.0
        data = self._data(q, k, v)
        numbers = dict(zip(("window_left", "window_right"), window, strict=True))
        return Call(
            problem_of(d, causal=causal, softcap=softcap, **numbers),
            Inputs(q, k, v, bias),
            draw.choice(ORDERS),
            self.grad_out((b, hq, sq, d), plain and causal == "none") if backward else None,
            peaked=data != "normal",
        )

    def _bias_share(self) -> float:
        return 0.25 if self.kernel == "cudnn" else 0.02

    def tensor(self, name: str, size: Sequence[int], expand: str = "") -> Tensor:
        """A (B, H, S, D) view of random strides; what lies between its elements is NaN.

        expand: the dimension along which it is repeated.
        """
        draw = self.draw
        order = draw.sample("BHS", 3)
        order.insert(3 if draw.random() < 0.95 else draw.randrange(3), "D")
        gap = draw.choice((0, 0, 0, 8, 64, draw.choice((1, 2, 3, 4))))
        steps = {letter: 2 for letter in "HS" if draw.random() < 0.12}
        offset = draw.choice((0, 0, 0, 8, 1000, draw.choice((1, 3, 4))))
        whole = dict(zip("BHSD", size, strict=True))
        if expand:
            whole[expand] = min(1, whole[expand])
        shape = [whole[letter] * steps.get(letter, 1) for letter in order]
        shape[-1] += gap
        elements = 1
        for n in shape:
            elements *= n
        memory = torch.full((elements + offset,), float("nan"), dtype=self.dtype).to(self.device)
        view = memory[offset:].view(shape).permute([order.index(letter) for letter in "BHSD"])
        for dim, letter in enumerate("BHSD"):
            step = steps.get(letter, 1)
            start = draw.randrange(step)
            if view.shape[dim]:
                view = view[
                    (slice(None),) * dim + (slice(start, start + step * whole[letter], step),)
                ]
        if 1 in view.shape[:3] and not expand and draw.random() < 0.5:
            pairs = zip(view.shape, view.stride(), strict=True)
            strides = [ODD_STRIDE if n == 1 and i < 3 else s for i, (n, s) in enumerate(pairs)]
            view = view.as_strided(view.shape, strides, view.storage_offset())
            self.words.append(f"{name} odd stride")
        view.copy_(torch.randn(view.shape))
        view = view.expand(*size)
        self.words.append(f"{name} {''.join(order)}+{gap} {steps or ''} at {offset}")
        return view

    def _data(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """Sometimes logits in the thousands, or a log-sum-exp below -88.7, where exp is 0."""
        sort = self.draw.choice(("normal", "normal", "huge", "low"))
        if self.half:
            sort = "normal"
        if sort == "huge":
            for tensor, factor in ((q, 33.0), (k, 33.0), (v, 33.0)):
                _repeated_once(tensor).mul_(factor).clamp_(-100.0, 100.0)
        elif sort == "low":
            _repeated_once(q).abs_().mul_(6.0)
            _repeated_once(k).abs_().mul_(-6.0)
        self.words.append(sort)
        return sort

    def bias(self, scores: Sequence[int]) -> Tensor:
        draw = self.draw
        size = [n if draw.random() < 0.5 else min(1, n) for n in scores[:3]]
        sort = draw.choice(("dense", "expanded", "transposed", "wide", "offset"))
        self.words.append(f"bias {size} {sort}")
        sk = scores[3]
        if sort == "transposed":
            made = torch.randn(*size[:2], sk, size[2], dtype=self.dtype).to(self.device).mT
        elif sort == "wide":
            made = torch.randn(*size, sk + 3, dtype=self.dtype).to(self.device)[..., :sk]
        elif sort == "offset":
            flat = torch.randn(size[0] * size[1] * size[2] * sk + 1, dtype=self.dtype)
            made = flat.to(self.device)[1:].view(*size, sk)
        else:
            made = torch.randn(*size, sk, dtype=self.dtype).to(self.device)
        return made.expand(*scores) if sort == "expanded" else made

    def grad_out(self, size: Sequence[int], may_expand: bool) -> Tensor:
        kinds = ("dense", "odd", "every second", *(("expanded",) if may_expand else ()))
        sort = self.draw.choice(kinds)
        self.words.append(f"grad_out {sort}")
        if sort == "expanded":
            return torch.randn((), dtype=self.dtype).to(self.device).expand(*size)
        if sort == "every second":
            wide = torch.randn(*size[:3], 2 * size[3], dtype=self.dtype).to(self.device)
            return wide[..., ::2]
        if sort == "odd":
            return self.tensor("grad_out", size)
        return torch.randn(*size, dtype=self.dtype).to(self.device)


def _repeated_once(tensor: Tensor) -> Tensor:
    """Without the repetitions of an expanded dimension, to write to."""
    index = tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())
    return tensor[index]


# --- Running them ---------------------------------------------------------------------------------


def run_all(numbers: Sequence[int], device: str = "cuda", kernel: str = "") -> list[Outcome]:
    outcomes = []
    for number in numbers:
        outcomes.append(run(number, device, kernel))
        if any("AcceleratorError" in text for text in outcomes[-1].wrong):
            break  # nothing runs in this process any more
    return outcomes


def run(number: int, device: str, kernel: str = "") -> Outcome:
    """kernel: what to run it on, instead of the kernel that it is planned for."""
    case = Drawn(number, device)
    call, spec = case.call, case.call.spec()
    outcome = Outcome(number, case.described, call.grad_out is not None)
    target = (
        Target.of_device(torch.device("cuda")) if device == "cuda" else Target.of_name("sm_90a")
    )
    outcome.refused = [
        (row.feature, row.limit) for row in rows_of(case.kernel) if row.reason(spec, target)
    ]
    if outcome.refused:
        return outcome
    planned = set(layout.copies(spec, case.kernel))
    if call.grad_out is not None:
        itemsize = call.grad_out.element_size()
        if layout.copy_reason(TensorSpec.of(call.grad_out), itemsize):
            planned.add("grad_out")
    before = Counter(repairs.counts)
    with InsideFa4(case.kernel == "fa4") as inside:
        outcome.wrong = attempt(lambda: judge(call, kernel or case.kernel, runs=1))
    copied = set(Counter(repairs.counts) - before)
    if inside.copies:
        copied.add("inside FA4")
    outcome.copied, outcome.planned = sorted(copied), sorted(planned)
    if copied - planned:
        outcome.wrong.append(f"silent copies: {sorted(copied - planned)}")
    if not case.empty and not kernel and planned - copied:
        outcome.wrong.append(f"copies planned and not made: {sorted(planned - copied)}")
    return outcome


class InsideFa4:
    """Counts the copies that FA4's own entries make of their arguments."""

    def __init__(self, used: bool) -> None:
        self.copies, self.used = 0, used
        self.interface: Any = None

    def __enter__(self) -> InsideFa4:
        if not self.used:
            return self
        from flash_attn.cute import interface

        self.interface, self.original = interface, interface.maybe_contiguous

        def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            made = self.original(tensor, *args, **kwargs)
            self.copies += made is not tensor
            return made

        interface.maybe_contiguous = counted
        return self

    def __exit__(self, *_: Any) -> None:
        if self.interface is not None:
            self.interface.maybe_contiguous = self.original
