"""cuDNN graphs of attention: described by layouts, built once, executed with raw pointers.

cuDNN never compares the strides that a graph was declared with to those of the tensors that it is
executed on: a wrong declaration is silently wrong. So a `Plan` keeps what it declared, `bind` holds
it against the tensors of each new class of metadata, and the op only repeats a bound plan for the
very same metadata.

The graphs are made with the frontend's own C++ graph class (what its Python `pygraph` lowers to),
in which only cuDNN's engines take part: the JIT engines that the Python class adds never compete.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import AdapterError, MissingLibraryError, PlanError
from ..layout import packed_strides
from ..torch_compat import empty_on_current_gpu

_USED = ("backend_graph", "create_handle", "_raw_set_stream", "backend_version")


@functools.cache
def library() -> Any:
    """The frontend's compiled module. The one place that knows its private names."""
    try:
        import cudnn
    except ImportError as missing:
        raise MissingLibraryError(
            f"Kernel cudnn needs {missing.name or 'cudnn'}: "
            "pip install 'nvidia-cudnn-frontend>=1.32'"
        ) from missing
    module = getattr(cudnn, "_pybind_module", None)
    for name in _USED:
        if not hasattr(module, name):
            raise AdapterError(
                f"cudnn-frontend {cudnn.__version__} has no {name}, which fa_inductor uses; "
                "install a tested version (1.32.0)."
            )
    return module


@dataclass(frozen=True)
class Layout:
    """Sizes, strides (elements) and dtype of one tensor of a graph.

    Dimensions of size 1 never move in memory: their strides are made canonical.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor, size: Sequence[int] | None = None) -> Layout:
        """size: what the tensor is to be seen as, expanded or with dimensions of size 1 added."""
        view = tensor if size is None else _seen_as(tensor, tuple(size))
        # Before 9.26 cuDNN wants the strides of the lse packed, in dimensions of size 1 too.
        return Layout(tuple(view.shape), packed_strides(view), tensor.dtype)


def _seen_as(tensor: Tensor, size: tuple[int, ...]) -> Tensor:
    if tensor.dim() == len(size):
        return tensor.expand(size)
    return tensor.reshape(size)


@dataclass(frozen=True)
class Operand:
    """One tensor of a graph.

    slot: its place among the op's tensors. offset: bytes past that tensor's pointer.
    """

    name: str
    slot: int
    layout: Layout
    offset: int = 0


@dataclass(frozen=True)
class Description:
    """All that a plan depends on: the key of the plan cache.

    kind: "forward" or "backward". left, right: bounds of the band of visible keys, None where
    unbounded; top_left: where the band starts. device: index of the GPU. version: of the cuDNN
    that is loaded.
    """

    kind: str
    scale: float
    left: int | None
    right: int | None
    top_left: bool
    dropout_p: float
    deterministic: bool
    operands: tuple[Operand, ...]
    device: int
    version: int

    @property
    def fields(self) -> dict[str, str]:
        """What it says, by name, as text."""
        named = {each.name: str(getattr(self, each.name)) for each in dataclasses.fields(self)}
        del named["operands"]
        return named | {operand.name: str(operand.layout) for operand in self.operands}

    def __getitem__(self, name: str) -> Layout:
        return next(operand.layout for operand in self.operands if operand.name == name)


class Plan:
    """A built graph, and what it declared."""

    def __init__(self, description: Description, graph: Any, index: int) -> None:
        self.description, self.graph, self.index = description, graph, index
        self.workspace: int = graph.get_workspace_size()
        graph._prepare_variant_pack_template()
        operands = description.operands
        # uid is place in `operands` + 1; cuDNN wants the pointers in the order of the uids.
        uids = list(graph._get_variant_pack_uids_sorted())
        self.sources = [(operands[uid - 1].slot, operands[uid - 1].offset) for uid in uids]
        self.pointers = (ctypes.c_void_p * len(uids))()
        self.address = ctypes.addressof(self.pointers)

    def serialized(self) -> bytes:
        """What `deserialized` makes the same plan from, in another process."""
        return self.graph.serialize(as_bytes=True)  # type: ignore[no-any-return]

    def bind(self, tensors: Sequence[Tensor | None]) -> None:
        """Raise `PlanError` unless the graph was declared for tensors that lie just so."""
        for operand in self.description.operands:
            tensor = tensors[operand.slot]
            if tensor is None:
                raise PlanError(f"The cuDNN plan needs {operand.name}, which is not given.")
            declared = operand.layout
            if operand.offset or declared.size == (1, 1, 1, 1):
                continue
            actual = Layout.of(tensor, declared.size)
            if actual != declared:
                raise PlanError(
                    f"The cuDNN plan declares {operand.name} as {declared.size} with strides "
                    f"{declared.stride}, {declared.dtype}, but the tensor given has strides "
                    f"{actual.stride}, {actual.dtype}: it is not executed."
                )

    def execute(self, tensors: Sequence[Any], handle: int) -> None:
        """Launch on tensors of the metadata that was bound; the workspace is torch's memory."""
        pointers = self.pointers
        for place, (slot, offset) in enumerate(self.sources):
            pointers[place] = tensors[slot].data_ptr() + offset
        address = 0
        if self.workspace:
            workspace = empty_on_current_gpu((self.workspace,), (1,), torch.uint8)
            address = workspace.data_ptr()
        self.graph._execute_with_raw_ptrs(
            self.address, len(self.sources), address, handle, self.index
        )


def build(description: Description, handle: int | None, **options: Any) -> Plan:
    """Build the graph's first plan that cuDNN's heuristics offer and that builds.

    Raises `PlanError` with cuDNN's words when it has none.
    """
    module = library()
    types = module.data_type
    graph = module.backend_graph(
        name=f"fa_inductor attention {description.kind}",
        io_data_type=_data_type(description["q"].dtype),
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
        **options,
    )
    describe = _forward if description.kind == "forward" else _backward
    refused = module.cudnnGraphNotSupportedError
    try:
        describe(graph, description)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([module.heur_mode.A, module.heur_mode.FALLBACK])
        graph.check_support()
    except (refused, RuntimeError) as error:
        raise PlanError(f"cuDNN refuses this attention {description.kind}: {error}") from error
    reasons = []
    for index in range(graph.get_execution_plan_count()):
        try:
            graph.build_plan_at_index(index)
        except (refused, RuntimeError) as error:
            reasons.append(str(error))
            continue
        return Plan(description, graph, index)
    raise PlanError(f"cuDNN has no plan for this attention {description.kind}: {reasons}")


def deserialized(description: Description, handle: int, data: bytes) -> Plan:
    """The plan that was built for the same description. Raises cuDNN's errors."""
    graph = library().backend_graph(handle=handle)
    graph.deserialize(handle, data)
    return Plan(description, graph, 0)  # it is the only one in there


def _data_type(dtype: torch.dtype) -> Any:
    types = library().data_type
    return {
        torch.float16: types.HALF,
        torch.bfloat16: types.BFLOAT16,
        torch.float32: types.FLOAT,
        torch.int32: types.INT32,
        torch.int64: types.INT64,
    }[dtype]


class _Tensors:
    """The description's tensors, as the graph's."""

    def __init__(self, graph: Any, description: Description) -> None:
        self.graph = graph
        self.uids = {o.name: uid for uid, o in enumerate(description.operands, start=1)}
        self.layouts = {o.name: o.layout for o in description.operands}

    def __contains__(self, name: str) -> bool:
        return name in self.uids

    def input(self, name: str) -> Any:
        layout = self.layouts[name]
        return self.graph._make_tensor(
            dim=list(layout.size),
            stride=list(layout.stride),
            data_type=_data_type(layout.dtype),
            uid=self.uids[name],
            name=name,
        )

    def output(self, name: str, made: Any) -> None:
        """Declare what the graph has made as one of the description's tensors."""
        layout = self.layouts[name]
        made.set_uid(self.uids[name])
        made.set_output(True)
        made.set_dim(list(layout.size))
        made.set_stride(list(layout.stride))
        made.set_data_type(_data_type(layout.dtype))


def _options(tensors: _Tensors, description: Description) -> dict[str, Any]:
    """Arguments that forward and backward share."""
    alignment = library().diagonal_alignment
    options: dict[str, Any] = {"attn_scale": description.scale}
    left, right = description.left, description.right
    if left is not None or right is not None:
        options["diagonal_alignment"] = (
            alignment.TOP_LEFT if description.top_left else alignment.BOTTOM_RIGHT
        )
        if left is not None:  # FlashAttention counts keys left of the diagonal, cuDNN also it
            options["diagonal_band_left_bound"] = left + 1
        if right is not None:
            options["diagonal_band_right_bound"] = right
    if "bias" in tensors:
        options["bias"] = tensors.input("bias")
    if "sink" in tensors:
        options["sink_token"] = tensors.input("sink")
    if "seqlens_q" in tensors:
        options["use_padding_mask"] = True
        options["seq_len_q"] = tensors.input("seqlens_q")
        options["seq_len_kv"] = tensors.input("seqlens_k")
    if "seed" in tensors:
        options["dropout"] = (description.dropout_p, tensors.input("seed"), tensors.input("offset"))
    return options


def _forward(graph: Any, description: Description) -> None:
    tensors = _Tensors(graph, description)
    out, stats = graph.sdpa(
        q=tensors.input("q"),
        k=tensors.input("k"),
        v=tensors.input("v"),
        generate_stats="lse" in tensors,
        **_options(tensors, description),
    )
    tensors.output("out", out)
    if "lse" in tensors:
        tensors.output("lse", stats)


def _backward(graph: Any, description: Description) -> None:
    tensors = _Tensors(graph, description)
    options = _options(tensors, description)
    inputs = {name: tensors.input(name) for name in ("q", "k", "v", "out", "grad_out", "lse")}
    optional = {"dBias": "grad_bias", "dSink_token": "grad_sink"}
    for argument, name in optional.items():
        if name in tensors:
            options[argument] = tensors.input(name)
            options[argument].set_output(True)
    made = graph.sdpa_backward(
        q=inputs["q"],
        k=inputs["k"],
        v=inputs["v"],
        o=inputs["out"],
        dO=inputs["grad_out"],
        stats=inputs["lse"],
        use_deterministic_algorithm=description.deterministic,
        **options,
    )
    for name, tensor in zip(("grad_q", "grad_k", "grad_v"), made, strict=True):
        tensors.output(name, tensor)
