"""What the attention ops do with real tensors.

The first call of a class of metadata checks everything, copies what a kernel cannot read, and
runs the kernel. If the kernel hands back a function that repeats the call, later calls of the
class are one lookup, the allocations and the launches (`call_cache.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import kernels, op_checks, op_memory, repairs, torch_compat
from .call_cache import Call, Calls
from .errors import DerivativeError, ShapeError
from .problem import Gradients, Inputs, Problem, Saved
from .spec import default_scale

calls = Calls()
Repeat = Callable[[Sequence[Any]], None]


# --- Forward --------------------------------------------------------------------------------------


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    out_order: str,
    deterministic: bool,
    kernel: str,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    rng: Tensor | None = None,
    dropout_p: float = 0.0,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    if forward_ad._current_level >= 0:
        refuse_tangents("attention", (q, k, v, bias, sink))
    extras = (bias, sink, seqlens_q, seqlens_k, rng)
    plain = bias is sink is seqlens_q is seqlens_k is rng is None
    given = (q, k, v) if plain else (q, k, v, *extras)
    # fmt: off
    scalars = (scale, causal, out_order, kernel, dropout_p, window_left, window_right, softcap,
               with_lse, plain)
    # fmt: on
    ready = calls.ready(scalars, given)
    if ready is not None:
        repeat, made = ready
        repeat((q, k, v, *extras, made[0], made[1] if with_lse else None))
        return made[0], made[1]
    inputs = Inputs(q, k, v, *extras)
    scale = default_scale(q.shape[-1]) if scale is None else scale
    numbers = (causal, window_left, window_right, softcap, dropout_p, deterministic)
    problem = Problem(scale, *numbers)
    out, lse, again = _first_forward(inputs, problem, out_order, kernel, with_lse)
    if again is not None:
        calls.add(scalars, given, Call(given, (out, lse), again))
    return out, lse


def _first_forward(
    inputs: Inputs, problem: Problem, out_order: str, kernel: str, with_lse: bool
) -> tuple[Tensor, Tensor, Repeat | None]:
    op_checks.check_inputs(inputs, problem, out_order)
    implementation = kernels.load(kernel)
    readable = repairs.readable_inputs(inputs, kernel)
    if readable is not inputs:
        # The copies have a metadata class of their own, which may be known already.
        out, lse = attention_forward(
            *readable[:3],
            problem.scale,
            problem.causal,
            out_order,
            problem.deterministic,
            kernel,
            *readable[3:],
            problem.dropout_p,
            problem.window_left,
            problem.window_right,
            problem.softcap,
            with_lse,
        )
        return out, lse, None
    out, lse = op_memory.outputs(inputs.q, inputs.v, out_order, with_lse)
    if _is_empty(inputs):
        return out.zero_(), lse_without_keys(lse, inputs.sink), None
    with device_of(inputs.q):
        repeat = implementation.forward(problem, inputs, out, lse if with_lse else None)
    return out, lse, repeat


def attention_inference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: str,
    out_order: str,
    kernel: str,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    rng: Tensor | None = None,
    dropout_p: float = 0.0,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """The output alone, of and as (B, S, H, D) tensors."""
    if forward_ad._current_level >= 0:
        # Compiled code hands over views without the tangents that their bases may have.
        raise no_tangents("attention_inference")
    extras = (bias, sink, seqlens_q, seqlens_k, rng)
    plain = bias is sink is seqlens_q is seqlens_k is rng is None
    given = (q, k, v) if plain else (q, k, v, *extras)
    # fmt: off
    scalars = (scale, causal, out_order, kernel, dropout_p, window_left, window_right, softcap,
               "inference", plain)
    # fmt: on
    ready = calls.ready(scalars, given)
    if ready is not None:
        repeat, made = ready
        repeat((q, k, v, *extras, made[0], None))
        return made[0]
    inputs = Inputs(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *extras)
    scale = default_scale(q.shape[-1]) if scale is None else scale
    problem = Problem(scale, causal, window_left, window_right, softcap, dropout_p)
    out, _, again = _first_forward(inputs, problem, out_order, kernel, False)
    out = out.transpose(1, 2)
    on_bshd = getattr(again, "on_bshd", None)
    if on_bshd is not None:
        calls.add(scalars, given, Call(given, (out,), on_bshd))
    return out


def _is_empty(inputs: Inputs) -> bool:
    """Whether there is no query or no key."""
    return 0 in inputs.q.shape[:3] or inputs.k.shape[2] == 0


def lse_without_keys(lse: Tensor, sink: Tensor | None) -> Tensor:
    """lse, (..., Hq, Sq) or without an element, filled."""
    if sink is None or lse.dim() == 1:
        return lse.fill_(float("-inf"))
    return lse.copy_(sink[:, None])


def device_of(tensor: Tensor) -> Any:
    """Kernels launch on the current device: make it the tensors'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


# --- Backward -------------------------------------------------------------------------------------


def attention_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k and v; arguments as in `attention_gradients_all`, without `bias_grad`
    and `sink_grad`."""
    all_arguments: list[Any] = [*arguments[:11], False, False, *arguments[11:]]
    made = _gradients(*all_arguments)
    return made[0], made[1], made[2]


def attention_gradients_all(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, bias and sink; the last two without an element if not wanted."""
    made = _gradients(*arguments)
    found = iter(made[3:])
    grad_bias, grad_sink = (
        next(found) if wanted else made[0].new_empty((0,)) for wanted in arguments[11:13]
    )
    return made[0], made[1], made[2], grad_bias, grad_sink


def _gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: str,
    deterministic: bool,
    kernel: str,
    bias_grad: bool,
    sink_grad: bool,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    rng: Tensor | None = None,
    dropout_p: float = 0.0,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> Sequence[Tensor]:
    """The gradients of q, k, v, and of bias and sink where they are wanted."""
    given = (q, k, v, bias, sink, seqlens_q, seqlens_k, rng, out, lse, grad_out, grad_lse)
    if forward_ad._current_level >= 0:
        refuse_tangents("attention_backward", given)
    scalars: tuple[Any, ...] = (scale, causal, deterministic, kernel)
    scalars += (dropout_p, window_left, window_right, softcap)
    plain = bias is sink is seqlens_q is seqlens_k is rng is grad_lse is None
    scalars += (bias_grad, sink_grad, "backward", plain)
    looked_at = (q, k, v, out, lse, grad_out) if plain else given
    ready = calls.ready(scalars, looked_at)
    if ready is not None:
        repeat, made = ready
        repeat((*given, *_in_places(made, bias_grad, sink_grad)))
        return made
    scale = default_scale(q.shape[-1]) if scale is None else scale
    numbers = (causal, window_left, window_right, softcap, dropout_p, deterministic)
    problem = Problem(scale, *numbers)
    inputs = Inputs(q, k, v, bias, sink, seqlens_q, seqlens_k, rng)
    saved = (out, lse, grad_out, grad_lse)
    made, again = _first_gradients(inputs, problem, saved, kernel, (bias_grad, sink_grad))
    if again is not None:
        calls.add(scalars, looked_at, Call(looked_at, made, again))
    return made


def _in_places(made: Sequence[Tensor], bias_grad: bool, sink_grad: bool) -> Gradients:
    """The gradients made, with None for those that are not wanted."""
    found = iter(made[3:])
    grad_bias = next(found) if bias_grad else None
    return Gradients(made[0], made[1], made[2], grad_bias, next(found) if sink_grad else None)


def _first_gradients(
    inputs: Inputs,
    problem: Problem,
    saved: Saved,
    kernel: str,
    wanted: tuple[bool, bool],
) -> tuple[list[Tensor], Repeat | None]:
    out, lse, grad_out, grad_lse = saved
    if lse.dim() == 1:
        raise ShapeError("This attention was run with_lse=False: its gradient needs the lse.")
    op_checks.check_gradient(inputs, problem, grad_out, grad_lse, out, lse)
    op_checks.check_wanted(inputs, *wanted)
    implementation = kernels.load(kernel)
    readable = repairs.readable_inputs(inputs, kernel)
    readable_saved = repairs.readable_saved(saved, kernel)
    if readable is not inputs or readable_saved is not saved:
        out, lse, grad_out, grad_lse = readable_saved
        made = list(
            _gradients(
                *(grad_out, grad_lse, *readable[:3], out, lse),
                problem.scale,
                problem.causal,
                problem.deterministic,
                kernel,
                *wanted,
                *readable[3:],
                problem.dropout_p,
                problem.window_left,
                problem.window_right,
                problem.softcap,
            )
        )
        if wanted[0] and inputs.bias is not None:  # the copy may be whole where the bias is not
            made[3] = made[3].sum_to_size(inputs.bias.shape)
        return made, None
    made = list(op_memory.gradients(*inputs[:3]))
    for like, want in zip((inputs.bias, inputs.sink), wanted, strict=True):
        if want and like is not None:
            made.append(op_memory.optional_gradient(like, want, inputs.q))
    memory = _in_places(made, *wanted)
    if _is_empty(inputs):
        zero(memory, grad_lse)
        return made, None
    with device_of(inputs.q):
        repeat = implementation.backward(problem, inputs, out, lse, grad_out, grad_lse, memory)
    return made, repeat


def zero(gradients: Gradients, grad_lse: Tensor | None) -> None:
    """Without queries or keys all is zero, but for the sink: it is all that lse depends on."""
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()
    if gradients.sink is not None and grad_lse is not None:
        gradients.sink.copy_(grad_lse.sum(-1).sum_to_size(gradients.sink.shape))


def refuse_tangents(name: str, tensors: Sequence[Tensor | None]) -> None:
    """PyTorch would take forward-mode derivatives of an op without a formula as zero."""
    if torch_compat.has_tangent_below_autograd(tensors):
        raise no_tangents(name)


def no_tangents(name: str) -> DerivativeError:
    return DerivativeError(
        f"fa_inductor.{name} has no forward-mode derivative (jvp); run this part under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
    )
