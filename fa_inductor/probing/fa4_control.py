"""FlashAttention-4 with the change that makes it trace, into a graph that launches nothing.

FA4 launches `if not is_fake_mode()`. Answering that with True while Dynamo traces is a popular way
past FA4's first obstacle to tracing. It is made here on a private copy of FA4, which
`fa_inductor.guards` does not know, with what stands in the way after it (as of 4.0.0b36) taken out
as well.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .subjects import Subject

_FA4, _COPY = "flash_attn.cute", "flash_attn_said_to_be_fake"


def is_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None and (
        importlib.util.find_spec(_FA4) is not None
    )


def fa4_subject(faulty: bool) -> Subject:
    """Causal attention by FA4's own function, with the change; without its fault, as it is: then
    `fa_inductor.guards` stands in for it."""
    module = _with_popular_change() if faulty else importlib.import_module(_FA4)
    flash_attn_func = module.flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        out = out[0] if isinstance(out, tuple) else out
        return out.transpose(1, 2)

    return Subject("FA4, said to be fake", attend, "inductor", causal=True)


class _Warm:
    """A cache of compiled kernels that has every one: Dynamo cannot look into a dictionary whose
    lookup reads files. None is taken from it, as none is launched."""

    def __contains__(self, key: Any) -> bool:
        return True


@functools.cache
def _with_popular_change() -> types.ModuleType:
    module: Any = importlib.import_module(f"{_copied()}.interface")
    module.is_fake_mode = torch.compiler.is_compiling
    # gb0059: the alignment of a pointer. The strides are looked at as before.
    module.maybe_contiguous = _maybe_contiguous
    # gb0291: the DSL's ceil_div logs.
    module.cute = types.SimpleNamespace(**{**vars(module.cute), "ceil_div": _ceil_div})
    module._flash_attn_fwd.compile_cache = _Warm()
    # What is asked of the driver is asked before.
    arch, processors = _gpu()
    module._get_device_arch = lambda: arch
    module.get_num_sms_for_selection = lambda device, arch: processors
    return module  # type: ignore[no-any-return]


def _copied() -> str:
    """The name of a package that has FA4's sources, and is not FA4 to anybody."""
    spec = importlib.util.find_spec(_FA4)
    assert spec is not None
    assert spec.origin is not None
    # Dynamo reads sources while it traces: they stay until the program ends.
    folder = Path(tempfile.mkdtemp(prefix="fa_inductor_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / _COPY).mkdir()
    for source in Path(spec.origin).parent.glob("*.py"):
        (folder / _COPY / source.name).write_text(source.read_text().replace(_FA4, _COPY))
    sys.path.append(str(folder))
    return _COPY


def _maybe_contiguous(tensor: Tensor | None, align_bytes: int = 16) -> Tensor | None:
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _gpu() -> tuple[int, int]:
    """(architecture, SMs) of the GPU here, or of an H100 where there is none."""
    if not torch.cuda.is_available():
        return 90, 132
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor, torch.cuda.get_device_properties().multi_processor_count
