"""How a variant of attention becomes four ops: schemas, fakes and derivatives.

Of "attention_x" these are `attention_x`, which returns (out, lse), and `attention_x_backward`, the
gradients of q, k, v and sink; below autograd they become `attention_x_forward` and
`attention_x_gradients`.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from . import op_autograd
from .op_schemas import define_four, implement
from .variant_calls import Variant, gradient_arguments, of_gradient


def register(variant: Variant, rest: str, out_order: str, extras: str) -> Any:
    """Define the ops, and give the four.

    rest, out_order, extras: what stands in the schema between v and `deterministic`, without and
        then with what only the forward takes, and from the sink on.
    """
    name = variant.name
    qkv, flags = "Tensor q, Tensor k, Tensor v", "bool deterministic, str kernel"
    ops = define_four(
        name,
        f"({qkv}, {rest}{out_order}, {flags}, {extras}) -> (Tensor out, Tensor lse)",
        f"(Tensor grad_out, Tensor? grad_lse, {qkv}, Tensor out, Tensor lse, {rest}, {flags}, "
        f"bool sink_grad, {extras}) -> "
        "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sink)",
    )
    forward_fake, gradients_fake = _fakes(variant)
    implement(f"{name} {name}_forward", variant.forward, forward_fake)
    implement(f"{name}_backward {name}_gradients", variant.gradients, gradients_fake)
    op_autograd.differentiable(name, *_derivative(variant, ops[2]))
    return ops


def _fakes(variant: Variant) -> Any:
    """Of the forward and of its gradients."""
    checks, kernels = variant.checks, variant.kernels

    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        call = variant.call(*arguments)
        checks.check_call(call)
        kernels.check_known(call.kernel)
        outputs: tuple[Tensor, Tensor] = checks.outputs(call)
        return outputs

    def gradients(*arguments: Any) -> tuple[Tensor, ...]:
        call, (out, lse, grad_out, grad_lse), sink_grad = of_gradient(variant, arguments)
        checks.check_gradient(call, grad_out, grad_lse, out, lse)
        kernels.check_known(call.kernel)
        made: tuple[Tensor, ...] = checks.gradients(call, sink_grad)
        return made

    return forward, gradients


def _derivative(variant: Variant, backward: Any) -> Any:
    """`setup_context` and `differentiate` of the forward, as autograd takes them."""
    fields, lists = variant.call._fields, variant.lists
    tensors = ("q", "k", "v", *variant.tensors)
    numbers = tuple(name for name in fields if name not in (*tensors, *lists))
    sink = fields.index("sink")
    places = [[fields.index(name) for name in names] for names in (tensors, lists, numbers)]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call = variant.call(*inputs)
        of_tensors, of_lists, ctx.numbers = ([call[i] for i in each] for each in places)
        ctx.save_for_backward(*output, *of_tensors, *itertools.chain(*of_lists))
        ctx.counts = [len(each) for each in of_lists]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        count = len(ctx.needs_input_grad)  # of the arguments that were given
        if grad_out is None and grad_lse is None:
            return (None,) * count
        out, lse, *saved = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        given = dict(zip((*tensors, *numbers), (*saved[: len(tensors)], *ctx.numbers), strict=True))
        rest = iter(saved[len(tensors) :])
        for name, length in zip(lists, ctx.counts, strict=True):
            given[name] = list(itertools.islice(rest, length))
        sink_grad = count > sink and ctx.needs_input_grad[sink]
        of_forward = (out, lse, grad_out, grad_lse)
        call = variant.call(**given)
        made = backward(*gradient_arguments(call, of_forward, sink_grad))
        # A list has a list of gradients.
        grads = [[None] * len(each) if isinstance(each, list) else None for each in call]
        grads[:3], grads[sink] = made[:3], made[3] if sink_grad else None
        return tuple(grads[:count])

    return setup_context, differentiate
