"""`explain`: for which GPU it plans, what it refuses, and that it leaves no trace in Dynamo."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from explained_model import Attention, Model, make_mask, make_x
from torch import Tensor, fx, nn

import fa_inductor
from fa_inductor.errors import OptionError, UnknownKernelError, UnknownTargetError
from fa_inductor.report import collecting

BOTH = {"fa.kernels": ("fa4", "reference")}
REFERENCE = {"fa.kernels": ("reference",)}


# --- Targets and options --------------------------------------------------------------------------


def test_a_named_target_is_planned_for_from_cpu_tensors() -> None:
    q = torch.randn(2, 4, 64, 64, dtype=torch.bfloat16)

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    for kernel in ("fa4", "cudnn"):
        options = {"fa.kernels": (kernel,)}
        for target in ("sm_90a", "sm_90", "sm_100a"):
            (site,) = fa_inductor.explain(attend, options, target)(q).sites
            assert (site.kernel, site.copied) == (kernel, {})
    (site,) = fa_inductor.explain(attend)(q).sites
    assert site.kernel is None
    (site,) = fa_inductor.explain(attend, target="sm_90a")(q.float()).sites
    for kernel in ("fa4", "cudnn"):
        assert any("float32" in text for text in site.reasons[kernel])


def test_inputs_that_the_kernel_copies_are_named() -> None:
    """ST-13: one element further on, a bfloat16 tensor is not aligned to 16 bytes."""
    k = torch.randn(2, 4, 64, 64, dtype=torch.bfloat16)
    q = torch.randn(2 * 4 * 64 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 4, 64, 64)
    report = fa_inductor.explain(F.scaled_dot_product_attention, target="sm_90a")(q, k, k)
    assert dict(report.sites[0].copied) == {"q": "storage offset 1 elements"}
    assert list(report.to_json()["sites"][0]["copied"]) == ["q"]


def test_wrong_targets_and_options_are_refused_before_anything_runs() -> None:
    def never() -> None:
        raise AssertionError("fn must not run")

    with pytest.raises(UnknownTargetError, match=r"Did you mean 'sm_90a'"):
        fa_inductor.explain(never, target="sm90a")
    with pytest.raises(OptionError, match=r"Did you mean 'fa.kernels'"):
        fa_inductor.explain(never, options={"fa.kernel": ("fa4",)})
    with pytest.raises(UnknownKernelError, match="Did you mean 'reference'"):
        fa_inductor.explain(never, options={"fa.kernels": ("refrence",)})


# --- No trace -------------------------------------------------------------------------------------

Call = tuple[Tensor, ...]


def _observe(fn: Any, calls: Sequence[Call], after_each: Callable[..., Any] | None = None) -> Any:
    """Shapes of the inputs of every graph that compiling `fn` for `calls` makes, and counters."""
    graphs: list[list[tuple[str, ...]]] = []

    def recording(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        graphs.append([tuple(map(str, getattr(value, "shape", ()))) for value in values])
        return gm.forward

    compiled = torch.compile(fn, backend=recording)
    for arguments in calls:
        compiled(*arguments)
        if after_each is not None:
            after_each(*arguments)
    return graphs, copy.deepcopy(torch._dynamo.utils.counters)


def _fresh(body: Callable[[nn.Module], Any]) -> Any:
    """`body(model)` in a Dynamo that has seen nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return body(Model())


def _calls(*lengths: int) -> list[Call]:
    return [(make_x(length), make_mask(length)) for length in lengths]


@pytest.mark.parametrize("explained_length", [6, 9])
def test_the_first_compile_afterwards_is_as_if_nothing_was(explained_length: int) -> None:
    """The same graphs, static shapes and counters, also when other sizes were explained."""

    def after_explain(model: nn.Module) -> Any:
        explained = fa_inductor.explain(model, options=BOTH)(*_calls(explained_length)[0])
        assert len(explained.sites) == 3
        return _observe(model, _calls(6))

    expected = _fresh(lambda model: _observe(model, _calls(6)))
    assert _fresh(after_explain) == expected
    assert all(size.isdigit() for graph in expected[0] for shape in graph for size in shape)


def test_compiles_before_and_after_are_as_if_nothing_was() -> None:
    """A graph made before is used afterwards, and the second size still makes one dynamic graph."""

    def with_explains(model: nn.Module) -> Any:
        def explain_both(x: Tensor, mask: Tensor) -> None:
            for arguments in ((x, mask), _calls(5)[0]):
                fa_inductor.explain(model, options=BOTH)(*arguments)

        return _observe(model, _calls(6, 6, 8), explain_both)

    expected = _fresh(lambda model: _observe(model, _calls(6, 6, 8)))
    assert _fresh(with_explains) == expected
    # Both sides of the graph break, first for one length and then for any.
    assert len(expected[0]) == 4


def test_no_cache_entry_stays() -> None:
    """Each would be looked at on every later call, and count towards the recompile limit."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    fa_inductor.explain(Attention(), options=BOTH)(make_x())
    assert _debug_get_cache_entry_list(Attention.forward.__code__) == []


def test_explaining_often_uses_up_no_recompiles() -> None:
    """The user's function still recompiles after more explains than Dynamo allows recompiles.

    torch 2.11 cannot keep entries apart, so that there each explain of a function that is compiled
    already costs it one of its eight; `dynamo_compat.untouched_dynamo` says so.
    """
    apart = "isolate_recompiles" in inspect.signature(torch.compile).parameters

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None], x[None], x[None])

    def explain_often(x: Tensor) -> None:
        for _ in range(12 if apart else 2):
            fa_inductor.explain(attend, options=REFERENCE)(x)

    calls = [(make_x(6),), (make_x(8),)]
    expected = _fresh(lambda _: _observe(attend, calls))
    assert _fresh(lambda _: _observe(attend, calls, explain_often)) == expected


def test_a_failing_function_leaves_no_trace_either() -> None:
    def after_failures(model: nn.Module) -> Any:
        explained = fa_inductor.explain(model, options=BOTH)
        with pytest.raises(RuntimeError):  # the mask does not fit
            explained(make_x(9), make_mask(5))
        with pytest.raises(TypeError):
            explained()
        return _observe(model, _calls(6))

    expected = _fresh(lambda model: _observe(model, _calls(6)))
    assert _fresh(after_failures) == expected


def test_the_function_runs_once_and_as_it_was_written() -> None:
    """Explaining executes no kernel of ours, and tells no report but its own."""
    from fa_inductor.kernels import reference

    x, seen = make_x(), []

    def fn(x: Tensor) -> Tensor:
        seen.append(x.shape)
        return F.scaled_dot_product_attention(x[None], x[None], x[None])

    with pytest.MonkeyPatch.context() as patch, collecting() as outer:
        patch.setattr(reference, "forward", lambda *a, **k: pytest.fail("launched"))
        report = fa_inductor.explain(fn, options=REFERENCE)(x)
    assert (len(report.sites), outer.sites, outer.graphs) == (1, [], [])
    assert seen == [x.shape]


def test_gradients_are_planned_for_only_where_they_can_be_asked_for() -> None:
    model = Attention()
    assert fa_inductor.explain(model)(make_x()).sites[0].spec.needs_grad
    with torch.no_grad():
        assert not fa_inductor.explain(model)(make_x()).sites[0].spec.needs_grad
