"""A report with one finding of each kind, as data, for the tests of what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TENSOR = {"shape": [1, 2, "s0", 8], "stride": [16, 8, 8, 1], "dtype": "bfloat16", "device": "cpu"}
SPEC = {"q": TENSOR, "k": TENSOR, "v": TENSOR, "dtype": "bfloat16", "causal": "none"}
ODD = "a | b <script>alert(1)</script> `c` *d* [e](f) $g$"


def site(root: Path, module: str, **changed: Any) -> dict[str, Any]:
    return {
        "family": "sdpa",
        "source": f"{root}/models/attention.py:7",
        "code": "F.scaled_dot_product_attention(q, k, v, mask)",
        "module": module,
        "attention": "bfloat16 q(1, 2, s0, 8) fwd",
        "spec": SPEC,
        "kernel": None,
        "reasons": {"fa4": [f"mask ({ODD})"]},
        "copied": {},
        "notes": [],
        "stack": [
            {"source": f"{root}/models/model.py:5", "function": "Model.forward"},
            {"source": f"{root}/models/attention.py:7", "function": "Attention.forward"},
        ],
        **changed,
    }


def graph(root: Path, number: int, recompiled: str | None) -> dict[str, Any]:
    return {
        "nodes": 5,
        "sites": 2,
        "compile_id": f"0/{number}",
        "function": "Model.forward",
        "source": f"{root}/models/model.py:3",
        "code": "def forward(self, x):",
        "recompiled": recompiled,
    }


def report(root: Path) -> dict[str, Any]:
    """Two layers that fall back alike, a copy, a break in a library, a recompile, a NaN."""
    copied = site(root, "last", kernel="cudnn", reasons={}, copied={"k": "stride 33 elements"})
    return {
        "schema_version": 2,
        "coverage": 1 / 3,
        "sites": [site(root, "layers.0"), site(root, "layers.1"), copied],
        "graphs": [graph(root, 0, None), graph(root, 1, "size mismatch")],
        "graph_breaks": [
            {
                "reason": "Call to `f()`",
                "source": "/usr/lib/python3/site-packages/library/f.py:20",
                "code": "f()",
                "explanation": ODD,
                "hints": ["Do not call it."],
                "gb_id": "GB0025",
                "skipped": True,
                "stack": [
                    {"source": f"{root}/models/my model.py:12", "function": "forward"},
                    {
                        "source": "/usr/lib/python3/site-packages/library/f.py:20",
                        "function": "call",
                    },
                ],
            }
        ],
        "not_finite": [
            {
                "function": "Model",
                "source": f"{root}/models/model.py:3",
                "code": "def forward(self, x):",
                "output": "output['x']",
            }
        ],
    }
