"""Which kernel is chosen: by `choose`, by `explain` for GPUs that are only named, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_specs import AMPERE, BLACKWELL, GEFORCE, HOPPER, spec, target
from torch import Tensor

from fa_inductor import explain, times
from fa_inductor.config import Config
from fa_inductor.errors import UnknownKernelError, UnknownTargetError
from fa_inductor.rewrite import SiteRecord
from fa_inductor.select import Choice, choose
from fa_inductor.support import Row, reasons_against
from fa_inductor.target import NAMED_TARGETS, TESTED_LIBRARIES, Target

attend = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the kernels alone decides; `test_times.py` has the times."""
    monkeypatch.setattr(times, "_table", lambda arch: ())


# --- choose -------------------------------------------------------------------------------------


def test_the_first_able_kernel_is_chosen() -> None:
    """In the order of the configuration, with the reasons against each of the others."""
    config = Config(kernels=("cudnn", "fa4", "reference"))
    assert choose(spec(), config, target(HOPPER)) == Choice("cudnn", {})
    choice = choose(spec(softcap=30.0), config, target(HOPPER))
    assert choice.kernel == "fa4"
    assert set(choice.reasons) == {"cudnn"}
    reversed_order = Config(kernels=("reference", "fa4"))
    assert choose(spec(), reversed_order, target(HOPPER)).kernel == "reference"


def test_no_able_kernel_means_all_reasons() -> None:
    """A fallback names everything that speaks against every kernel that was allowed."""
    problem = spec(33, dtype=torch.float32, dropout_p=1.0)
    choice = choose(problem, Config(kernels=("fa4", "cudnn")), target(HOPPER))
    assert choice.kernel is None
    assert {
        name: sorted(reason.partition(" (")[0] for reason in reasons)
        for name, reasons in choice.reasons.items()
    } == {
        "fa4": ["dropout_p=1.0 > 0", "dtype float32", "head_dim 33"],
        "cudnn": ["dropout_p=1.0", "dtype float32", "head_dim 33"],
    }


def test_rows_of_a_plugin_count_too() -> None:
    row = Row("mine", "size", "small", "its manual", lambda spec, target: "too large")
    assert reasons_against("mine", spec(), target(HOPPER), (row,)) == [
        "too large (small; its manual)"
    ]


@pytest.mark.parametrize("arch", NAMED_TARGETS)
def test_a_named_target_has_the_libraries_that_are_here_or_the_tested_ones(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning needs no kernel library; one that is here in another version is seen."""
    for installed, cudnn in (("", ""), ("4.0.0b12", "9.12.0")):
        here = dict.fromkeys(TESTED_LIBRARIES, "")
        here |= {"flash-attn-4": installed, "cudnn": cudnn}
        monkeypatch.setattr("fa_inductor.target.installed_libraries", lambda here=here: here)
        named = Target.of_name(arch)
        assert (named.arch, named.named) == (arch, True)
        assert Target.of_name(arch.removesuffix("a")) == named
        against = reasons_against("fa4", spec(), named)
        assert [reason.partition(" (")[0] for reason in against] == (
            [f"flash-attn-4 {installed}"] if installed else []
        )
        against = reasons_against("cudnn", spec(), named)
        assert [reason.partition(" (")[0] for reason in against] == (
            [f"cuDNN {cudnn}"] if cudnn else []
        )


# --- Planned through `explain` ------------------------------------------------------------------


def qkv(d: int = 64, sq: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """(B, H, S, D) views of (B, S, H, D) memory, on the CPU."""
    return [torch.randn(2, s, 4, d, dtype=dtype).transpose(1, 2) for s in (sq, 16, 16)]


def planned(
    fn: Callable[..., Any], arch: str | None, inputs: list[Tensor], **options: Any
) -> SiteRecord:
    """The one site of `fn` as the pass would decide it."""
    report = explain(fn, options=options or None, target=arch)(*inputs)
    assert len(report.sites) == 1
    return report.sites[0]


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL, GEFORCE, AMPERE])
def test_a_plain_attention_is_planned_on_fa4(arch: str) -> None:
    """The first of the default kernels; cuDNN could run it too, so nothing speaks against it."""
    site = planned(attend, arch, qkv())
    assert (site.kernel, site.reasons, site.copied) == ("fa4", {}, {})


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL, GEFORCE, AMPERE])
def test_a_backward_is_planned_where_there_is_one(arch: str) -> None:
    """FA4 has none on sm_80, cuDNN has."""
    site = planned(attend, arch, [tensor.requires_grad_() for tensor in qkv()])
    assert site.spec
    assert site.spec.needs_grad
    against = [text.partition(" (")[0] for text in site.reason_texts]
    assert (site.kernel, against) == (("cudnn", ["fa4: sm_80"]) if arch == AMPERE else ("fa4", []))


def odd_head_dim(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q[..., :33], k[..., :33], v[..., :33])


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, dropout_p=0.1)


_MASK = torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) > 0.3


def with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=_MASK)


def with_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=_MASK.bfloat16())


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True)


def negatively_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, scale=-0.25)


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.float(), k.float(), v.float())


def with_float32_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=_MASK.float())


def dropped_altogether(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, dropout_p=1.0)


# What neither kernel takes: the reason of each.
FALLBACKS: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "head dim (HD-01)": (
        odd_head_dim,
        "head_dim 33 (multiples of 8 from 8 to 256, Dv <= D",
        "head_dim 33 (multiples of 8 from 8 to 256; ",
    ),
    "dtype (DT-03)": (
        in_float32,
        "dtype float32 (float16, bfloat16; ",
        "dtype float32 (float16, bfloat16; ",
    ),
    "mask of another dtype (MK-06)": (
        with_float32_mask,
        "attn_mask float32 (16, 16) (masks that only show and hide; ",
        "attn_mask float32 (16, 16) beside a bfloat16 query (bool, or the query's dtype",
    ),
    "dropout of everything (DR-01)": (
        dropped_altogether,
        "dropout_p=1.0 > 0 (FA4 has no dropout; ",
        "dropout_p=1.0 (below 1; ",
    ),
}


@pytest.mark.parametrize(("fn", "fa4", "cudnn"), FALLBACKS.values(), ids=FALLBACKS.keys())
def test_a_fallback_says_why(fn: Callable[..., Tensor], fa4: str, cudnn: str) -> None:
    """Value, limit and source for every kernel."""
    site = planned(fn, HOPPER, qkv())
    assert site.kernel is None
    assert list(site.reasons) == ["fa4", "cudnn"]
    for name, reason in (("fa4", fa4), ("cudnn", cudnn)):
        assert [text.startswith(reason) for text in site.reasons[name]] == [True]
        assert "; " in site.reasons[name][0]


# What cuDNN takes and FA4 does not, and FA4's reason.
ONLY_CUDNN: dict[str, tuple[Callable[..., Tensor], list[Tensor], str]] = {
    "dropout (DR-01)": (with_dropout, qkv(), "dropout_p=0.1 > 0 (FA4 has no dropout"),
    "mask": (with_bias, qkv(), "attn_mask bfloat16 (16, 16) (masks that only show and hide"),
    "unequal lengths (MK-03)": (causal, qkv(sq=7), "is_causal with Sq 7 and Sk 16 (top-left"),
    "scale (PM-02)": (negatively_scaled, qkv(), "scale -0.25 (a positive number"),
}


@pytest.mark.parametrize(("fn", "inputs", "reason"), ONLY_CUDNN.values(), ids=ONLY_CUDNN.keys())
def test_cudnn_takes_what_fa4_does_not(
    fn: Callable[..., Tensor], inputs: list[Tensor], reason: str
) -> None:
    """With FA4's value, limit and source; alone, FA4 leaves it to PyTorch for the same reason."""
    for training in (False, True):
        leaves = [tensor.detach().requires_grad_(training) for tensor in inputs]
        site = planned(fn, HOPPER, leaves)
        assert site.kernel == "cudnn"
        assert list(site.reasons) == ["fa4"]
        assert [text.startswith(reason) for text in site.reasons["fa4"]] == [True]
        assert "; " in site.reasons["fa4"][0]
        alone = planned(fn, HOPPER, leaves, **{"fa.kernels": ("fa4",)})
        assert (alone.kernel, alone.reasons) == (None, site.reasons)


def test_a_symbolic_head_dim_is_not_guessed() -> None:
    inputs = qkv()
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 3)
    site = planned(attend, HOPPER, inputs)
    assert site.kernel is None
    for name in ("fa4", "cudnn"):
        assert "is symbolic (" in site.reasons[name][0]


def test_planning_runs_the_code_as_it_was_written() -> None:
    """A target that is not here is never launched: `explain` ran PyTorch's own attention."""
    inputs = qkv()
    results: list[Tensor] = []
    explain(lambda *inputs: results.append(attend(*inputs)), target=BLACKWELL)(*inputs)
    torch.testing.assert_close(results[0], attend(*inputs), rtol=0, atol=0)


# --- Names that do not exist --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sm_89", "sm90", "H100", ""])
def test_an_unknown_target(name: str) -> None:
    with pytest.raises(UnknownTargetError, match=f"Unknown target '{name}'.*sm_90a"):
        explain(attend, target=name)


def test_an_unknown_kernel() -> None:
    with pytest.raises(UnknownKernelError, match=r"'fa5'.*Did you mean 'fa4'\?"):
        explain(attend, options={"fa.kernels": ("fa5",)})
    with pytest.raises(Exception, match=r"'fa5'.*Did you mean 'fa4'\?"):
        torch.compile(attend, backend="fa_inductor", options={"fa.kernels": ("fa5",)})(*qkv())


# --- On the CPU ---------------------------------------------------------------------------------


def test_the_cpu_is_left_to_pytorch_unless_asked() -> None:
    """`reference` runs only where it is named; the default kernels say that they need a GPU."""
    site = planned(attend, None, qkv())
    assert site.kernel is None
    for name in ("fa4", "cudnn"):
        assert any(text.startswith("device cpu (CUDA only") for text in site.reasons[name])
    asked = planned(attend, None, qkv(), **{"fa.kernels": ("fa4", "reference")})
    assert asked.kernel == "reference"
    assert set(asked.reasons) == {"fa4"}
