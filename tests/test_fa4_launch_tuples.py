"""Repeating launches whose tensors come in tuples and lists, as FA4 passes some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from fa4_stub import SIZE, copy, enter, tensors
from torch import Tensor

from poison import poisoned


class AuxData(NamedTuple):
    """As FA4 passes with every forward."""

    tensors: list[Tensor] | None = None
    scalars: tuple[float, ...] | None = None


class SinkTensors(NamedTuple):
    """As FA4's `LearnableSinkBwdTensors`: a temporary, tensors of the caller, and a result."""

    total: Tensor
    sink: Tensor
    result: Tensor
    factor: float = 2.0


TUPLES: dict[str, Callable[[Tensor], Any]] = {
    "named, without tensors": lambda tensor: AuxData(scalars=(1.0,)),
    "named, with a tensor": lambda tensor: AuxData(tensor),
    "with a tensor": lambda tensor: (tensor, 2),
    "a list with a tensor": lambda tensor: [None, tensor],
    "named, with a list with a tensor": lambda tensor: AuxData([tensor]),
    "named in named, with a tensor": lambda tensor: AuxData(AuxData(tensor)),
}


@pytest.mark.parametrize("name", TUPLES)
def test_tuples_of_arguments(name: str) -> None:
    """The same again, with the tensors of the call at hand."""
    make = TUPLES[name]
    seen: list[Any] = []
    x, _, out = tensors()
    noted = enter([(lambda x, to, more: (seen.append(more), copy(x, to)), (x, out, make(x)))])
    repeat = noted.repeat((x, out))
    assert repeat is not None
    again, _, out = tensors()
    repeat((again, out))
    torch.testing.assert_close(out, again)
    assert pointers(seen[1]) == pointers(make(again))
    assert type(seen[1]) is type(make(again))


def pointers(value: Any) -> Any:
    """`value` with the pointers of tensors in their place."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    return [pointers(each) for each in value] if isinstance(value, (list, tuple)) else value


def reduce_sink(result: Tensor, more: SinkTensors) -> None:
    result.copy_(more.total)
    more.result.copy_(more.total.sum(1) * more.sink * more.factor)


def test_a_result_that_fa4_allocates_lands_in_the_callers_tensor() -> None:
    """FA4's gradient of the sink, in a named tuple beside a temporary and the sink itself; never
    where FA4 gave a copy of what its kernel wrote."""
    (x, _, out), sink, made = tensors(), torch.randn(2), torch.empty(2)
    total = torch.zeros(SIZE)
    noted = enter([(copy, (x, total)), (reduce_sink, (out, SinkTensors(total, sink, made)))])
    assert noted.repeat((x, sink, out, None, None), {4: made.clone()}) is None
    repeat = noted.repeat((x, sink, out, None, None), {4: made})
    assert repeat is not None
    before = made.clone()
    with poisoned():
        (x, _, out), sink, result = tensors(), torch.randn(2), torch.full((2,), float("nan"))
        repeat((x, sink, out, None, result))
    torch.testing.assert_close(out, x)
    torch.testing.assert_close(result, 2 * x.sum(1) * sink)
    torch.testing.assert_close(made, before, rtol=0, atol=0)
