"""The names and arguments of the attention ops; what they mean is told in `ops.py`."""

from __future__ import annotations

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


# Each op that autograd meets, and what it becomes below: the same without derivatives, so that
# compiled graphs are not slowed down by an autograd kernel in Python.
attention = define("attention", _FORWARD)
attention_forward = define("attention_forward", _FORWARD)
attention_inference = define("attention_inference", _INFERENCE)
attention_backward = define("attention_backward", _BACKWARD)
attention_gradients = define("attention_gradients", _BACKWARD)
attention_backward_all = define("attention_backward_all", _BACKWARD_ALL)
attention_gradients_all = define("attention_gradients_all", _BACKWARD_ALL)
