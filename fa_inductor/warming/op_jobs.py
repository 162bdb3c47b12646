"""The job of a call of one of the attention ops, or of one of their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..masked_problem import MaskedCall, Visible
from ..op_schemas import NAMESPACE
from ..problem import Inputs, Problem
from ..spec import default_scale
from ..varlen_problem import VarlenCall, VarlenInputs
from .jobs import Job, Layout

_NUMBERS = ("causal", "window_left", "window_right", "softcap", "dropout_p", "deterministic")


def of_op(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Job | None:
    """The job of a call; None for an op that is no attention of ours."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if namespace != NAMESPACE or not name.startswith("attention"):
        return None
    given = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
    given.update(zip((each.name for each in schema.arguments), args, strict=False))
    given.update(kwargs)
    backward = name.endswith(("backward", "gradients", "_all"))
    rest: dict[str, Any] = {
        "grad_out": given.get("grad_out"),
        "lse_grad": given.get("grad_lse") is not None,
        "sink_grad": bool(given.get("sink_grad", False)),
    }
    if "varlen" in name:
        varlen = VarlenCall(**{field: given[field] for field in VarlenCall._fields})
        return of_varlen(varlen.kernel, backward, varlen.problem, varlen.inputs, **rest)
    if "masked" in name:
        given.setdefault("out_order", "BSHD")
        masked = MaskedCall(**{field: given[field] for field in MaskedCall._fields})
        where = masked.inputs, masked.visible
        return of_masked(masked.kernel, backward, masked.problem, *where, **rest)
    if "packed" in name:
        for view in "qkv":
            numbers = given[view]
            given[view] = given["packed"].as_strided(numbers[:4], numbers[4:8], numbers[8])
    if "inference" in name:
        given.update({view: given[view].transpose(1, 2) for view in "qkv"})
    scale = given["scale"]
    scale = default_scale(given["q"].shape[-1]) if scale is None else scale
    defaults = Problem(scale)
    problem = Problem(scale, **{n: given.get(n, getattr(defaults, n)) for n in _NUMBERS})
    tensors: dict[str, Any] = {field: given.get(field) for field in Inputs._fields}
    with_lse = "inference" not in name and bool(given.get("with_lse", True))
    return of_dense(
        given["kernel"], backward, problem, Inputs(**tensors), with_lse=with_lse, **rest
    )


def of_dense(kernel: str, backward: bool, problem: Problem, inputs: Inputs, **rest: Any) -> Job:
    """rest: grad_out, with_lse, lse_grad and sink_grad, as in `Job`."""
    return _job("dense", kernel, backward, problem, inputs._asdict(), **rest)


def of_varlen(
    kernel: str, backward: bool, problem: Problem, inputs: VarlenInputs, **rest: Any
) -> Job:
    bounds = (int(inputs.max_seqlen_q), int(inputs.max_seqlen_k))
    return _job("varlen", kernel, backward, problem, inputs._asdict(), bounds=bounds, **rest)


def of_masked(
    kernel: str, backward: bool, problem: Problem, inputs: Inputs, visible: Visible, **rest: Any
) -> Job:
    tensors = inputs._asdict() | {f"t{n}": each for n, each in enumerate(visible.tensors)}
    tensors["rows"] = visible.by_query.partial_count[..., 0]
    return _job("masked", kernel, backward, problem, tensors, text=visible.text, **rest)


def _job(
    form: str,
    kernel: str,
    backward: bool,
    problem: Problem,
    tensors: Mapping[str, Any],
    grad_out: Tensor | None = None,
    **rest: Any,
) -> Job:
    layouts = {name: Layout.of(t) for name, t in tensors.items() if isinstance(t, Tensor)}
    if grad_out is not None and Layout.of(grad_out).expanded:
        layouts["grad_out"] = Layout.of(grad_out)
    return Job(form, kernel, backward, problem, layouts, **rest)
