"""A kernel whose results are looked at after every call: what `fa.guard` puts around it.

Looking starts a few small reductions on the device, and waits for nothing (`fa_inductor.numerics`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import numerics
from ..numerics import Names, Number, Row
from ..problem import Gradients, Problem
from ..watch import Watch
from . import spot_check
from .looks import Look, looking_at

log = logging.getLogger("fa_inductor")

FORWARD, BACKWARD = "forward", "backward"
_FINITE = {
    FORWARD: (
        Number("the output is not finite ({})"),
        Number("the log-sum-exp is not finite ({}), so q or k is not, or they overflow"),
    ),
    BACKWARD: tuple(Number(f"the gradient of {name} is not finite ({{}})") for name in "qkv"),
}
_COMPARED = {FORWARD: ("output",), BACKWARD: tuple(f"gradient of {name}" for name in "qkv")}
Repeat = Callable[[Sequence[Any]], None]
Rebuild = Callable[[Sequence[Any]], Any]


class Watched:
    """A kernel under a watch; it is called as the kernel is.

    gradients: how many a repeated backward has memory for, those of q, k and v first: the last of
    its tensors.
    """

    def __init__(self, kernel: Any, name: str, watch: Watch, gradients: int) -> None:
        self.kernel, self.name, self.watch = kernel, name, watch
        self.gradients = gradients
        self.rows: dict[object, Row] = {}
        self.calls = {FORWARD: 0, BACKWARD: 0}

    def check(self, problem: Problem, inputs: Any) -> None:
        self.kernel.check(problem, inputs)

    def forward(
        self, problem: Problem, inputs: Any, out: Tensor, lse: Tensor | None
    ) -> Repeat | None:
        row = self._row(FORWARD, out)
        row.begin()
        repeat = self.kernel.forward(problem, inputs, out, lse)
        made = (out,) if lse is None else (out, lse)
        look = looking_at(made, positive=True)
        look(row, made)
        if self._compares(FORWARD, out):
            row.cells[2].copy_(spot_check.forward(problem, inputs, out))
            row.finish()
        if repeat is None:
            return None
        rebuilt = spot_check.rebuilding(inputs)
        again: Any = self._forward_again(repeat, look, problem, rebuilt)
        if on_bshd := getattr(repeat, "on_bshd", None):
            again.on_bshd = self._forward_again(on_bshd, look, problem, rebuilt, is_bshd=True)
        return again  # type: ignore[no-any-return]

    def _forward_again(
        self, repeat: Repeat, look: Look, problem: Problem, rebuilt: Rebuild, is_bshd: bool = False
    ) -> Repeat:
        def again(tensors: Sequence[Any]) -> None:
            out, lse = tensors[-2:]
            row = self._row(FORWARD, out)
            row.begin()
            repeat(tensors)
            look(row, (out,) if lse is None else (out, lse))
            if self._compares(FORWARD, out):
                if is_bshd:
                    out = out.transpose(1, 2)
                    tensors = [*(t.transpose(1, 2) for t in tensors[:3]), *tensors[3:]]
                row.cells[2].copy_(spot_check.forward(problem, rebuilt(tensors), out))
                row.finish()

        return again

    def backward(
        self,
        problem: Problem,
        inputs: Any,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        grads: Gradients,
    ) -> Repeat | None:
        row = self._row(BACKWARD, out)
        row.begin()
        saved = (out, lse, grad_out, grad_lse)
        repeat = self.kernel.backward(problem, inputs, *saved, grads)
        look = looking_at(grads[:3])
        look(row, grads[:3])
        if self._compares(BACKWARD, out):
            self._compare_gradients(row, problem, inputs, saved, grads[:3])
        if repeat is None:
            return None
        rebuilt = spot_check.rebuilding(inputs)
        own = slice(-self.gradients, 3 - self.gradients)
        given = slice(-self.gradients - 4, -self.gradients)

        def again(tensors: Sequence[Any]) -> None:
            row = self._row(BACKWARD, tensors[0])
            row.begin()
            repeat(tensors)
            look(row, tensors[own])
            if self._compares(BACKWARD, tensors[0]):
                saved = tuple(tensors[given])
                self._compare_gradients(row, problem, rebuilt(tensors), saved, tensors[own])

        return again

    def _compare_gradients(
        self, row: Row, problem: Problem, inputs: Any, saved: Any, grads: Sequence[Tensor]
    ) -> None:
        for cell, error in zip(
            row.cells[3:], spot_check.backward(problem, inputs, saved, grads), strict=True
        ):
            cell.copy_(error)
        row.finish()

    def _row(self, direction: str, tensor: Tensor) -> Row:
        """That of the tensor's device and current stream: on two streams two may run at once."""
        device = tensor.device
        stream = torch._C._cuda_getCurrentRawStream(device.index) if tensor.is_cuda else 0
        key = (direction, device, stream)
        row = self.rows.get(key)
        if row is None or row.table is not numerics.table_of(device):
            names = Names(self.watch.site, self.name, direction)
            numbers = self._numbers(direction, tensor.dtype)
            table = numerics.table_of(device)
            row = table.row((names, self.watch, stream), names, numbers, self.watch.action)
            self.rows[key] = row
        return row

    def _numbers(self, direction: str, dtype: torch.dtype) -> tuple[Number, ...]:
        if self.watch.guard != "oracle":
            return _FINITE[direction]
        limit = spot_check.LIMITS[dtype][direction == BACKWARD]
        said = f"is wrong by {{}} at sampled places, of {limit:.0e} allowed"
        compared = (Number(f"the {name} {said}", limit) for name in _COMPARED[direction])
        return (*_FINITE[direction], *compared)

    def _compares(self, direction: str, tensor: Tensor) -> bool:
        """Whether it is this call's turn to be compared with the oracle."""
        if self.watch.guard != "oracle":
            return False
        self.calls[direction] += 1
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            if self.watch.every > 1:
                log.warning(
                    "fa_inductor: %s is captured into a CUDA graph, where no call is the %d-th: "
                    "fa.guard='oracle' compares nothing there; fa.guard_every=1 compares always",
                    self.watch.site,
                    self.watch.every,
                )
            return self.watch.every == 1
        return (self.calls[direction] - 1) % self.watch.every == 0
