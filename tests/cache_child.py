"""One process of `test_caches.py`: compile an attention, run it, and print what the caches did.

Usage: python cache_child.py REQUESTS, a JSON list of `Request` fields; prints a JSON list.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Request:
    """One compile. route: "backend" or "register"; train: with a backward."""

    route: str
    kernels: tuple[str, ...] = ("reference",)
    train: bool = False


@dataclass(frozen=True)
class Answer:
    """What one compile did. passes: graphs that the pass saw; launches: kernel calls in one run;
    report: `Report.to_json`."""

    fxgraph_hits: int
    fxgraph_misses: int
    aot_autograd_hits: int
    aot_autograd_misses: int
    passes: int
    launches: int
    equals_eager: bool
    imported_before: bool
    package: str
    report: dict[str, Any]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def compiled_by(request: Request) -> Callable[..., Any]:
    """`attend` compiled the way that a user of the route would write it."""
    if request.route == "backend":  # the entry point alone must bring in the package
        options = {"fa.kernels": tuple(request.kernels)}
        return torch.compile(attend, backend="fa_inductor", options=options)
    import fa_inductor

    fa_inductor.register(kernels=tuple(request.kernels))
    return torch.compile(attend)


def answer(request: Request) -> Answer:
    imported_before = "fa_inductor" in sys.modules
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=request.train) for _ in range(3))
    compiled = compiled_by(request)
    from torch._dynamo.utils import counters

    import fa_inductor
    from fa_inductor import compile_pass
    from fa_inductor.kernels import reference

    torch._dynamo.reset()
    counters.clear()
    with _counted(compile_pass, "run") as passes, fa_inductor.collecting() as report:
        result = compiled(q, k, v)
        if request.train:
            result.sum().backward()
    with _counted(reference, "forward") as launches:
        compiled(q, k, v)
    if request.route == "register":
        fa_inductor.unregister()
    return Answer(
        fxgraph_hits=counters["inductor"]["fxgraph_cache_hit"],
        fxgraph_misses=counters["inductor"]["fxgraph_cache_miss"],
        aot_autograd_hits=counters["aot_autograd"]["autograd_cache_hit"],
        aot_autograd_misses=counters["aot_autograd"]["autograd_cache_miss"],
        passes=len(passes),
        launches=len(launches),
        equals_eager=torch.allclose(result, attend(q, k, v), atol=1e-5),
        imported_before=imported_before,
        package=fa_inductor.__file__,
        report=report.to_json(),
    )


class _counted:
    """The calls of `owner.name` made inside, as a list that grows."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.original = owner, name, getattr(owner, name)

    def __enter__(self) -> list[None]:
        calls: list[None] = []

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return self.original(*args, **kwargs)

        setattr(self.owner, self.name, counting)
        return calls

    def __exit__(self, *error: object) -> None:
        setattr(self.owner, self.name, self.original)


if __name__ == "__main__":
    requests = [Request(**fields) for fields in json.loads(sys.argv[1])]
    print(json.dumps([vars(answer(request)) for request in requests]))
