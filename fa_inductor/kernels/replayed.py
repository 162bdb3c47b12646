"""A kernel whose every call is compared as a whole with float64, and handed to whoever observes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..problem import Gradients, Problem
from . import spot_check


@dataclass(frozen=True)
class Replay:
    """One call. tensors: q, k and v, and the gradient of the output in a backward. errors: the
    relative one of the worst row, by tensor, 0-d; see `spot_check`. made: the results."""

    site: str
    kernel: str
    direction: str
    tensors: Mapping[str, Tensor]
    made: Mapping[str, Tensor]
    errors: Mapping[str, Tensor]


_observers: list[Callable[[Replay], None]] = []


@contextmanager
def observed(observer: Callable[[Replay], None]) -> Iterator[None]:
    """`observer` is called with each call of a replayed kernel inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class Replayed:
    """A kernel; it is called as the kernel is. name: its own. site: what is told of it."""

    def __init__(self, kernel: Any, name: str, site: str) -> None:
        self.kernel, self.name, self.site = kernel, name, site

    def check(self, problem: Problem, inputs: Any) -> None:
        self.kernel.check(problem, inputs)

    def forward(self, problem: Problem, inputs: Any, out: Tensor, lse: Tensor | None) -> None:
        self.kernel.forward(problem, inputs, out, lse)
        errors = {"out": spot_check.forward(problem, inputs, out, whole=True)}
        self._tell("forward", dict(zip("qkv", inputs, strict=False)), {"out": out}, errors)

    def backward(
        self,
        problem: Problem,
        inputs: Any,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        grads: Gradients,
    ) -> None:
        saved = (out, lse, grad_out, grad_lse)
        self.kernel.backward(problem, inputs, *saved, grads)
        made = dict(zip(("dq", "dk", "dv"), grads, strict=False))
        found = spot_check.backward(problem, inputs, saved, grads[:3], whole=True)
        tensors = {**dict(zip("qkv", inputs, strict=False)), "grad_out": grad_out}
        self._tell("backward", tensors, made, dict(zip(made, found, strict=True)))

    def _tell(self, direction: str, tensors: Any, made: Any, errors: Any) -> None:
        for observer in _observers:
            observer(Replay(self.site, self.name, direction, tensors, made, errors))
