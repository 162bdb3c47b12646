"""The names and arguments of the attention ops; what they mean is told in `ops.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "fa_inductor"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

library = torch.library.Library(NAMESPACE, "DEF")

# What a plain call does not use comes last and is left out of it: calls stay short.
_EXTRAS = (
    "Tensor? bias=None, Tensor? sink=None, Tensor? seqlens_q=None, Tensor? seqlens_k=None, "
    "Tensor? rng=None, float dropout_p=0.0, int? window_left=None, int? window_right=None, "
    "float softcap=0.0"
)
_FORWARD = (
    "(Tensor q, Tensor k, Tensor v, float? scale, str causal, str out_order, bool deterministic, "
    f"str kernel, {_EXTRAS}, bool with_lse=True) -> (Tensor out, Tensor lse)"
)
_INFERENCE = (
    "(Tensor q, Tensor k, Tensor v, float? scale, str causal, str out_order, str kernel, "
    f"{_EXTRAS}) -> Tensor"
)
_SAVED = (
    "Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float? scale, str causal, bool deterministic, str kernel"
)
_BACKWARD = f"({_SAVED}, {_EXTRAS}) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
_BACKWARD_ALL = (
    f"({_SAVED}, bool bias_grad, bool sink_grad, {_EXTRAS}) -> "
    "(Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor grad_sink)"
)


def define(name: str, signature: str) -> torch._ops.OpOverload:
    library.define(name + signature, tags=_TAGS)
    overload: torch._ops.OpOverload = getattr(torch.ops.fa_inductor, name).default
    return overload


def define_four(name: str, forward: str, backward: str) -> tuple[torch._ops.OpOverload, ...]:
    """The ops `name`, `name`_forward, `name`_backward and `name`_gradients.

    Autograd meets the first and the third. Below they become the second and the fourth, the same
    without derivatives: an autograd kernel in Python would slow compiled graphs down.
    """
    signatures = {"": forward, "_forward": forward, "_backward": backward, "_gradients": backward}
    return tuple(define(name + ending, signature) for ending, signature in signatures.items())


def implement(names: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """What the ops of these names do, on any device, and with fake tensors.

    names: separated by spaces.
    """
    for name in names.split():
        for key in ("CPU", "CUDA"):
            library.impl(name, real, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


attention, attention_forward, attention_backward, attention_gradients = define_four(
    "attention", _FORWARD, _BACKWARD
)
attention_inference = define("attention_inference", _INFERENCE)
attention_backward_all = define("attention_backward_all", _BACKWARD_ALL)
attention_gradients_all = define("attention_gradients_all", _BACKWARD_ALL)
