"""The jobs of a model: traced on fake CPU tensors, planned for a GPU that is only named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from .. import compile_pass, dynamo_compat, kernels
from ..config import split_options
from ..target import Target
from ..torch_compat import fake_modules, fake_tensors
from .compile_only import Seeing
from .jobs import Job

Made = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


def jobs_of(
    make: Callable[[], Made],
    target: str,
    options: Mapping[str, Any] | None = None,
    backward: bool = True,
) -> list[Job]:
    """The kernel calls of one call of a model, and of its backward.

    make: returns (fn, args, kwargs). It runs under a `FakeTensorMode`: a model of any size costs no
        memory, as long as it is made on the CPU and reads no file.
    options: as for the backend; only the `fa.` keys matter.
    backward: whether to differentiate the outputs, if they can be.
    Raises `UnknownTargetError`, `OptionError`.
    """
    config, _ = split_options(options)
    for name in config.kernels:
        kernels.check_known(name)
    planned = Target.of_name(target)
    seen: dict[str, Job] = {}

    def see(job: Job) -> None:
        seen[job.dumps()] = job

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compile_pass.run(gm, config, planned)

        def run(*args: Any) -> Any:
            with Seeing(see):
                return gm.forward(*args)

        return run

    with fake_tensors(), _made_on_cpu():
        fn, args, kwargs = make()
    with dynamo_compat.untouched_dynamo():
        results = dynamo_compat.compile_isolated(fn, backend)(*args, **kwargs)
    outputs = [
        each
        for each in pytree.tree_leaves(results)
        if isinstance(each, Tensor) and each.requires_grad
    ]
    if backward and outputs:
        with Seeing(see):
            torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    return list(seen.values())


@contextmanager
def _made_on_cpu() -> Iterator[None]:
    """A model that asks for the GPU that is there would be made on it."""
    with mock.patch.object(torch.cuda, "is_available", return_value=False), fake_modules():
        yield
