"""Which attention of a model is the first that comes out wrong: `fa-inductor probe --model`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..kernels.replayed import Replay, observed
from .judging import TOLERANCES

if TYPE_CHECKING:
    from rich.console import RenderableType

_FLOAT64 = (1e-6, 1e-6)
# How much farther than eager's own bfloat16 (or so) from float32 a right output can be.
_MARGIN = 2.0


@dataclass(frozen=True)
class Statistics:
    """Of one tensor that an attention was given."""

    shape: tuple[int, ...]
    dtype: str
    lowest: float
    highest: float
    std: float
    not_finite: int

    @classmethod
    def of(cls, tensor: Tensor) -> Statistics:
        finite = tensor[tensor.isfinite()].float()
        lowest, highest, std = (
            (float(finite.min()), float(finite.max()), float(finite.std(correction=0)))
            if finite.numel()
            else (0.0, 0.0, 0.0)
        )
        dtype = str(tensor.dtype).removeprefix("torch.")
        missing = tensor.numel() - finite.numel()
        return cls(tuple(tensor.shape), dtype, lowest, highest, std, missing)

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        text = f"{self.dtype} ({shape}) in [{self.lowest:.3g}, {self.highest:.3g}]"
        text += f", std {self.std:.3g}"
        return text + (f", {self.not_finite} not finite" if self.not_finite else "")


@dataclass(frozen=True)
class ReplayedCall:
    """One call of a site, compared with float64 on the very tensors that it was given.

    inputs: what it was given. errors: of the worst row, by result. not_finite: how many elements
    of each result are not. limits: what the errors may be.
    """

    site: str
    kernel: str
    direction: str
    inputs: Mapping[str, Statistics]
    errors: Mapping[str, float]
    not_finite: Mapping[str, int]
    limit: float

    @property
    def was_given_bad(self) -> bool:
        return any(each.not_finite for each in self.inputs.values())

    @property
    def faults(self) -> list[str]:
        """What is wrong with the results, if the inputs are not."""
        if self.was_given_bad:
            return []
        missing = [
            f"{n} elements of {name} are not finite" for name, n in self.not_finite.items() if n
        ]
        wrong = [
            f"{name} is wrong by {error:.1e} (of {self.limit:.0e} allowed)"
            for name, error in self.errors.items()
            if not error <= self.limit and not self.not_finite[name]
        ]
        return missing + wrong


@dataclass(frozen=True)
class Bisection:
    """calls: in the order in which they ran. output_error, eager_error: of the compiled and of the
    eager output, relative, against eager in float32; None where there is nothing to compare, with
    `note` why."""

    calls: Sequence[ReplayedCall]
    output_error: float | None = None
    eager_error: float | None = None
    note: str = ""

    @property
    def first_bad(self) -> ReplayedCall | None:
        """The first call whose results are wrong though its inputs are finite."""
        return next((call for call in self.calls if call.faults), None)

    @property
    def first_given_bad(self) -> ReplayedCall | None:
        return next((call for call in self.calls if call.was_given_bad), None)

    @property
    def output_is_right(self) -> bool:
        if self.output_error is None or self.eager_error is None:
            return True
        return self.output_error <= max(_MARGIN * self.eager_error, TOLERANCES[torch.float32][0])

    @property
    def is_right(self) -> bool:
        return self.first_bad is None and self.first_given_bad is None and self.output_is_right

    def verdict(self) -> str:
        """In a sentence or two."""
        bad, given = self.first_bad, self.first_given_bad
        if bad is not None and (given is None or self._place(bad) <= self._place(given)):
            inputs = "; ".join(f"{name} {each}" for name, each in bad.inputs.items())
            return (
                f"The first bad attention is {bad.site} on {bad.kernel}, {bad.direction}, call "
                f"{self._place(bad) + 1} of {len(self.calls)}: {', '.join(bad.faults)}. "
                f"It was given {inputs}."
            )
        if given is not None:
            names = ", ".join(
                f"{name} ({each.not_finite} elements)"
                for name, each in given.inputs.items()
                if each.not_finite
            )
            return (
                f"No attention is at fault: {given.site}, {given.direction}, is the first that was "
                f"given what is not finite: {names}. Look at what comes before it."
            )
        if not self.calls:
            return "No attention runs on a kernel of fa_inductor here: there is none to look at."
        if not self.output_is_right:
            return (
                f"Every attention is right, and the output is off by {self.output_error:.1e} "
                f"(eager's own: {self.eager_error:.1e}): look at the rest of the graph, for "
                'example with backend="inductor".'
            )
        return f"All {len(self.calls)} calls of attention are right, and so is the output."

    def _place(self, call: ReplayedCall) -> int:
        return next(i for i, each in enumerate(self.calls) if each is call)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("site", "kernel", "direction", "worst row's error", "")
        for call in self.calls:
            errors = ", ".join(f"{name} {error:.1e}" for name, error in call.errors.items())
            state = "given NaN" if call.was_given_bad else "BAD" if call.faults else "ok"
            table.add_row(Text(call.site), call.kernel, call.direction, errors, state)
        notes = [Text(self.note)] if self.note else []
        return Group(table, *notes, Text(self.verdict()))


def bisect(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Bisection:
    """Compile `fn` with fa_inductor, run it, and compare every attention in it on its own inputs.

    A backward follows if an output wants a gradient: that of the sum of all such outputs, which is
    added to `.grad` as ever. options: as for `torch.compile(backend="fa_inductor")`. Dynamo's
    caches are reset before and after.
    """
    kwargs = dict(kwargs or {})
    calls: list[ReplayedCall] = []
    torch._dynamo.reset()
    compiled = torch.compile(
        fn, backend="fa_inductor", options={**(options or {}), "fa.guard": "replay"}
    )
    with observed(lambda replay: calls.append(_call(replay))):
        made = _floats(compiled(*args, **kwargs))
        wanting = [tensor for tensor in made if tensor.requires_grad]
        if wanting:
            total = torch.stack([tensor.float().sum() for tensor in wanting]).sum()
            total.backward()
    torch._dynamo.reset()
    return _compared(fn, args, kwargs, made, calls)


def _call(replay: Replay) -> ReplayedCall:
    made = replay.made
    dtype = made["out" if "out" in made else "dq"].dtype
    return ReplayedCall(
        replay.site,
        replay.kernel,
        replay.direction,
        {name: Statistics.of(tensor) for name, tensor in replay.tensors.items()},
        {name: float(error) for name, error in replay.errors.items()},
        {name: int((~tensor.isfinite()).sum()) for name, tensor in made.items()},
        TOLERANCES.get(dtype, _FLOAT64)[replay.direction == "backward"],
    )


def _compared(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Sequence[Tensor],
    calls: Sequence[ReplayedCall],
) -> Bisection:
    with torch.no_grad():
        eager, again = (_floats(fn(*args, **kwargs)) for _ in range(2))
        if any(not _same(a, b) for a, b in zip(eager, again, strict=True)):
            return Bisection(calls, note="Two eager runs differ: the output is not compared.")
        if not isinstance(fn, nn.Module):
            return Bisection(calls, _distance(made, eager), 0.0)
        precise = copy.deepcopy(fn).float()
        given = [_precise(each) for each in args]
        right = _floats(precise(*given, **{name: _precise(each) for name, each in kwargs.items()}))
    return Bisection(calls, _distance(made, right), _distance(eager, right))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _precise(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


def _floats(output: Any) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(output)
    if hasattr(output, "to_tuple"):  # an output of Hugging Face's
        leaves = tree_leaves(output.to_tuple())
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _distance(made: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest relative one; infinite where what is made is not finite."""
    found = [
        float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))
        for a, b in zip((each.detach() for each in made), right, strict=True)
    ]
    return max((each if each == each else float("inf") for each in found), default=0.0)
