"""What the ops of a variant of attention do with real tensors on the first call of a class.

As in `op_calls.py`: check everything, copy what the kernel cannot read, run the kernel, remember
how to do it again. The later calls are told in each variant's own file: they are fast because
nothing is made that is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import op_calls
from .call_cache import Call
from .kernels.variants import VariantKernels
from .problem import Gradients, Saved
from .spec import BSHD


class Variant(NamedTuple):
    """An op of attention with other inputs than the dense one: "attention_varlen" or so.

    call: the arguments of a call by their names, a NamedTuple with q, k and v first, a `sink`, and
        the properties `inputs`, `problem` and `is_empty`.
    tensors, lists: names of its arguments beside q, k and v that are tensors, and lists of tensors.
    checks: a module with `check_call`, `check_gradient`, `outputs` and `gradients`.
    forward, gradients: the implementations, of which the first calls come here.
    readable: a call itself, or with copies in place of what its kernel cannot read.
    readable_saved: the same for what a backward is given, and the kernel's name.
    """

    name: str
    call: Any
    tensors: tuple[str, ...]
    lists: tuple[str, ...]
    checks: Any
    kernels: VariantKernels
    forward: Callable[..., tuple[Tensor, Tensor]]
    gradients: Callable[..., tuple[Tensor, ...]]
    readable: Callable[[Any], Any]
    readable_saved: Callable[[Saved, str], Saved]


Key = tuple[Hashable, Sequence[Tensor]]  # what a class of calls is remembered by


def first_forward(variant: Variant, call: Any, key: Key) -> tuple[Tensor, Tensor]:
    """(out, lse)."""
    variant.checks.check_call(call)
    implementation = variant.kernels.load(call.kernel)
    if call.is_empty:
        out, lse = variant.checks.outputs(call)
        return out.zero_(), op_calls.lse_without_keys(lse, call.sink)
    problem, inputs = call.problem, call.inputs
    implementation.check(problem, inputs)
    readable = variant.readable(call)
    if readable is not call:
        # The copies have a metadata class of their own, which may be known already.
        return variant.forward(*readable)
    out, lse = variant.checks.outputs(call)
    with op_calls.device_of(call.q):
        repeat = implementation.forward(problem, inputs, out, lse)
    if repeat is not None:
        op_calls.calls.add(*key, Call(key[1], (out, lse), repeat))
    return out, lse


def first_gradients(
    variant: Variant, call: Any, saved: Saved, sink_grad: bool, key: Key
) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and sink; the last without an element if not wanted."""
    out, lse, grad_out, grad_lse = saved
    variant.checks.check_gradient(call, grad_out, grad_lse, out, lse)
    implementation = variant.kernels.load(call.kernel)
    problem, inputs = call.problem, call.inputs
    if not call.is_empty:
        implementation.check(problem, inputs)
        readable, readable_saved = (
            variant.readable(call),
            variant.readable_saved(saved, call.kernel),
        )
        if readable is not call or readable_saved is not saved:
            return variant.gradients(*gradient_arguments(readable, readable_saved, sink_grad))
    made: tuple[Tensor, ...] = variant.checks.gradients(call, sink_grad)
    memory = Gradients(made[0], made[1], made[2], sink=made[3] if sink_grad else None)
    if call.is_empty:
        op_calls.zero(memory, grad_lse)
        return made
    with op_calls.device_of(call.q):
        repeat = implementation.backward(problem, inputs, *saved, memory)
    if repeat is not None:
        op_calls.calls.add(*key, Call(key[1], made, repeat))
    return made


# --- The arguments of the gradient ops ------------------------------------------------------------
#
# (grad_out, grad_lse, q, k, v, out, lse), those of the forward from its fourth to its sink but
# `out_order`, whether the sink's gradient is wanted, the forward's from its sink on.


def gradient_arguments(call: Any, saved: Saved, sink_grad: bool) -> list[Any]:
    """Those for a `call` of the forward."""
    out, lse, grad_out, grad_lse = saved
    names = _backward_names(type(call))
    arguments = [getattr(call, name) for name in names]
    arguments.insert(names.index("sink"), sink_grad)
    return [grad_out, grad_lse, *arguments[:3], out, lse, *arguments[3:]]


def of_gradient(variant: Variant, arguments: Sequence[Any]) -> tuple[Any, Saved, bool]:
    """(call, saved, sink_grad) that give these arguments; the last of them may be left out."""
    grad_out, grad_lse, q, k, v, out, lse, *rest = arguments
    names = _backward_names(variant.call)
    given = [q, k, v, *rest]
    sink_grad = given.pop(names.index("sink"))
    named = dict(zip(names, given, strict=False))
    if "out_order" in variant.call._fields:
        named["out_order"] = BSHD
    return variant.call(**named), (out, lse, grad_out, grad_lse), sink_grad


def _backward_names(call: Any) -> list[str]:
    return [name for name in call._fields if name != "out_order"]
