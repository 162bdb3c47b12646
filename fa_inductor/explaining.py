"""`explain`: what the pass would do with a function, without compiling or changing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from . import compile_pass, dynamo_compat, kernels, report
from .config import split_options
from .patterns import op_call
from .target import Target


def explain(
    fn: Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    target: str | None = None,
) -> Callable[..., report.Report]:
    """A function that runs `fn` once on the arguments it is given and returns the `Report`.

    fn: a function or nn.Module. Its graphs are captured as `torch.compile` would and planned
        by the pass; what is executed is the captured code as it was written.
    options: as for the backend; only the `fa.` keys matter.
    target: plan for this GPU ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_80"), which need
        not be present: give CPU tensors. None plans for the device that the tensors are on.
        Calls of FlashAttention-4 on CPU tensors run on the reference kernel.

    Dynamo's cache, shape profile and counters are afterwards as they were before.
    Raises `UnknownTargetError`, `OptionError`.
    """
    backend = planning_backend(options, target)

    def run(*args: Any, **kwargs: Any) -> report.Report:
        with dynamo_compat.untouched_dynamo(), report.collecting() as collected:
            dynamo_compat.compile_isolated(fn, backend)(*args, **kwargs)
        return collected

    return run


def planning_backend(options: Mapping[str, Any] | None, target: str | None) -> Callable[..., Any]:
    """A Dynamo backend that plans, and runs the captured code as it was written.

    options, target, errors: as for `explain`.
    """
    config, _ = split_options(options)
    for name in config.kernels:
        kernels.check_known(name)
    planned_for = None if target is None else Target.of_name(target)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compile_pass.run(gm, config, planned_for, apply=False)
        op_call.move_to_reference(gm)
        return gm.forward

    return backend
