"""Copies of tensors that a kernel cannot read as they lie in memory.

They cannot change what the op promised: outputs and gradients are laid out by `op_memory.py`,
from the op's arguments. The planned ones are in the report (`layout.copies`); a pointer that is
not aligned shows only at run time, and is logged.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from .layout import ALIGNED_KERNELS, ALIGNMENT, bias_reason, stride_reason
from .problem import Inputs, Saved
from .spec import TensorSpec
from .watch import plain_name

log = logging.getLogger("fa_inductor")

counts: dict[str, int] = {}  # copies made in this process, by the tensor's name


def readable_inputs(inputs: Inputs, kernel: str) -> Inputs:
    """`inputs` itself, or with copies in place of what `kernel` cannot read."""
    if plain_name(kernel) not in ALIGNED_KERNELS:
        return inputs
    changed: dict[str, Tensor] = {}
    for name in ("q", "k", "v"):
        tensor = getattr(inputs, name)
        if reason := _reason(tensor):
            changed[name] = _copied(name, reason, tensor)
    if inputs.bias is not None and (reason := _bias_reason(inputs)):
        changed["bias"] = _copied_bias(reason, inputs)
    for name in ("sink", "seqlens_q", "seqlens_k", "rng"):
        tensor = getattr(inputs, name)
        if tensor is not None and (tensor.data_ptr() % ALIGNMENT or not tensor.is_contiguous()):
            changed[name] = _note(
                name, "pointer or strides", tensor.clone(memory_format=torch.contiguous_format)
            )
    return inputs._replace(**changed) if changed else inputs


def readable_saved(saved: Saved, kernel: str) -> Saved:
    """The same for (out, lse, grad_out, grad_lse)."""
    if plain_name(kernel) not in ALIGNED_KERNELS:
        return saved
    out, lse, grad_out, grad_lse = saved
    if reason := _reason(out):
        out = _copied("out", reason, out)
    if reason := _reason(grad_out):
        grad_out = _copied("grad_out", reason, grad_out)
    if not lse.is_contiguous() or lse.data_ptr() % ALIGNMENT:
        lse = _note("lse", "not contiguous", lse.clone(memory_format=torch.contiguous_format))
    if grad_lse is not None and (not grad_lse.is_contiguous() or grad_lse.data_ptr() % ALIGNMENT):
        copy = grad_lse.clone(memory_format=torch.contiguous_format)
        grad_lse = _note("grad_lse", "not contiguous", copy)
    repaired = (out, lse, grad_out, grad_lse)
    same = all(ours is theirs for ours, theirs in zip(repaired, saved, strict=True))
    return saved if same else repaired


def _reason(tensor: Tensor) -> str | None:
    if tensor.numel() == 0:
        return None
    if tensor.data_ptr() % ALIGNMENT:
        return f"pointer {tensor.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
    return stride_reason(TensorSpec.of(tensor), tensor.element_size())


def _bias_reason(inputs: Inputs) -> str | None:
    bias = inputs.bias
    assert bias is not None
    if bias.data_ptr() % ALIGNMENT:
        return f"pointer {bias.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
    spec = TensorSpec(tuple(bias.shape), bias.stride(), bias.dtype, bias.device)
    return bias_reason(spec, inputs.k.shape[2], bias.element_size())


def _copied(name: str, reason: str, tensor: Tensor) -> Tensor:
    """A dense (B, S, H, D) copy; what is expanded stays expanded, unless only the whole is
    readable: rows of less than 16 bytes."""
    copy = _dense(_narrowed(tensor)).expand(tensor.shape)
    return _note(name, reason, copy if _reason(copy) is None else _dense(tensor))


def _dense(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _copied_bias(reason: str, inputs: Inputs) -> Tensor:
    """A copy of the bias's own size, whole along the keys."""
    assert inputs.bias is not None
    whole = _narrowed(inputs.bias)
    copy = whole.new_empty((*whole.shape[:3], inputs.k.shape[2])).copy_(whole)
    return _note("bias", reason, copy.expand(*inputs.bias.shape[:3], -1))


def _narrowed(tensor: Tensor) -> Tensor:
    """Without the repetitions of expanded dimensions."""
    for dim, (size, stride) in enumerate(zip(tensor.shape[:3], tensor.stride()[:3], strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _note(name: str, reason: str, copy: Tensor) -> Tensor:
    counts[name] = counts.get(name, 0) + 1
    _log_once(name, reason)
    return copy


@functools.lru_cache(maxsize=256)
def _log_once(name: str, reason: str) -> None:
    log.info("%s is copied on each call: %s", name, reason)
