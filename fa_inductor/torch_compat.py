"""The one place that touches PyTorch interfaces which are private or differ between versions.

Each function adapts one of them and is exercised by `tests/test_torch_compat.py`, so that a
PyTorch release that moves something fails there, with the name of what moved.
Importing this module does not import Dynamo or Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import AdapterError


def adapted(owner: Any, name: str) -> Any:
    """`owner.name`, or an `AdapterError` that says what this PyTorch no longer has."""
    try:
        return getattr(owner, name)
    except AttributeError as missing:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise AdapterError(
            f"PyTorch {torch.__version__} has no {where}.{name}, which fa_inductor "
            "adapts in torch_compat.py; use a tested version (2.11 to 2.14) or update fa_inductor."
        ) from missing


# --- Tensors, without the dispatcher --------------------------------------------------------

# What Inductor's own generated code calls: several times cheaper than `torch.empty_strided` and
# `torch.as_strided`. Looked up by attribute on each call, as the tests poison what they allocate.
_guards = adapted(torch._C._dynamo, "guards")


def view_as(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """`tensor`'s memory seen with other sizes and strides, `offset` elements on, detached."""
    return _guards._reinterpret_tensor(tensor, size, stride, offset)


def view_as_any(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """`view_as` for a fake tensor too."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return view_as(tensor, size, stride, offset)
    return tensor.detach().as_strided(tuple(size), tuple(stride), tensor.storage_offset() + offset)


def empty_on_current_gpu(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`torch.empty_strided` on the current CUDA device."""
    return _guards._empty_strided_cuda(size, stride, dtype)


def current_raw_stream(device_index: int) -> int:
    """The current stream of a GPU as CUDA's own pointer; several times cheaper than the object."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def metadata_guard(tensors: Sequence[Tensor | None]) -> Callable[..., bool] | None:
    """A function that tells whether tensors have the shapes, strides, dtypes, devices and dispatch
    keys of these, in C++; None if one of these is missing, which it cannot compare.

    It is what Dynamo guards its inputs with; it may say False where a slower look says True.
    """
    if any(tensor is None for tensor in tensors):
        return None
    guard = adapted(_guards, "TensorGuards")(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    )
    return guard.check


def fake_tensors(**options: Any) -> Any:
    """A `FakeTensorMode`; real tensors may take part, unless `options` say otherwise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**{"allow_non_fake_inputs": True, **options})


@contextmanager
def fake_modules() -> Iterator[None]:
    """Inside, `module.to(...)` gives fake modules new parameters: PyTorch would swap their memory,
    which it refuses for fake ones that are in use. Parameters that were shared are not afterwards.
    """
    adapted(torch.nn.Module, "_apply")

    def apply(module: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for each in module.modules() if recurse else (module,):
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    new = fn(parameter.detach())
                    each._parameters[name] = torch.nn.Parameter(new, parameter.requires_grad)
            each._buffers.update({n: fn(b) for n, b in each._buffers.items() if b is not None})
        return module

    with mock.patch.object(torch.nn.Module, "_apply", apply):
        yield


def without_dispatch_modes() -> Any:
    """A context in which no `TorchDispatchMode` is active."""
    from torch.utils import _python_dispatch

    return adapted(_python_dispatch, "_disable_current_modes")()


# --- torch.nn.attention.sdpa_kernel ---------------------------------------------------------


# PyTorch's own orders of preference: the one it starts with, and the one that it sets by itself
# on Hopper and newer once an attention has run. Neither is a user's wish.
_DEFAULT_SDP_PRIORITIES = (
    ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION", "OVERRIDEABLE"),
    ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "OVERRIDEABLE"),
)


def default_sdp_priority() -> tuple[str, ...]:
    """Names of all `SDPBackend`s as PyTorch prefers them on Hopper and newer: cuDNN first."""
    return _DEFAULT_SDP_PRIORITIES[1]


def sdp_priority() -> tuple[str, ...]:
    """Names of all `SDPBackend`s, most preferred first.

    Any order of PyTorch's own counts as `default_sdp_priority`, so that running an attention
    does not look like a change, and only what a user asked for makes a difference.
    """
    order = tuple(
        torch.nn.attention.SDPBackend(value).name
        for value in adapted(torch._C, "_get_sdp_priority_order")()
    )
    return default_sdp_priority() if order in _DEFAULT_SDP_PRIORITIES else order


def sdp_backends() -> tuple[str, ...]:
    """Names of the `SDPBackend`s enabled now, most preferred first."""
    current = adapted(torch.nn.attention, "_cur_sdpa_kernel_backends")
    enabled = {backend.name for backend in current()}
    return tuple(name for name in sdp_priority() if name in enabled)


def sdpa_kernel_targets() -> tuple[Any, Any]:
    """The two functions that Dynamo leaves in a graph for `sdpa_kernel`: (set flags, name)."""
    attention = torch.nn.attention
    return adapted(attention, "_sdpa_kernel"), adapted(attention, "_backend_from_string")


# --- Autograd -------------------------------------------------------------------------------


def autograd_kernel(
    op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The Autograd-key kernel that `torch.library.register_autograd` would register for `op`."""
    from torch._library import autograd

    info = adapted(autograd, "Info")(_backward_fn=backward, _setup_context_fn=setup_context)
    return adapted(autograd, "make_autograd_impl")(op, info)


def no_derivative_is_taken() -> bool:
    """Whether neither autograd, nor forward mode, nor a `torch.func` transform is at work."""
    return (
        not torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
    )


def has_tangent(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether a forward-mode derivative is being taken through one of the tensors."""
    if adapted(forward_ad, "_current_level") < 0:
        return False
    return any(
        forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )


def has_tangent_below_autograd(tensors: Sequence[torch.Tensor | None]) -> bool:
    """`has_tangent` for real tensors inside an op's kernel, where autograd's keys are excluded
    and a tangent would not be seen."""
    if adapted(forward_ad, "_current_level") < 0:
        return False
    nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    with adapted(torch._C, "_ForceDispatchKeyGuard")(nothing, nothing):
        return has_tangent(tensors)


def needs_functorch_gradient(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether a `torch.func` transform is differentiating through one of the tensors."""
    active = adapted(torch._C, "_are_functorch_transforms_active")()
    if not active or not torch.is_grad_enabled():
        return False
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)


def lower_bound(shape_env: Any, expr: Any) -> Any:
    """The least value that a sympy expression of symbolic sizes can have, -oo if it has none."""
    return adapted(shape_env, "bound_sympy")(expr).lower


def tensors_in(value: Any) -> list[tuple[str, Tensor]]:
    """The floating-point tensors in nested containers, each with its place: `[0]['logits']`."""
    from torch.utils import _pytree

    leaves, _ = adapted(_pytree, "tree_flatten_with_path")(value)
    return [
        (adapted(_pytree, "keystr")(path), leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]


# --- Profiler -------------------------------------------------------------------------------

_profiler = torch.autograd.profiler
adapted(_profiler, "_is_profiler_enabled")


def while_profiled(compiled: Callable[..., Any], named: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that is called as `named` whenever a profiler of PyTorch's runs."""

    def run(*args: Any) -> Any:
        if _profiler._is_profiler_enabled:
            return named(*args)
        return compiled(*args)

    return standing_in(run, compiled)


def standing_in(run: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with what PyTorch reads off the compiled graph that it calls (how to store it, ...).

    Not with what Dynamo finds the innermost function by: Dynamo would take off the wrapper.
    """
    own = ("_torchdynamo_", "__wrapped__")
    for name, value in getattr(compiled, "__dict__", {}).items():
        if not name.startswith(own):
            setattr(run, name, value)
    return run


def without_fake_tensors() -> AbstractContextManager[Any]:
    """In which tensors are real, though a graph is being traced."""
    from torch._subclasses import fake_tensor

    return adapted(fake_tensor, "unset_fake_temporarily")()  # type: ignore[no-any-return]
