"""`fa_inductor.probe`: run an attention over lengths and ways, and judge every cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from .cells import PASSES, Cell, Outcome, cells, default_cells
from .controls import Control, controls
from .data import Sizes
from .judging import Setting, judge
from .parallel import judge_all
from .results import ProbeResult
from .subjects import Subject, kernel_subject

# On a CPU the heads are few and small: the faults that are looked for do not depend on them.
_CPU_SIZES = Sizes(1, 4, 2, 32)


def probe(
    fn: Callable[[Tensor, Tensor, Tensor], Tensor] | str | None = None,
    *,
    lengths: Sequence[int] | None = None,
    ways: Sequence[str] | None = None,
    passes: Sequence[str] = PASSES,
    data: Sequence[str] = ("normal",),
    causal: bool = True,
    scale: float | None = None,
    backend: str = "fa_inductor",
    options: dict[str, Any] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    sizes: Sizes | None = None,
    jobs: int = 1,
    progress: Callable[[Outcome], None] | None = None,
) -> ProbeResult:
    """Is this attention right, whichever way it is captured?

    fn: (B, Hq, S, D), (B, Hkv, S, D), (B, Hkv, S, D) -> (B, Hq, S, D), what it computes being
        causal attention unless `causal` says otherwise, scaled by `scale` (1/sqrt(D)); or the name
        of a kernel ("fa4", "cudnn", "reference", "core" for PyTorch's own). None is the first
        kernel that the device has.
    lengths, ways, passes, data: the full product of them is tried; without lengths and ways the
        default matrix (`probing.cells.default_cells`).
    backend, options: as for `torch.compile`; for a kernel's name they are given.
    device, dtype, sizes: "cuda" in bfloat16 where there is a GPU, else "cpu" in float32.
    jobs: processes at a time. With several, `fn` is one that can be imported, and each needs memory
        of its own: up to about 20 GiB at 131072 tokens.
    progress: called with each outcome as it comes.

    Every cell runs on memory full of NaN, and again on memory full of a number. Each output and
    gradient is looked at whole for what is unwritten or not finite, and at sampled rows against
    float64. Dynamo's caches are reset in between. Raises `OptionError` for an unknown word,
    and for several jobs with a function that other processes cannot import.
    """
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    setting = Setting(
        sizes or (Sizes() if on.type == "cuda" else _CPU_SIZES),
        dtype or (torch.bfloat16 if on.type == "cuda" else torch.float32),
        on,
    )
    if fn is None:
        fn = "fa4" if setting.on_gpu else "reference"
    make = partial(_subject, fn, backend, options or {}, causal, scale)
    tried: Sequence[Cell]
    if lengths is None and ways is None and data == ("normal",) and passes == PASSES:
        tried = default_cells(setting.on_gpu)
    else:
        default = default_cells(setting.on_gpu)
        lengths = lengths or list(dict.fromkeys(cell.length for cell in default))
        ways = ways or list(dict.fromkeys(cell.way for cell in default))
        tried = cells(lengths, ways, passes, data)
    if jobs == 1:
        return run_cells(make(), tried, setting, progress)
    if jobs < 1:
        raise OptionError(f"jobs={jobs}: expected a number from 1 on.")
    if not isinstance(fn, str) and _importable(fn) is None:
        raise OptionError(
            f"jobs={jobs}: other processes cannot import {fn!r}; give a function of a module, or "
            "jobs=1."
        )
    outcomes = judge_all(make, tried, setting, jobs, progress)
    return ProbeResult(make(), setting, machine(setting.device), outcomes)


def _subject(
    fn: Callable[..., Tensor] | str,
    backend: str,
    options: dict[str, Any],
    causal: bool,
    scale: float | None,
) -> Subject:
    if isinstance(fn, str):
        return kernel_subject(fn)
    name = getattr(fn, "__name__", "function")
    return Subject(name, fn, backend, options, causal, scale, source=_importable(fn))


def run_cells(
    subject: Subject,
    tried: Sequence[Cell],
    setting: Setting,
    progress: Callable[[Outcome], None] | None = None,
) -> ProbeResult:
    """The outcome of each cell, in order."""
    outcomes = []
    with _restored_dynamo():
        for cell in tried:
            outcome = judge(subject, cell, setting)
            outcomes.append(outcome)
            if progress is not None:
                progress(outcome)
    return ProbeResult(subject, setting, machine(setting.device), outcomes)


def self_test(device: str | torch.device | None = None) -> list[tuple[Control, Outcome, Outcome]]:
    """Each control with what came of it, with its fault and without."""
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = on.type == "cuda"
    setting = Setting(Sizes() if gpu else _CPU_SIZES, torch.bfloat16 if gpu else torch.float32, on)
    with _restored_dynamo():
        return [
            (
                control,
                judge(control.subject(True), control.cell, setting),
                judge(control.subject(False), control.cell, setting),
            )
            for control in controls(gpu)
        ]


def machine(device: torch.device) -> str:
    """What was probed on: `NVIDIA H200, torch 2.11.0`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


def _importable(fn: Callable[..., Any]) -> str | None:
    """How a script can have `fn`; None for a lambda or a local function."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    return f"from {module} import {name} as fn"


@contextmanager
def _restored_dynamo() -> Iterator[None]:
    """Cells compile the same function over and over, each from the start."""
    try:
        yield
    finally:
        torch._dynamo.reset()
