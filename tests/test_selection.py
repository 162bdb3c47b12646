"""Which kernel is chosen: by `choose`, by `explain` for GPUs that are only named, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_specs import AMPERE, BLACKWELL, GEFORCE, HOPPER, spec, target
from torch import Tensor

from comparison import TOLERANCE, compare_with_eager, run_poisoned
from fa_inductor import explain
from fa_inductor.config import Config
from fa_inductor.errors import UnknownKernelError, UnknownTargetError
from fa_inductor.rewrite import SiteRecord
from fa_inductor.select import choose
from fa_inductor.support import Row, reasons_against
from fa_inductor.target import NAMED_TARGETS, TESTED_LIBRARIES, Target
from helpers import compile_quick

attend = F.scaled_dot_product_attention

# --- choose -------------------------------------------------------------------------------------


def test_the_first_able_kernel_is_chosen() -> None:
    """In the order of the configuration, with the reasons against each of the others."""
    config = Config(kernels=("cudnn", "fa4", "reference"))
    choice = choose(spec(), config, target(HOPPER))
    assert choice.kernel == "fa4"
    assert set(choice.reasons) == {"cudnn"}
    reversed_order = Config(kernels=("reference", "fa4"))
    assert choose(spec(), reversed_order, target(HOPPER)).kernel == "reference"


def test_no_able_kernel_means_all_reasons() -> None:
    """A fallback names everything that speaks against every kernel that was allowed."""
    problem = spec(33, dtype=torch.float32, dropout_p=0.1)
    choice = choose(problem, Config(kernels=("fa4", "cudnn")), target(HOPPER))
    assert choice.kernel is None
    text = " · ".join(reason for texts in choice.reasons.values() for reason in texts)
    for value in ("dropout_p=0.1", "head_dim 33", "dtype float32", "kernel cudnn"):
        assert value in text


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
    for installed in ("", "4.0.0b12"):
        here = {**dict.fromkeys(TESTED_LIBRARIES, ""), "flash-attn-4": installed}
        monkeypatch.setattr("fa_inductor.target.installed_libraries", lambda here=here: here)
        named = Target.of_name(arch)
        assert (named.arch, named.named) == (arch, True)
        assert Target.of_name(arch.removesuffix("a")) == named
        against = reasons_against("fa4", spec(), named)
        assert [reason.partition(" (")[0] for reason in against] == (
            [f"flash-attn-4 {installed}"] if installed else []
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
    site = planned(attend, arch, qkv())
    assert site.kernel == "fa4"
    assert set(site.reasons) == {"cudnn"}
    assert site.copied == {}


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL, GEFORCE, AMPERE])
def test_a_backward_is_planned_where_there_is_one(arch: str) -> None:
    """sm_80 has no backward; cuDNN's reason is given beside FA4's."""
    site = planned(attend, arch, [tensor.requires_grad_() for tensor in qkv()])
    assert site.spec
    assert site.spec.needs_grad
    if arch != AMPERE:
        assert site.kernel == "fa4"
        return
    assert site.kernel is None
    assert [text.partition(" (")[0] for text in site.reason_texts] == [
        "fa4: sm_80",
        "cudnn: kernel cudnn",
    ]


def odd_head_dim(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q[..., :33], k[..., :33], v[..., :33])


def with_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, dropout_p=0.1)


def with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, attn_mask=q.new_ones(16, 16, dtype=torch.bool))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True)


def negatively_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, scale=-0.25)


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.float(), k.float(), v.float())


FALLBACKS: dict[str, tuple[Callable[..., Tensor], list[Tensor], str]] = {
    "head dim (HD-01)": (odd_head_dim, qkv(), "head_dim 33 (multiples of 8"),
    "dropout (DR-01)": (with_dropout, qkv(), "dropout_p=0.1 > 0 (FA4 has no dropout"),
    "mask": (with_mask, qkv(), "attn_mask bool (16, 16) (no attn_mask"),
    "unequal lengths (MK-03)": (causal, qkv(sq=7), "is_causal with Sq 7 and Sk 16 (top-left"),
    "scale (PM-02)": (negatively_scaled, qkv(), "scale -0.25 (a positive number"),
    "dtype (DT-03)": (in_float32, qkv(), "dtype float32 (float16, bfloat16"),
}


@pytest.mark.parametrize(("fn", "inputs", "reason"), FALLBACKS.values(), ids=FALLBACKS.keys())
def test_a_fallback_says_why(fn: Callable[..., Tensor], inputs: list[Tensor], reason: str) -> None:
    """Value, limit and source for FA4, and something for every other kernel."""
    site = planned(fn, HOPPER, inputs)
    assert site.kernel is None
    assert set(site.reasons) == {"fa4", "cudnn"}
    assert [text.startswith(reason) for text in site.reasons["fa4"]] == [True]
    assert "; " in site.reasons["fa4"][0]


def test_a_symbolic_head_dim_is_not_guessed() -> None:
    inputs = qkv()
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 3)
    site = planned(attend, HOPPER, inputs)
    assert site.kernel is None
    assert "is symbolic (" in site.reasons["fa4"][0]


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
    assert any(text.startswith("device cpu (CUDA only") for text in site.reasons["fa4"])
    asked = planned(attend, None, qkv(), **{"fa.kernels": ("fa4", "reference")})
    assert asked.kernel == "reference"
    assert set(asked.reasons) == {"fa4"}


MASK_SHAPES = [(1, 2, 64, 64), (1, 1, 64, 64), (2, 64, 64), (64, 64), (1, 2, 1, 64)]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_a_mask_alone_that_wants_a_gradient(shape: tuple[int, ...]) -> None:
    """The mask is named as the reason, and its gradient has its own shape (MK-02)."""
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))

    def biased(mask: Tensor) -> Tensor:
        return attend(q, k, v, attn_mask=mask)

    outcome = compare_with_eager(biased, compile_quick(biased), [torch.randn(shape)])
    assert outcome.kernel_calls == 0
    assert outcome.reasons[0].startswith(
        f"reference: attn_mask float32 ({', '.join(map(str, shape))}) ("
    )


class Dropped(torch.nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, dropout_p=self.probability)


def weights_through(probability: float, seeds: Iterable[int]) -> tuple[Tensor, Tensor, list[str]]:
    """Attention weights of every seed, those without dropout, and the reasons."""
    q, k = torch.randn(2, 4, 32, 16), torch.randn(2, 4, 32, 16)
    v = torch.eye(32).expand(2, 4, 32, 32).contiguous()  # so that the output is the weights
    torch._dynamo.reset()  # or another probability would make it a symbol
    compiled = compile_quick(Dropped(probability).eval())
    found, reasons = [], []
    for seed in seeds:
        torch.manual_seed(seed)
        out, outcome = run_poisoned(compiled, [q, k, v])
        assert outcome.kernel_calls == (probability == 0.0)
        found.append(out)
        reasons += outcome.reasons
    return torch.stack(found), attend(q, k, v), reasons


def test_dropout_stays_dropout_in_eval() -> None:
    """F.sdpa drops in eval mode too: rate, mean and seeds as they are in PyTorch (DR-01)."""
    dropped, whole, reasons = weights_through(0.5, seeds=[*range(40), 0])
    assert reasons == [
        "reference: dropout_p=0.5 > 0 "
        "(no dropout in this version of fa_inductor; fa_inductor/kernels/reference.py)"
    ]
    assert float((dropped == 0).float().mean()) == pytest.approx(0.5, abs=0.02)
    # 40 seeds: the standard error of a kept weight w is w / sqrt(40), over 8192 weights.
    assert float((dropped.mean(0) - whole).mean()) == pytest.approx(0.0, abs=1e-3)
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(dropped[0], dropped[-1])


def test_dropout_of_everything_and_of_nothing() -> None:
    """p = 1 gives zeros, p = 0 is no dropout at all (DR-01)."""
    dropped, _, _ = weights_through(1.0, seeds=[0])
    assert dropped.eq(0).all()
    kept, whole, reasons = weights_through(0.0, seeds=[0])
    assert reasons == []
    torch.testing.assert_close(kept[0], whole, **TOLERANCE)
