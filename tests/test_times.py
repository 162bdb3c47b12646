"""The default kernels are chosen by measured time: the row taken, ties, and PyTorch's own kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_specs import BLACKWELL, HOPPER, KINDS, planning, spec, target
from torch import Tensor

import fa_inductor
from fa_inductor import compile_pass, times
from fa_inductor.config import DEFAULT_KERNELS, Config
from fa_inductor.errors import CoverageError
from fa_inductor.select import Choice, choose
from fa_inductor.spec import AttentionSpec, MaskFormula
from fa_inductor.times import CORE, Measured

Table = Callable[..., None]


def row(
    passes: str = "fwd",
    kind: str = "plain",
    s: int = 128,
    d: int = 64,
    *,
    batch: int = 2,
    heads_q: int = 8,
    heads_kv: int = 8,
    sk: int | None = None,
    dv: int | None = None,
    **microseconds: float,
) -> Measured:
    """A measured problem, as `spec()` has it unless said otherwise."""
    sizes = (batch, heads_q, heads_kv, s, s if sk is None else sk, d, d if dv is None else dv)
    return Measured(passes, kind, *sizes, microseconds)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """Puts rows in the place of sm_90a's table."""

    def put(*rows: Measured) -> None:
        monkeypatch.setattr(times, "_table", lambda arch: rows if arch == HOPPER else ())

    return put


def chosen(problem: AttentionSpec, arch: str = HOPPER, **config: Any) -> Choice:
    return choose(problem, Config(**config), target(arch))


# --- Which row ----------------------------------------------------------------------------------


def which(problem: AttentionSpec) -> float | None:
    """What the row that is taken says of "fa4"."""
    return times.of(problem, target(HOPPER)).get("fa4")


def test_the_direction_and_the_kind_must_be_those_of_the_problem(table: Table) -> None:
    numbered = {both: float(n) for n, both in enumerate(itertools.product(("fwd", "bwd"), KINDS))}
    table(*(row(passes, kind, fa4=time) for (passes, kind), time in numbered.items()))
    changes: dict[str, list[dict[str, Any]]] = {
        "plain": [{}, {"softcap": 30.0}, {"scale": 0.5}],
        "causal": [{"causal": "top_left"}, {"causal": "bottom_right"}],
        "window": [{"window": (64, None)}, {"window": (64, 0), "causal": "bottom_right"}],
        "bias": [{"bias": (2, 8, 128, 128)}, {"bias": (1, 1, 128, 128), "causal": "top_left"}],
        "padding": [{"bias": (2, 1, 1, 128), "formula": MaskFormula("(t0[b, j] != 0)", "keys")}],
        "causal mask": [{"bias": (2, 1, 128, 128), "formula": MaskFormula("(j < i)", "causal")}],
        "mask": [{"bias": (2, 1, 128, 128), "formula": MaskFormula("(t0[i, j] != 0)", "other")}],
        "dropout": [{"dropout_p": 0.1}, {"dropout_p": 0.1, "bias": (2, 1, 1, 128)}],
    }
    for kind, each in changes.items():
        for change in each:
            assert which(spec(**change)) == numbered["fwd", kind]
            assert which(spec(**change, needs_grad=True)) == numbered["bwd", kind]


def test_nothing_alike_was_measured(table: Table) -> None:
    """Nearest only counts within a kind: another kind's times say nothing."""
    table(row("bwd", fa4=1.0), row("fwd", "causal", fa4=2.0))
    assert times.of(spec(), target(HOPPER)) == {}
    assert chosen(spec()) == Choice("fa4", {})


def test_the_most_similar_row_is_taken(table: Table) -> None:
    """In powers of two of lengths and head dim, and of the number of tiles."""
    table(row(s=128, fa4=1.0), row(s=4096, fa4=2.0), row(s=128, d=256, fa4=3.0))
    for problem, nearest in {
        spec(): 1.0,
        spec(sq=512, sk=512): 1.0,
        spec(sq=1024, sk=1024): 2.0,
        spec(sq=2048, sk=4096, d=96): 2.0,
        spec(d=192): 3.0,
        spec(d=96): 1.0,
        spec(d=192, b=64): 3.0,
    }.items():
        assert which(problem) == nearest


def test_each_size_can_make_the_difference(table: Table) -> None:
    """Keys as in decoding, key heads as in MQA, both head dims."""
    table(row(s=2048, fa4=1.0), row(s=1, sk=2048, fa4=2.0), row(s=2048, heads_kv=1, fa4=3.0))
    assert which(spec(sq=1, sk=1024)) == 2.0
    assert which(spec(sq=1024, sk=1024)) == 1.0
    assert which(spec(sq=1024, sk=1024, hkv=1)) == 3.0
    for change, other in (({"dv": 128}, {"dv": 192}), ({"sk": 2048}, {"sk": 64})):
        table(row(d=192, **other, fa4=1.0), row(d=192, **change, fa4=2.0))
        assert which(spec(**{"d": 192, **other})) == 1.0
        assert which(spec(**{"d": 192, **change})) == 2.0
    table(row(d=192, dv=128, fa4=1.0), row(d=128, dv=128, fa4=2.0))
    assert [which(spec(d, 128)) for d in (192, 128)] == [1.0, 2.0]


def test_symbols_count_as_what_they_are_now(table: Table) -> None:
    """Where only cuDNN can run it, lengths that vary are compared by the call at hand."""
    table(row("fwd", "bias", 128, cudnn=10.0, core=5.0), row("fwd", "bias", 4096, cudnn=5.0))

    def masked(q: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, mask)

    for length, kernel in ((160, CORE), (4000, "cudnn")):
        torch._dynamo.reset()
        fn, planned = planning(masked, target(HOPPER), DEFAULT_KERNELS)
        q = torch.randn(2, 2, length, 64, dtype=torch.bfloat16)
        mask = torch.ones(length, length, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(q, 2)
        torch._dynamo.mark_dynamic(mask, [0, 1])
        fn(q, mask)
        assert [site.kernel for site in planned] == [kernel]
        assert [bool(site.notes) for site in planned] == [kernel == "cudnn"]


# --- Which kernel -------------------------------------------------------------------------------


def test_the_fastest_is_chosen_and_the_other_s_time_told(table: Table) -> None:
    """Both times are in the reason, and where they come from."""
    table(row(fa4=20.4, cudnn=15.1, core=15.2))
    assert chosen(spec()) == Choice(
        "cudnn",
        {"fa4": ("20 µs on the most similar problem measured on sm_90a, cudnn 15 µs",)},
    )
    table(row(fa4=20.4, cudnn=150.0))
    assert chosen(spec()) == Choice(
        "fa4",
        {"cudnn": ("150 µs on the most similar problem measured on sm_90a, fa4 20 µs",)},
    )


def test_a_faster_kernel_that_the_support_table_refuses_stays_out(table: Table) -> None:
    table(row(fa4=10.0, cudnn=1.0))
    choice = chosen(spec(softcap=30.0))
    assert choice.kernel == "fa4"
    assert choice.reasons["cudnn"][0].startswith("softcap 30.0 (no softcap; ")


def test_a_tie_goes_to_ours(table: Table) -> None:
    """PyTorch's own is kept only when it is faster by more than 3 %; among ours FA4 comes first."""
    for core, kernel in ((100.0, "fa4"), (97.2, "fa4"), (97.0, CORE), (150.0, "fa4")):
        table(row(fa4=100.0, cudnn=100.0, core=core))
        assert chosen(spec()).kernel == kernel


def test_pytorch_s_own_is_kept_where_it_is_faster(table: Table) -> None:
    table(row(fa4=100.0, cudnn=80.0, core=60.0))
    assert chosen(spec()) == Choice(
        CORE,
        {
            "fa4": ("100 µs on the most similar problem measured on sm_90a, core 60 µs",),
            "cudnn": ("80 µs on the most similar problem measured on sm_90a, core 60 µs",),
        },
    )


def test_pytorch_s_own_is_a_fallback_where_no_kernel_can_run(table: Table) -> None:
    table(row(d=36, fa4=100.0, cudnn=100.0, core=1.0))
    choice = chosen(spec(36))
    assert choice.kernel is None
    assert set(choice.reasons) == {"fa4", "cudnn"}


def test_a_pinned_backend_was_not_measured(table: Table) -> None:
    """What PyTorch was measured at is its own choice of backend, not the user's."""
    table(row(fa4=100.0, cudnn=80.0, core=1.0))
    assert chosen(spec()).kernel == CORE
    assert chosen(spec(sdp_backends=("FLASH_ATTENTION", "MATH"))).kernel == "fa4"
    assert chosen(spec(sdp_backends=("CUDNN_ATTENTION",))).kernel == "cudnn"


@pytest.mark.parametrize("order", [("cudnn", "fa4"), ("fa4",), ("cudnn",), ("reference", "fa4")])
def test_kernels_that_are_named_are_taken_in_their_order(
    order: tuple[str, ...], table: Table
) -> None:
    """Whatever was measured."""
    table(row(fa4=20.0, cudnn=10.0, reference=30.0, core=1.0))
    assert chosen(spec(), kernels=order) == Choice(order[0], {})


def test_a_gpu_without_measurements(table: Table) -> None:
    table(row(fa4=20.0, cudnn=10.0, core=1.0))
    assert chosen(spec(), BLACKWELL) == Choice("fa4", {})
    assert chosen(spec(dropout_p=0.1), BLACKWELL).kernel == "cudnn"


def test_a_kernel_without_a_time_loses_to_one_with(table: Table) -> None:
    table(row(cudnn=10.0))
    assert chosen(spec()) == Choice("cudnn", {})
    table(row(core=10.0))
    assert chosen(spec()) == Choice("fa4", {})


def attend(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("dim", [0, 2], ids=["batch", "length"])
def test_lengths_that_vary_prefer_fa4(dim: int, table: Table) -> None:
    """cuDNN would build a plan for each, whatever its time; and a fixed length does not."""
    table(row(fa4=100.0, cudnn=10.0, core=1.0))
    q = torch.randn(2, 8, 128, 64, dtype=torch.bfloat16)
    fn, planned = planning(attend, target(HOPPER), DEFAULT_KERNELS)
    fn(q)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(q, dim)
    fn(q)
    assert [site.kernel for site in planned] == [CORE, "fa4"]
    assert [text.partition(" (")[0] for text in planned[1].reason_texts] == [
        "cudnn: the lengths vary"
    ]


# --- What is told, and what runs ----------------------------------------------------------------


class Layers(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(attend(q), q, q, is_causal=True)


def test_explain_shows_what_is_kept(table: Table) -> None:
    table(row(fa4=100.0, cudnn=80.0, core=60.0), row("fwd", "causal", fa4=1.0, core=2.0))
    q = torch.randn(2, 8, 128, 64, dtype=torch.bfloat16)
    report = fa_inductor.explain(Layers(), target=HOPPER)(q)
    assert [site.kernel for site in report.sites] == [CORE, "fa4"]
    assert report.coverage == 1.0
    report.assert_coverage(1.0)
    assert report.summary().endswith("2 attention site(s): 1 on core, 1 on fa4")
    assert fa_inductor.report.fallback_line(report.sites) is None
    site = report.to_json()["sites"][0]
    assert (site["kernel"], sorted(site["reasons"])) == (CORE, ["cudnn", "fa4"])


def test_a_fallback_beside_what_is_kept_still_counts(table: Table) -> None:
    table(row(fa4=100.0, core=60.0))
    q = torch.randn(2, 8, 128, 64, dtype=torch.bfloat16)
    report = fa_inductor.explain(lambda q: attend(q) + attend(q.float()).bfloat16(), target=HOPPER)(
        q
    )
    assert [site.kernel for site in report.sites] == [CORE, None]
    assert report.coverage == 0.5
    with pytest.raises(CoverageError, match="dtype float32"):
        report.assert_coverage(1.0)


def test_the_graph_keeps_the_call(table: Table) -> None:
    """... of a kept site, which is no fallback under "error"."""
    table(row(fa4=100.0, cudnn=80.0, core=60.0), row("fwd", "causal", fa4=1.0, core=2.0))
    targets: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        sites = compile_pass.run(gm, Config(on_fallback="error"), target(HOPPER))
        assert [site.kernel for site in sites] == [CORE, "fa4"]
        targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        assert compile_pass.run(gm, Config(on_fallback="error"), target(HOPPER)) == []
        return lambda q: (q,)  # the kernels are not here

    q = torch.randn(2, 8, 128, 64, dtype=torch.bfloat16)
    torch.compile(Layers(), backend=backend, fullgraph=True)(q)
    assert targets.count(F.scaled_dot_product_attention) == 1
    assert sum("fa_inductor" in str(each) for each in targets) == 1
