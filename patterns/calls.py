"""A node as a call of a known operation, however it is spelt: method, function or operator."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .family import Emitter, Unbindable, bind, example_of


@dataclass(frozen=True)
class Call:
    """`name` with its arguments by name. in_place: whether it writes to its `input`."""

    name: str
    arguments: dict[str, Any]
    in_place: bool = False

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]


# name -> arguments in order, defaults.
_SIGNATURES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "matmul": (("input", "other"), {}),
    "bmm": (("input", "mat2"), {}),
    "baddbmm": (("input", "batch1", "batch2", "beta", "alpha"), {"beta": 1, "alpha": 1}),
    "softmax": (("input", "dim", "dtype"), {"dtype": None}),
    "F.softmax": (
        ("input", "dim", "_stacklevel", "dtype"),
        {"dim": None, "_stacklevel": 3, "dtype": None},
    ),
    "dropout": (("input", "p", "train"), {}),
    "F.dropout": (
        ("input", "p", "training", "inplace"),
        {"p": 0.5, "training": True, "inplace": False},
    ),
    "add": (("input", "other", "alpha"), {"alpha": 1}),
    "sub": (("input", "other", "alpha"), {"alpha": 1}),
    "mul": (("input", "other"), {}),
    "div": (("input", "other", "rounding_mode"), {"rounding_mode": None}),
    "tanh": (("input",), {}),
    "masked_fill": (("input", "mask", "value"), {}),
    "where": (("condition", "input", "other"), {}),
    "Tensor.where": (("input", "condition", "other"), {}),
    "cat": (("tensors", "dim"), {"dim": 0}),
    "max": (("input", "dim", "keepdim"), {"keepdim": False}),
    "amax": (("input", "dim", "keepdim"), {"dim": (), "keepdim": False}),
    "getitem": (("input", "index"), {}),
    "detach": (("input",), {}),
    "transpose": (("input", "dim0", "dim1"), {}),
    "mT": (("input",), {}),
    "unsqueeze": (("input", "dim"), {}),
    "repeat_interleave": (
        ("input", "repeats", "dim", "output_size"),
        {"dim": None, "output_size": None},
    ),
}
# Whose other arguments are read off the shape and dtype of the result.
_SHAPED = frozenset(
    (
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "expand",
        "repeat",
        "contiguous",
        "clone",
    )
)
_CASTS = frozenset(("to", "type", "type_as", "float", "half", "bfloat16", "double"))
_SAME_NAME = (
    *("matmul", "bmm", "baddbmm", "softmax", "add", "sub", "mul", "div", "tanh", "masked_fill"),
    *("cat", "max", "amax", "detach", "transpose", "unsqueeze", "repeat_interleave"),
)
_ALIASES = {
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "concat": "cat",
    "concatenate": "cat",
}
_METHODS = {name: name for name in (*_SAME_NAME, *_SHAPED, *_CASTS, "permute")}
_METHODS |= _ALIASES | {"where": "Tensor.where", "__matmul__": "matmul"}
_WRITING = ("add", "sub", "mul", "div", "tanh", "masked_fill")

_FUNCTIONS: dict[Any, str] = {
    getattr(torch, name): meant
    for name, meant in _METHODS.items()
    if hasattr(torch, name) and isinstance(name, str) and meant not in _CASTS
} | {
    operator.matmul: "matmul",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.getitem: "getitem",
    torch.where: "where",
    torch.special.softmax: "softmax",
    torch.dropout: "dropout",
    torch.einsum: "einsum",
    F.softmax: "F.softmax",
    F.dropout: "F.dropout",
    F.tanh: "tanh",
}
_WRITING_FUNCTIONS: dict[Any, str] = {
    operator.iadd: "add",
    operator.isub: "sub",
    operator.imul: "mul",
    operator.itruediv: "div",
}


def call_of(node: fx.Node) -> Call | None:
    """The known operation that a node calls; None for one that is not known, or not so."""
    found = _name(node)
    if found is None:
        return None
    name, in_place = found
    if name == "getattr":
        mt = len(node.args) == 2 and node.args[1] in ("mT", "T")
        return Call("mT", {"input": node.args[0]}) if mt else None
    if name == "einsum":
        operands = node.args[1:]
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = tuple(operands[0])
        return None if node.kwargs else Call(name, {"equation": node.args[0], "operands": operands})
    if name in _SHAPED or name in _CASTS or name == "permute":
        given = node.args[0] if node.args else node.kwargs.get("input")
        return Call(name, {"input": given, "rest": node.args[1:]}) if given is not None else None
    try:
        arguments = bind(node, *_SIGNATURES[name])
    except Unbindable:
        return None
    if name == "F.dropout":
        in_place = arguments["inplace"] is not False
        arguments["train"] = arguments["training"]
    return Call(name.removeprefix("F.").removeprefix("Tensor."), arguments, in_place)


def _name(node: fx.Node) -> tuple[str, bool] | None:
    if node.op == "call_method":
        method = str(node.target)
        written = _METHODS.get(method.removesuffix("_"))
        if method.endswith("_") and written in _WRITING:
            return written, True
        return (_METHODS[method], False) if method in _METHODS else None
    if node.op != "call_function":
        return None
    if node.target is getattr:
        return "getattr", False
    if node.target in _WRITING_FUNCTIONS:
        return _WRITING_FUNCTIONS[node.target], True
    return (_FUNCTIONS[node.target], False) if node.target in _FUNCTIONS else None


def describe_call(node: fx.Node) -> str:
    """What a node does, in a word."""
    if node.op == "output":
        return "the graph's output"
    if node.target is getattr:
        return str(node.args[1])
    return str(node.target) if isinstance(node.target, str) else _function_name(node.target)


def _function_name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def is_cast(call: Call, node: fx.Node) -> bool:
    """Whether the call at most changes the float dtype of its input, on the same device."""
    if call.name not in _CASTS:
        return False
    before, after = example_of(call["input"]), example_of(node)
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.is_floating_point()
        and after.is_floating_point()
        and before.device == after.device
    )


def number(value: Any) -> float | None:
    """The Python number that a value is known to be: a literal, or a tensor of rank 0 that the
    graph makes from one. None for everything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    made = example_of(value)
    if not isinstance(made, torch.Tensor) or made.dim() or made.requires_grad:
        return None
    if _is_written(value):
        return None
    found = _constant(value)
    # As the tensor holds it.
    return None if found is None else float(torch.tensor(found, dtype=made.dtype))


@dataclass(frozen=True)
class Symbol:
    """A factor that is a Python number of the graph's, or one over it."""

    node: fx.Node
    inverse: bool = False

    def emit(self, emit: Emitter, value: Any) -> fx.Node:
        return emit.call(operator.truediv if self.inverse else operator.mul, value, self.node)


def multiplier(call: Call) -> tuple[Any, float | Symbol | None]:
    """(what a call of `mul` or `div` multiplies, the number by which); None for what is none."""
    left, right = call["input"], call["other"]
    if call.name == "div":
        divisor = number(right)
        if call["rounding_mode"] is not None or divisor == 0:
            return left, None
        if divisor is None:
            return left, Symbol(right, inverse=True) if _is_symbol(right) else None
        return left, 1.0 / divisor
    for tensor, by in ((left, right), (right, left)):
        if (factor := number(by)) is not None:
            return tensor, factor
        if _is_symbol(by):
            return tensor, Symbol(by)
    return left, None


def _is_symbol(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(
        example_of(value), (torch.SymFloat, torch.SymInt)
    )


def _constant(node: fx.Node) -> float | None:
    if node.target is torch.tensor and len(node.args) == 1:
        return number(node.args[0])
    if node.target is torch.full and len(node.args) == 2:
        return number(node.args[1])
    if node.target is torch.sqrt and len(node.args) == 1:
        inner = number(node.args[0])
        return math.sqrt(inner) if inner is not None and inner >= 0 else None
    return None


def _is_written(node: fx.Node) -> bool:
    """Whether a constant might not stay one: anything but a plain reader."""
    return any(user.op == "call_method" and str(user.target).endswith("_") for user in node.users)
