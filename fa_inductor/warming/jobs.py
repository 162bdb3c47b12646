"""What a kernel would be compiled for: one call of it, as metadata.

A `Job` is made from a call of one of the attention ops, from a spec, or read from a file; and it is
repeated for other lengths, since a compiled kernel serves a class of lengths, and all classes are
to be warm.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..problem import Problem
from ..spec import AttentionSpec, TensorSpec, default_scale
from ..symbolic import as_int, is_static

# One length at least on each side of every bound at which FA4 4.0.0b36 takes another kernel: all
# are multiples of a tile, of a tile by the heads of a group, or of two tiles, up to 512.
SAME_LENGTHS = (1, 2, 4, 8, *range(16, 529, 16), 1024, 8192, 65536)
LENGTHS = (1, 4, 16, 64, 80, 96, 112, 128, 160, 192, 256, 512, 8192)
TYPICAL = 1024  # stands for a length that is only a symbol


@dataclass(frozen=True)
class Layout:
    """What of a tensor a kernel is compiled for.

    shape: its sizes. dtype: "bfloat16" or so. expanded: which dimensions are. strides: in elements,
        where they matter beyond that: of the tensors that a mask reads.
    """

    shape: tuple[int, ...]
    dtype: str
    expanded: tuple[bool, ...] = ()
    strides: tuple[int, ...] = ()

    @staticmethod
    def of(tensor: Tensor | TensorSpec) -> Layout:
        strides = tensor.stride() if isinstance(tensor, Tensor) else tensor.stride
        shape = tuple(as_int(s) if is_static(s) else TYPICAL for s in tensor.shape)
        zero = [
            is_static(stride) and as_int(stride) == 0 and size > 1
            for stride, size in zip(strides, shape, strict=True)
        ]
        if len(shape) > 2:
            zero[-1] = False  # it is copied: the innermost stride must be 1
        return Layout(
            shape, str(tensor.dtype).removeprefix("torch."), tuple(zero) if any(zero) else ()
        )

    @staticmethod
    def exactly(tensor: Tensor) -> Layout:
        """With its strides. Kernels read bools as bytes."""
        dtype = str(tensor.dtype).removeprefix("torch.").replace("bool", "uint8")
        return Layout(tuple(tensor.shape), dtype, strides=tensor.stride())

    def at(self, dim: int, size: int) -> Layout:
        """The same with another size."""
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return dataclasses.replace(self, shape=shape)


@dataclass(frozen=True)
class Job:
    """One call of a kernel.

    form: "dense", "varlen" or "masked": which of the kernel's modules. kernel: its name.
    tensors: the call's tensors by their names in `Inputs` or `VarlenInputs`, grad_out beside them
        where it is expanded; of a masked call also "t0", ... and "rows", (B or 1, H or 1) of its
        blocks. with_lse: of a forward. lse_grad, sink_grad: of a backward.
    text: the mask. bounds: max_seqlen_q and max_seqlen_k, 0 where unknown.
    """

    form: str
    kernel: str
    backward: bool
    problem: Problem
    tensors: Mapping[str, Layout] = field(hash=False)
    with_lse: bool = True
    lse_grad: bool = False
    sink_grad: bool = False
    text: str = ""
    bounds: tuple[int, int] = (0, 0)

    @property
    def _dim_of_lengths(self) -> int:
        return 0 if self.form == "varlen" else 2

    @property
    def lengths(self) -> tuple[int, int]:
        """(Sq, Sk); of variable lengths the bounds, or all rows, which FA4 takes without."""
        dim, (bound_q, bound_k) = self._dim_of_lengths, self.bounds
        return bound_q or self.tensors["q"].shape[dim], bound_k or self.tensors["k"].shape[dim]

    def with_lengths(self, sq: int, sk: int) -> Job:
        """The same call for other lengths. What a mask reads stays: no length of it matters."""
        new = {"q": sq, "k": sk, "v": sk, "grad_out": sq}
        tensors = {
            name: layout.at(self._dim_of_lengths, new[name]) if name in new else layout
            for name, layout in self.tensors.items()
        }
        bounds = (self.bounds[0] and sq, self.bounds[1] and sk)
        return dataclasses.replace(self, tensors=tensors, bounds=bounds)

    def as_compiled(self) -> Iterator[Job]:
        """This call, and what `torch.compile` would make of it: it lays gradients from outside of a
        graph out whole, which eager mode hands on expanded."""
        yield self
        if "grad_out" in self.tensors:
            whole = {name: layout for name, layout in self.tensors.items() if name != "grad_out"}
            yield dataclasses.replace(self, tensors=whole)

    def all_lengths(self) -> Iterator[Job]:
        """This call, and the same for every class of lengths: equal ones if these are equal.

        All have the batch of this call. FA4 takes another kernel for more than 256 sequences of
        variable length, and on sm_100 at head dim 256 for few rows of heads (4.0.0b36).
        """
        yield self
        sq, sk = self.lengths
        if sq == sk:
            pairs: Iterable[tuple[int, int]] = ((length, length) for length in SAME_LENGTHS)
        else:
            pairs = product(LENGTHS, LENGTHS)
        for pair in pairs:
            yield self.with_lengths(*pair)

    def dumps(self) -> str:
        """As one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of_json(said: Mapping[str, Any]) -> Job:
        tensors = {
            name: Layout(
                *(tuple(t["shape"]), t["dtype"], tuple(t["expanded"]), tuple(t["strides"]))
            )
            for name, t in said["tensors"].items()
        }
        known = {**said, "problem": Problem(**said["problem"]), "tensors": tensors}
        return Job(**{**known, "bounds": tuple(said["bounds"])})

    def __str__(self) -> str:
        q, k, v = (self.tensors[name] for name in "qkv")
        parts = [self.kernel, self.form, q.dtype, f"q{q.shape}", f"k{k.shape}", f"v{v.shape}"]
        if self.problem.band != (None, None):
            parts.append(f"band {self.problem.band}")
        return " ".join(map(str, (*parts, "bwd" if self.backward else "fwd")))


def read(lines: Sequence[str]) -> list[Job]:
    """Jobs from lines of JSON: jobs as recorded, or specs as in a report's "spec".

    Raises `OptionError` for a line that is neither.
    """
    jobs: dict[str, Job] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
            made = [Job.of_json(said)] if "form" in said else of_spec_json(said)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionError(f"line {number} is neither a job nor a spec: {error!r}") from error
        jobs.update({job.dumps(): job for job in made})
    return list(jobs.values())


# --- From specs -----------------------------------------------------------------------------------


def of_spec(spec: AttentionSpec, kernel: str = "fa4") -> list[Job]:
    """The forward of a spec, and its backward if it needs a gradient.

    Raises `OptionError` for a spec that does not hold all: one with a mask as text or a bias; warm
    such attention from its model, or from a recorded run.
    """
    if spec.formula is not None or spec.bias is not None or spec.mask is not None:
        raise OptionError(f"a spec does not tell all of a mask ({spec}): warm the model instead.")
    scale = default_scale(_static(spec.q.shape[3])) if spec.scale is None else spec.scale
    problem = Problem(
        scale,
        spec.causal,
        *spec.window,
        softcap=spec.softcap,
        dropout_p=spec.dropout_p,
        deterministic=spec.deterministic,
    )
    tensors = {name: Layout.of(getattr(spec, name)) for name in "qkv"}
    dtype = str(spec.dtype).removeprefix("torch.")
    tensors = {name: dataclasses.replace(t, dtype=dtype) for name, t in tensors.items()}
    batch, heads = tensors["q"].shape[:2]
    if spec.has_sink:
        tensors["sink"] = Layout((heads,), dtype)
    if spec.has_seqlens:
        for name in ("seqlens_q", "seqlens_k"):
            tensors[name] = Layout((batch,), "int32")
    jobs = [Job("dense", kernel, False, problem, tensors, with_lse=spec.needs_grad)]
    if spec.needs_grad:
        jobs.append(Job("dense", kernel, True, problem, tensors, sink_grad=spec.has_sink))
    return jobs


def of_spec_json(said: Mapping[str, Any], kernel: str = "fa4") -> list[Job]:
    """Of `AttentionSpec.to_json`'s data; only q, k and v are needed, and sizes that are symbols
    count as any."""

    def tensor(name: str) -> TensorSpec:
        t = said[name]
        shape = tuple(s if isinstance(s, int) else TYPICAL for s in t["shape"])
        stride = tuple(s if isinstance(s, int) else 1 for s in t.get("stride", (1, 1, 1, 1)))
        dtype = getattr(torch, t.get("dtype", "bfloat16"))
        return TensorSpec(shape, stride, dtype, torch.device("cpu"))

    q, k, v = (tensor(name) for name in "qkv")
    if said.get("mask") or said.get("formula"):
        raise OptionError(f"a spec does not tell all of a mask ({said['mask']}).")
    left, right = said.get("window") or (None, None)
    spec = AttentionSpec(
        *(q, k, v, q.dtype),
        causal=said.get("causal", "none"),
        scale=said.get("scale"),
        dropout_p=said.get("dropout_p", 0.0),
        window=(left, right),
        softcap=said.get("softcap", 0.0),
        has_sink=said.get("sink", False),
        has_seqlens=said.get("sequence_lengths", False),
        needs_grad=said.get("needs_grad", True),
        deterministic=said.get("deterministic", False),
    )
    return of_spec(spec, kernel)


def _static(dim: Any) -> int:
    return as_int(dim) if is_static(dim) else TYPICAL
