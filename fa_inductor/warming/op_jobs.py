"""The job of a call of one of the attention ops, or of one of their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..masked_problem import MaskedCall, MaskedInputs
from ..op_schemas import NAMESPACE
from ..problem import Inputs, Problem
from ..spec import BSHD, default_scale
from ..varlen_problem import VarlenCall, VarlenInputs
from ..watch import plain_name
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
    given["kernel"] = plain_name(given["kernel"])
    backward = name.endswith(("backward", "gradients", "_all"))
    rest: dict[str, Any] = {
        "grad_out": given.get("grad_out"),
        "lse_grad": given.get("grad_lse") is not None,
        "sink_grad": bool(given.get("sink_grad", False)),
    }
    for variant in (VarlenCall, MaskedCall):
        if variant.__name__.removesuffix("Call").lower() in name:
            given.setdefault("out_order", BSHD)
            call = variant(**{field: given[field] for field in variant._fields})
            return of_call(call.kernel, backward, call.problem, call.inputs, **rest)
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
    inputs = Inputs(**{field: given.get(field) for field in Inputs._fields})  # type: ignore[arg-type]
    with_lse = "inference" not in name and bool(given.get("with_lse", True))
    return of_call(given["kernel"], backward, problem, inputs, with_lse=with_lse, **rest)


def of_call(
    kernel: str,
    backward: bool,
    problem: Problem,
    inputs: Inputs | VarlenInputs | MaskedInputs,
    grad_out: Tensor | None = None,
    **rest: Any,
) -> Job:
    """rest: with_lse, lse_grad and sink_grad, as in `Job`."""
    form, tensors = "dense", inputs._asdict()
    read: tuple[Tensor, ...] = ()
    if isinstance(inputs, VarlenInputs):
        form = "varlen"
        rest["bounds"] = (int(inputs.max_seqlen_q), int(inputs.max_seqlen_k))
    elif isinstance(inputs, MaskedInputs):
        form, visible = "masked", inputs.visible
        rest["text"], read = visible.text, visible.tensors
        tensors["rows"] = visible.by_query.partial_count[..., 0]
    layouts = {name: Layout.of(t) for name, t in tensors.items() if isinstance(t, Tensor)}
    layouts.update({f"t{n}": Layout.exactly(t) for n, t in enumerate(read)})
    if grad_out is not None and Layout.of(grad_out).expanded:
        layouts["grad_out"] = Layout.of(grad_out)
    return Job(form, kernel, backward, problem, layouts, **rest)
