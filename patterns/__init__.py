"""Pattern families: how attention is found in a Dynamo graph.

One module a family, each with `NAME`, `ANCHORS`, `match`, `rewrite`, `examples` and
`counterexamples` (see `family.Family`). The order here is the order in which they are tried.
"""

from __future__ import annotations

from . import eager, mha, op_call, sdpa
from .family import Example, Family, NotUnderstood, Scope, Site

FAMILIES: tuple[Family, ...] = (sdpa, mha, op_call, eager)

__all__ = ["FAMILIES", "Example", "Family", "NotUnderstood", "Scope", "Site"]
