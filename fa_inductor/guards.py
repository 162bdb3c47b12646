"""User code that calls FlashAttention-4 itself: under Dynamo the call becomes our op.

Dynamo cannot trace FA4: 4.0.0b36 breaks the graph, and with its fake-mode check patched the
graph holds an empty output and launches no kernel. So Dynamo is told to use a substitute for
`flash_attn.cute.flash_attn_func`; eager calls are left alone. Nothing is imported here: the
substitute is registered once both Dynamo and FA4 have been imported by somebody.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from . import (
    dynamo_compat,
    ops,  # noqa: F401  (registers the op that the substitute calls)
)
from .spec import BSHD_ORDER
from .target import TESTED_LIBRARIES, installed_libraries

log = logging.getLogger("fa_inductor")

_FA4 = "flash_attn.cute.interface"
_AWAITED = ("torch._dynamo", _FA4)

# Arguments of flash_attn_func that the op does not carry, with the value that means "unused".
NOT_CARRIED: dict[str, Any] = {
    "qv": None,
    "gather_kv_indices": None,
    "window_size": (None, None),
    "learnable_sink": None,
    "softcap": 0.0,
    "num_splits": 1,
    "pack_gqa": None,
    "score_mod": None,
    "score_mod_bwd": None,
    "mask_mod": None,
    "aux_tensors": None,
    "aux_scalars": None,
    "block_sparse_tensors": None,
    "block_sparse_tensors_bwd": None,
    "gather_bwd_recompute_p": False,
    "gather_bwd_token_chunk": None,
}


def install() -> None:
    """Arrange for `flash_attn_func` to be substituted in graphs. Idempotent and cheap.

    Nothing can be done before both Dynamo and FA4 are there, so whichever is missing is awaited.
    """
    if not _substitute_when_both_are_imported():
        for name in _AWAITED:
            if name not in sys.modules:
                sys.meta_path.insert(0, _ImportHook(name))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Calls `_substitute_when_both_are_imported` once one module has been imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        if found is None or found.loader is None:
            return found
        run = found.loader.exec_module

        def exec_and_substitute(module: ModuleType) -> None:
            run(module)
            _imported.add(fullname)
            _substitute_when_both_are_imported()

        found.loader.exec_module = exec_and_substitute  # type: ignore[method-assign]
        return found


# Modules whose code has run to its end, as told by the hooks.
_imported: set[str] = set()
_substituted: list[Callable[..., Any]] = []


def _substitute_when_both_are_imported() -> bool:
    if not all(map(_is_imported, _AWAITED)):
        return False
    if not _substituted:
        _substitute(sys.modules[_FA4])
    return True


def _is_imported(name: str) -> bool:
    """Whether a module is there and complete; `sys.modules` also has those under way."""
    if name in _imported:
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _substitute(interface: ModuleType) -> None:
    # Whatever is not substituted must break the graph, not be traced into.
    dynamo_compat.never_trace_module(_FA4.rpartition(".")[0])
    original = interface.flash_attn_func
    for function in (original, interface.flash_attn_varlen_func):
        dynamo_compat.never_compile(function)
    substitute = _make_substitute(original)
    _substituted.append(substitute)
    if list(inspect.signature(original).parameters) == list(
        inspect.signature(substitute).parameters
    ):
        dynamo_compat.substitute_in_graphs(original, substitute)
    else:
        log.warning(
            "flash_attn_func of this FlashAttention-4 (%s) has other arguments than %s; "
            "calls of it break the graph.",
            installed_libraries()["flash-attn-4"],
            TESTED_LIBRARIES["flash-attn-4"],
        )


def _is_unused(value: Any, unused: Any) -> bool:
    if value is unused:
        return True
    return isinstance(value, (bool, int, float, tuple)) and value == unused


def _make_substitute(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function with `original`'s signature that Dynamo can trace: our op, or a graph break."""

    def broken(name: str) -> Callable[..., Any]:
        reason = f"fa_inductor: flash_attn_func({name}=...) is not carried by its op"
        return torch._dynamo.disable(original, reason=reason)

    eager = {name: broken(name) for name in (*NOT_CARRIED, "k is v, head_dim 512")}

    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qv: Any = None,
        gather_kv_indices: Any = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Any = (None, None),
        learnable_sink: Any = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        score_mod: Any = None,
        score_mod_bwd: Any = None,
        mask_mod: Any = None,
        aux_tensors: Any = None,
        aux_scalars: Any = None,
        block_sparse_tensors: Any = None,
        block_sparse_tensors_bwd: Any = None,
        return_lse: bool = False,
        gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> Any:
        """FA4's own contract: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv);
        returns (out (B, Sq, Hq, Dv), lse (B, Hq, Sq) or None)."""
        given = {
            "qv": qv,
            "gather_kv_indices": gather_kv_indices,
            "window_size": window_size,
            "learnable_sink": learnable_sink,
            "softcap": softcap,
            "num_splits": num_splits,
            "pack_gqa": pack_gqa,
            "score_mod": score_mod,
            "score_mod_bwd": score_mod_bwd,
            "mask_mod": mask_mod,
            "aux_tensors": aux_tensors,
            "aux_scalars": aux_scalars,
            "block_sparse_tensors": block_sparse_tensors,
            "block_sparse_tensors_bwd": block_sparse_tensors_bwd,
            "gather_bwd_recompute_p": gather_bwd_recompute_p,
            "gather_bwd_token_chunk": gather_bwd_token_chunk,
        }
        kept = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "deterministic": deterministic,
            "return_lse": return_lse,
        }
        for name, unused in NOT_CARRIED.items():
            if not _is_unused(given[name], unused):
                return eager[name](q, k, v, **given, **kept)
        if k is v and v.shape[-1] == 512:  # FA4 takes this as multi-head latent attention
            return eager["k is v, head_dim 512"](q, k, v, **given, **kept)
        out, lse = torch.ops.fa_inductor.attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            softmax_scale,
            "bottom_right" if causal else "none",
            list(BSHD_ORDER),
            deterministic,
            "fa4",
        )
        out = out.transpose(1, 2)
        if return_lse:
            return out, lse
        # FA4 gives an lse that no gradient flows through when it was not asked for one.
        return out, lse.detach() if q.requires_grad or k.requires_grad or v.requires_grad else None

    return flash_attn_func
