"""`compile_only()`: attention ops compile their kernels, and nothing is computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compile_pass, jit_monitor
from ..errors import CompileOnlyError, FaInductorError
from ..target import Target
from ..torch_compat import fake_tensors
from .compiling import KERNELS, compile_job
from .jobs import Job
from .op_jobs import of_op
from .targets import planned_for

log = logging.getLogger("fa_inductor")

_depth: ContextVar[int] = ContextVar("fa_inductor_compile_only", default=0)


class _CompileOnly:
    """`with fa_inductor.compile_only(target="sm_90a"):` — attention compiles and launches nothing.

    Inside, tensors are fake: they have no memory and no values. `.item()`, `.tolist()`, `int(t)`
    and `float(t)` answer 1 (1.0, True), so that set-up code which asks for a size gets on.
    `torch.compile(model, backend="fa_inductor")` works inside too: the graph runs as rewritten,
    without Inductor, and Dynamo is reset afterwards.
    Kernels go to the directory of `fa-inductor cache`, for each length or, with `all_lengths`, for
    every class of lengths at once.

    target: the GPU to compile for ("sm_90a"), present or not; None for the one that is present.
    all_lengths: whether a call compiles for all classes of lengths.
    fake: False leaves fake tensors to the caller, who has a mode of their own around or inside.
    options: keyword arguments of `FakeTensorMode`.

    May be nested; the outermost names the target. `compile_only.active` and `.depth` say where the
    current thread or task is; they cannot be assigned. PyTorch's modes belong to a thread: tasks
    that take turns inside share it.
    Raises `CompileOnlyError`, `UnknownTargetError`.
    """

    __slots__ = ()

    def __call__(
        self,
        target: str | None = None,
        *,
        all_lengths: bool = False,
        fake: bool = True,
        **options: Any,
    ) -> AbstractContextManager[None]:
        return _entered(target, all_lengths, fake, options)

    @property
    def depth(self) -> int:
        """How many `compile_only()` there are around."""
        return _depth.get()

    @property
    def active(self) -> bool:
        return _depth.get() > 0

    def __setattr__(self, name: str, value: object) -> None:
        raise CompileOnlyError(f"compile_only.{name} follows `with compile_only():`; use that.")


compile_only = _CompileOnly()


def is_compile_only() -> bool:
    """Whether attention compiles and launches nothing, here and now."""
    return _depth.get() > 0


@contextmanager
def _entered(
    target: str | None, all_lengths: bool, fake: bool, options: dict[str, Any]
) -> Iterator[None]:
    outermost = _depth.get() == 0
    token = _depth.set(_depth.get() + 1)
    try:
        with ExitStack() as stack:
            if outermost:
                named = None if target is None else Target.of_name(target)
                stack.enter_context(_without_inductor(named))
                stack.enter_context(planned_for(named))
                stack.enter_context(jit_monitor.allowed())
                if fake:
                    stack.enter_context(fake_tensors(**options))
                stack.enter_context(Seeing(lambda job: _compile(job, all_lengths)))
            yield
    finally:
        _depth.reset(token)


@contextmanager
def _without_inductor(target: Target | None) -> Iterator[None]:
    """What `torch.compile` makes inside is only for inside."""
    state = compile_pass.RewrittenOnly(target)
    token = compile_pass.rewritten_only.set(state)
    try:
        yield
    finally:
        compile_pass.rewritten_only.reset(token)
        if state.graphs:
            torch._dynamo.reset()


def _compile(job: Job, all_lengths: bool) -> None:
    if job.kernel not in KERNELS:
        log.info("nothing to compile ahead for %s", job)
        return
    for each in job.all_lengths() if all_lengths else (job,):
        try:
            compile_job(each)
        except (FaInductorError, AssertionError) as refused:
            if each is job:
                raise
            log.info("not for all lengths: %s: %s", each, refused)


class Seeing(TorchDispatchMode):
    """Hands each call of an attention op to `see`, and answers what fake tensors cannot."""

    def __init__(self, see: Callable[[Job], None]) -> None:
        super().__init__()
        self.see = see

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo compiles under modes of this kind only."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        job = of_op(func, args, kwargs)
        if job is not None:
            for each in job.as_compiled():
                self.see(each)
        return func(*args, **kwargs)
