"""FlashAttention-4 (`flash_attn.cute`), CuTe-DSL kernels for Hopper and Blackwell.

FA4 works on (B, S, H, D); the transposes here are views, so it sees the tensors' real strides.
Its Python entries cost several times what their launches do, so the launches are noted
(`fa4_launch.py`) and handed back to be repeated for the same metadata.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, MissingLibraryError, ShapeError
from ..layout import packed_strides
from ..problem import Gradients, Inputs, Problem, Saved
from ..target import TESTED_LIBRARIES
from ..torch_compat import view_as_any
from . import fa4_objects
from .fa4_launch import Recording, Repeat, recording

SINK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def _interface() -> Any:
    try:
        from flash_attn.cute import interface
    except ImportError as missing:
        raise MissingLibraryError(
            f"Kernel fa4 needs {missing.name or 'flash_attn.cute'}: "
            f"pip install flash-attn-4=={TESTED_LIBRARIES['flash-attn-4']} "
            "'nvidia-cutlass-dsl[cu13]>=4.8.1' triton"
        ) from missing
    fa4_objects.install(interface)
    return interface


def use_kernel_cache() -> None:
    """Have FlashAttention-4 look for its compiled kernels in fa_inductor's directory, and keep
    them there, also where the user's own code calls it. The first attention op does so too."""
    _interface()


def _check(problem: Problem, inputs: Inputs) -> None:
    """The limits that hold on every GPU, as errors for people; FA4 itself only asserts."""
    q, k, v = inputs[:3]
    if problem.is_top_left and (q.shape[2] != k.shape[2] or _has_lengths(inputs)):
        lengths = " with sequence lengths" if _has_lengths(inputs) else ""
        raise ShapeError(
            f"Kernel fa4 aligns causal masks bottom-right; top_left needs Sq == Sk, got "
            f"Sq {q.shape[2]} and Sk {k.shape[2]}{lengths}."
        )
    if inputs.bias is not None or problem.dropout_p:
        what = "bias" if inputs.bias is not None else f"dropout_p={problem.dropout_p}"
        raise ShapeError(f"Kernel fa4 has no {what}; name another kernel or leave it to PyTorch.")
    for side in (problem.window_left, problem.window_right):
        if side is not None and side < 0:
            raise ShapeError(f"Kernel fa4 takes window bounds from 0 on, got {side}.")
    if not q.is_cuda:
        raise DeviceError(f"Kernel fa4 runs on CUDA tensors, got tensors on {q.device}.")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise DtypeError(f"Kernel fa4 takes float16 and bfloat16, got {q.dtype}.")
    for dim in (q.shape[3], v.shape[3]):
        if dim % 8 or not 8 <= dim <= 256:
            raise ShapeError(f"Kernel fa4 takes head dims 8, 16, ... 256, got {dim}.")


def check_variant(problem: Problem, inputs: Inputs) -> None:
    """The same for a variant of attention, of which nobody else has looked at the sink."""
    _check(problem, inputs)
    if inputs.sink is not None and inputs.sink.dtype not in SINK_DTYPES:
        raise DtypeError(
            f"Kernel fa4 takes sinks of float16, bfloat16 and float32, got {inputs.sink.dtype}."
        )


def _bshd(tensor: Tensor) -> Tensor:
    """A (B, H, S, D) tensor as FA4 takes it, without its autograd history.

    FA4 copies a tensor for the stride of a dimension of size 1 too, which never moves in memory:
    such a stride is made one that it likes.
    """
    view = tensor.detach().transpose(1, 2)
    return view if 1 not in view.shape else view_as_any(view, view.shape, packed_strides(view), 0)


def _given(inputs: Inputs) -> list[Tensor | None]:
    """The inputs as FA4 takes them, None for those that it does not."""
    qkv = [_bshd(tensor) for tensor in inputs[:3]]
    sink = None if inputs.sink is None else inputs.sink.detach()
    return [*qkv, None, sink, inputs.seqlens_q, inputs.seqlens_k, None]


def _arguments(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    """Arguments that FA4's forward and backward share. No window is None, never -1."""
    return {
        "softmax_scale": problem.scale,
        "causal": problem.causal != "none",
        "window_size_left": problem.window_left,
        "window_size_right": problem.window_right,
        "softcap": problem.softcap,
        "seqused_q": inputs.seqlens_q,
        "seqused_k": inputs.seqlens_k,
        "learnable_sink": None if inputs.sink is None else inputs.sink.detach(),
    }


def _has_lengths(inputs: Inputs) -> bool:
    return inputs.seqlens_q is not None or inputs.seqlens_k is not None


def forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor | None) -> Repeat | None:
    """See `fa_inductor.kernels`. `out` may have any dimension order with D innermost."""
    _check(problem, inputs)
    if _has_lengths(inputs):  # FA4 leaves the rows past them as they are
        out.zero_()
        if lse is not None and inputs.sink is None:
            lse.fill_(float("-inf"))
        elif lse is not None and inputs.sink is not None:
            lse.copy_(inputs.sink[None, :, None])
    entry = _interface()._flash_attn_fwd
    given = [*_given(inputs), _bshd(out), lse]
    with recording((entry,)) as noted:
        entry(
            *given[:3],
            **_arguments(problem, inputs),
            return_lse=lse is not None,
            out=given[-2],
            lse=lse,
        )
    repeat = None if _has_lengths(inputs) else noted.repeat(given)
    if repeat is not None and any(map(_is_moved, (*inputs[:3], out), (*given[:3], given[-2]))):
        repeat.on_bshd = repeat  # type: ignore[method-assign]
    return repeat


def _is_moved(tensor: Tensor, view: Tensor | None) -> bool:
    """Whether `_bshd` has changed strides."""
    return view is not None and tensor.transpose(1, 2).stride() != view.stride()


def backward(
    problem: Problem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grads: Gradients,
) -> Repeat | None:
    """See `fa_inductor.kernels`. FA4 does not check the gradients' strides: contiguous BSHD."""
    _check(problem, inputs)
    if _has_lengths(inputs):
        for grad in grads[:3]:
            grad.zero_()
    saved = (_bshd(out), lse, _bshd(grad_out), grad_lse)
    made = [_bshd(grad) for grad in grads[:3]]
    given = [*_given(inputs), *saved, *made, None, None]
    noted, results = noted_backward(problem, given[:3], saved, made, _arguments(problem, inputs))
    made_by_fa4 = {}
    if inputs.sink is not None:
        if grads.sink is None:
            return None
        grads.sink.copy_(results[3])
        made_by_fa4[len(given) - 1] = results[3]
    return None if _has_lengths(inputs) else noted.repeat(given, made_by_fa4)


def noted_backward(
    problem: Problem,
    qkv: Sequence[Tensor | None],
    saved: Saved,
    made: Sequence[Tensor],
    arguments: dict[str, Any],
) -> tuple[Recording, Any]:
    """FA4's backward, of tensors as it takes them: its launches, and what it gives back, of which
    the fourth is the gradient of the sink.

    made: memory for the gradients of q, k and v.
    """
    interface = _interface()
    entry = interface._flash_attn_bwd
    out, lse, grad_out, grad_lse = saved
    grads = dict(zip(("dq", "dk", "dv"), made, strict=True), dlse=grad_lse)
    fixed = {**arguments, "deterministic": problem.deterministic}
    with recording((interface._bwd_preprocess, entry, interface._bwd_postprocess_convert)) as noted:
        results = entry(*qkv, out, grad_out, lse, **fixed, **grads)
    return noted, results
