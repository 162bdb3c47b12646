"""What can be wrong with a compiled model, by the names that `--fa-fail-on` takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A kind of finding. level: as in SARIF: "error", "warning" or "note"."""

    id: str
    name: str
    short: str
    help: str
    level: str


RULES: tuple[Rule, ...] = (
    Rule(
        "graph-break",
        "GraphBreak",
        "Dynamo ended the graph here.",
        "What stands before and behind a graph break is compiled apart, or left to Python: nothing "
        "is fused across it, and CUDA graphs end at it. The message has Dynamo's own explanation "
        "and, where it has one, the id under which "
        "https://meta-pytorch.github.io/compile-graph-break-site/ tells more. "
        "`torch.compile(..., fullgraph=True)` turns it into an error.",
        "warning",
    ),
    Rule(
        "fallback",
        "Fallback",
        "This attention runs on none of the kernels.",
        "No kernel was proven right for the site, so it stays as it was written and runs on "
        "whatever PyTorch makes of it. The message has the value, the limit and the source of each "
        "reason. `fa-inductor explain` shows the same without running the model.",
        "warning",
    ),
    Rule(
        "recompile",
        "Recompile",
        "Dynamo compiled this function more than once.",
        "Each compile costs seconds, and Dynamo stops after eight of one function. The message has "
        "the guard that failed. Sizes that vary are compiled once with `dynamic=True` or "
        "`torch._dynamo.mark_dynamic`; numbers that vary belong into tensors.",
        "note",
    ),
    Rule(
        "copy",
        "Copy",
        "The kernel reads a copy of an input.",
        "A stride or pointer that the kernel cannot read (the innermost stride is not 1, or "
        "another one or the pointer is not a multiple of 16 bytes) is repaired by a copy on every "
        "call. "
        "Choose sizes that are multiples of 8 elements, or lay the tensor out anew once.",
        "note",
    ),
    Rule(
        "nan",
        "NotFinite",
        "NaN, infinity or, found by `fa.guard`, wrong numbers.",
        "The fixture `fa_compile` looks at every floating-point output of the calls it compiled. "
        '`fa.guard` looks at each attention, and with "oracle" compares it with float64. '
        "Compare with the same call in eager mode; `fa-inductor explain` names the sites.",
        "error",
    ),
)
BY_ID = {rule.id: rule for rule in RULES}
