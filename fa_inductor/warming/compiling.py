"""Compile the kernels of a job, and launch none: FA4 does so for fake CUDA tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masked_problem import QUERY_BLOCK, Blocks, MaskedInputs, Visible, blocks_in, key_block
from ..op_memory import lse_dtype
from ..problem import Gradients, Inputs
from ..torch_compat import fake_tensors, without_dispatch_modes
from ..varlen_problem import VarlenInputs
from .jobs import Job, Layout

KERNELS = ("fa4",)  # whose kernels can be compiled without being run


def compile_job(job: Job) -> None:
    """Compile what `job` needs and is not there yet, into FA4's caches and their directory.

    Raises what the kernel raises for a call that it cannot run.
    """
    with without_dispatch_modes(), fake_tensors(), torch.no_grad():
        {"dense": _dense, "varlen": _varlen, "masked": _masked}[job.form](job)


def _fake(layout: Layout) -> Tensor:
    """A fake CUDA tensor, of rank 4 dense in (B, S, H, D) order."""
    if layout.strides:
        dtype = getattr(torch, layout.dtype)
        return torch.empty_strided(layout.shape, layout.strides, dtype=dtype, device="cuda")
    wide = layout.expanded or (False,) * len(layout.shape)
    shape = [1 if w else s for s, w in zip(layout.shape, wide, strict=True)]
    dtype = getattr(torch, layout.dtype)
    if len(shape) == 4:
        made = torch.empty([shape[d] for d in (0, 2, 1, 3)], dtype=dtype, device="cuda")
        made = made.transpose(1, 2)
    else:
        made = torch.empty(shape, dtype=dtype, device="cuda")
    return made.expand(layout.shape) if any(wide) else made


def _results(job: Job, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(out, lse, grad_out, grad_lse)."""
    q, v = job.tensors["q"], job.tensors["v"]
    out = Layout((*q.shape[:-1], v.shape[-1]), q.dtype)
    rows = q.shape[:3] if len(q.shape) == 4 else (q.shape[1], q.shape[0])
    dtype = str(lse_dtype(getattr(torch, q.dtype))).removeprefix("torch.")
    lse = Layout(rows, dtype)
    grad_out = tensors["grad_out"] if "grad_out" in tensors else _fake(out)
    return _fake(out), _fake(lse), grad_out, _fake(lse) if job.lse_grad else None


def _gradients(job: Job) -> Gradients:
    q, k, v = (_fake(Layout(job.tensors[n].shape, job.tensors[n].dtype)) for n in "qkv")
    sink = _fake(job.tensors["sink"]) if "sink" in job.tensors and job.sink_grad else None
    return Gradients(q, k, v, sink=sink)


def _run(module: Any, job: Job, inputs: Any, tensors: dict[str, Tensor]) -> None:
    out, lse, grad_out, grad_lse = _results(job, tensors)
    if job.backward:
        saved = (out, lse, grad_out, grad_lse)
        module.backward(job.problem, inputs, *saved, _gradients(job))
    else:
        module.forward(job.problem, inputs, out, lse if job.with_lse else None)


def _dense(job: Job) -> None:
    from ..kernels import fa4

    tensors = {name: _fake(layout) for name, layout in job.tensors.items()}
    inputs = Inputs(**{n: tensors.get(n) for n in Inputs._fields})  # type: ignore[arg-type]
    _run(fa4, job, inputs, tensors)


def _varlen(job: Job) -> None:
    from ..kernels import fa4_varlen

    given = {name: _fake(layout) for name, layout in job.tensors.items()}
    tensors: dict[str, Any] = {name: t for name, t in given.items() if name != "grad_out"}
    inputs = VarlenInputs(**tensors, max_seqlen_q=job.bounds[0], max_seqlen_k=job.bounds[1])
    _run(fa4_varlen, job, inputs, given)


def _masked(job: Job) -> None:
    from ..kernels import fa4_masked

    tensors = {name: _fake(layout) for name, layout in job.tensors.items() if name != "rows"}
    read = tuple(tensors[f"t{n}"] for n in range(len(tensors)) if f"t{n}" in tensors)
    sq, sk = job.lengths
    queries, keys = blocks_in(sq, QUERY_BLOCK), blocks_in(sk, key_block(job.tensors["q"].shape[3]))
    by_query, by_key = _blocks(job, queries, keys), _blocks(job, keys, queries)
    visible = Visible(job.text, read, by_query, by_key)
    q, k, v = (tensors[name] for name in "qkv")
    _run(fa4_masked, job, MaskedInputs(q, k, v, visible, tensors.get("sink")), tensors)


def _blocks(job: Job, rows: Any, columns: Any) -> Blocks:
    shared = job.tensors["rows"].shape
    count, places = Layout((*shared, rows), "int32"), (*shared, rows, columns)

    def listed() -> Tensor:
        return torch.empty(places, dtype=torch.int32, device="cuda")

    return Blocks(_fake(count), listed(), _fake(count), listed())
