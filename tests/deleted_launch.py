"""A pytest plugin under which kernels are not launched: the suite has to notice."""

from __future__ import annotations

from typing import Any

from fa_inductor.kernels import reference


def _launch_nothing(*args: Any) -> None:
    """What is left of a kernel whose launch is not in the graph."""


reference.forward = reference.backward = _launch_nothing  # type: ignore[assignment]
