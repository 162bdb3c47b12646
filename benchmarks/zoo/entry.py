"""What the zoo is made of: an entry names a model and makes it, a case is it with its inputs."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2
VOCABULARY = 256


@dataclass(frozen=True)
class Case:
    """A model, the keyword arguments of its call, and what of its output counts.

    rows: which (batch, position) of the output are compared; None for all. Outputs at padding mean
        nothing, and PyTorch itself gives others there from one attention backend to the next.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    rows: Tensor | None = None

    def moved(self, device: str, dtype: torch.dtype) -> Case:
        """A copy on `device` with parameters and floating inputs in `dtype`.

        Buffers keep theirs, as in a model loaded in `dtype`: rotary frequencies are float32.
        """
        model = copy.deepcopy(self.model).to(device)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        inputs = {name: _moved(value, device, dtype) for name, value in self.inputs.items()}
        return Case(model, inputs, None if self.rows is None else self.rows.to(device))


def _moved(value: Any, device: str, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


@dataclass(frozen=True)
class Entry:
    """One model as one row of the table.

    attention: whose code computes attention: transformers' `attn_implementation`, or "diffusers".
    given: the mask that the user gives: "plain" (none), "padded" or "packed".
    sites: how many times one forward computes attention, counted by hand and not by the pass.
    requires: the package that has the model.
    """

    model: str
    attention: str
    given: str
    sites: int
    make: Callable[[], Case]
    requires: str = "transformers"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.attention}-{self.given}"

    @property
    def missing(self) -> str | None:
        """Why the entry cannot be made here, or None."""
        if importlib.util.find_spec(self.requires) is None:
            return f"{self.requires} is not installed"
        return None

    def build(self) -> Case:
        """The case, the same each time, in inference mode of its dropouts."""
        torch.manual_seed(0)
        case = self.make()
        case.model.eval()
        return case


def spread(model: nn.Module) -> nn.Module:
    """Weights that make attention matter: each projection keeps the variance of what it is given.

    With the usual initialisation, 0.02 at these widths, all keys weigh nearly the same and the
    residual stream hides what attention adds: a wrong mask would pass for rounding.
    """
    with torch.no_grad():
        for module in model.modules():
            convolves = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    inputs = parameter[0].numel() if convolves else parameter.shape[-1]
                    parameter.normal_(std=inputs**-0.5)
                elif name == "sinks":  # about as much as all keys of a row together
                    parameter.normal_(mean=4.0)
    return model


def tokens(length: int) -> Tensor:
    """Token ids without those that models keep for padding, start and end."""
    return torch.randint(3, VOCABULARY, (BATCH, length))


def padding(length: int, side: str) -> Tensor:
    """A user's padding mask (B, S) of 0 and 1, with another number of tokens for each sequence."""
    kept = torch.ones(BATCH, length, dtype=torch.long)
    for row in range(BATCH):
        missing = length * (row + 1) // 5
        kept[row, slice(None, missing) if side == "left" else slice(length - missing, None)] = 0
    return kept
