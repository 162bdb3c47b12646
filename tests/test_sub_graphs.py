"""Attention inside the bodies of higher-order ops, and inside torch.func transforms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._higher_order_ops.wrap import wrap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from comparison import compare_forward, compare_with_eager
from helpers import compile_quick, compile_reference, kernels_of

# Eager's own attention loops over the samples of a vmap, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
attend = F.scaled_dot_product_attention


def qkv() -> list[Tensor]:
    return [torch.randn(2, 4, 8, 16) for _ in range(3)]


# --- Bodies that are entered --------------------------------------------------------------------


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, is_causal=True)


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(causal, q, k, v, use_reentrant=False)


def checkpointed_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpointed(checkpointed(q * 2, k, v), k, v)


@torch.compiler.nested_compile_region
def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)


@torch.compiler.nested_compile_region
def checkpointed_region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpointed(q, k, v) + 1


def region_of_a_region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return region(region(q, k, v), k, v)


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cond(q.sum() > 0, attend, causal, (q, k, v))


def chosen_by_closure(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cond(q.sum() > 0, lambda: attend(q, k, v), lambda: q * 1.0)


# What is compiled, its attention sites, and how often the kernel runs.
ENTERED: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "checkpoint": (checkpointed, 1, 1),
    "two checkpoints": (checkpointed_twice, 2, 2),
    "region called twice": (region_of_a_region, 1, 2),
    "checkpoint in a region": (checkpointed_region, 1, 1),
    "cond": (chosen, 2, 1),
}


@pytest.mark.parametrize(("fn", "sites", "calls"), ENTERED.values(), ids=ENTERED.keys())
def test_attention_in_a_body_is_rewritten(
    fn: Callable[..., Tensor], sites: int, calls: int
) -> None:
    """Checkpoints, regions (one body for two calls) and both branches; gradients equal."""
    outcome = compare_with_eager(fn, compile_quick(fn), qkv())
    assert kernels_of(outcome.report) == ["reference"] * sites
    assert outcome.kernel_calls == calls


@pytest.mark.parametrize("name", ["checkpoint", "region called twice", "cond"])
def test_inductor_compiles_rewritten_bodies(name: str) -> None:
    fn, sites, calls = ENTERED[name]
    outcome = compare_with_eager(fn, compile_reference(fn), qkv())
    assert kernels_of(outcome.report) == ["reference"] * sites
    assert outcome.kernel_calls == calls


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_either_branch_of_a_condition(sign: float) -> None:
    """The branch that is taken decides which attention runs, with operands by closure too."""
    q, k, v = qkv()
    inputs = [sign * q.abs(), k, v]
    assert compare_forward(chosen, compile_quick(chosen), inputs).kernel_calls == 1
    closing = compare_forward(chosen_by_closure, compile_quick(chosen_by_closure), inputs)
    assert closing.rewritten_sites == 1
    assert closing.kernel_calls == (sign > 0)


def two_calls_of_one_region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return region(q, k, v) + region(q * 2, k, v)


def test_two_calls_share_one_body() -> None:
    """Their operands agree, so the one body is rewritten for both; gradients equal.

    Not through Inductor, whose own gradients of a region with two independent calls are
    wrong with and without us (torch 2.11 and 2.13).
    """
    fn = two_calls_of_one_region
    outcome = compare_with_eager(fn, compile_quick(fn), qkv())
    assert kernels_of(outcome.report) == ["reference"]
    assert outcome.kernel_calls == 2
    assert compare_forward(fn, compile_reference(fn), qkv()).kernel_calls == 2


def regions_of_two_lengths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return region(q, k, v)[:, :, :5] + region(q[:, :, :5].contiguous(), k, v)


def test_regions_of_two_lengths() -> None:
    """Each shape has a body of its own, and each is rewritten."""
    fn = regions_of_two_lengths
    outcome = compare_with_eager(fn, compile_quick(fn), qkv())
    assert kernels_of(outcome.report) == ["reference"] * 2
    assert outcome.kernel_calls == 2


# --- Pins reach into bodies ---------------------------------------------------------------------


def checkpoint_under_a_pin(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        pinned = checkpointed(q, k, v)
    return pinned + checkpointed(q, k, v)


def test_a_pin_around_a_checkpoint_holds_inside() -> None:
    """Only the checkpoint that the user pinned is left to PyTorch (GB-01).

    Forward only: eager recomputes without the pin, and fails over what it finds then.
    """
    fn = checkpoint_under_a_pin
    outcome = compare_forward(fn, compile_quick(fn), qkv())
    assert sorted(map(str, kernels_of(outcome.report))) == ["None", "reference"]
    assert outcome.kernel_calls == 1
    assert ["sdpa_kernel(MATH)" in reason for reason in outcome.reasons] == [True]


def one_region_under_two_settings(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    free = region(q, k, v)
    with sdpa_kernel(SDPBackend.MATH):
        return free + region(q, k, v)


def test_a_body_shared_by_a_pinned_call_is_left_alone() -> None:
    """One body cannot be both rewritten and not (GB-01)."""
    fn = one_region_under_two_settings
    outcome = compare_with_eager(fn, compile_quick(fn), qkv())
    assert outcome.kernel_calls == 0
    assert outcome.reasons == [
        "all: a sub-graph shared by 2 calls under different sdpa_kernel settings"
    ]


# --- Bodies that are left alone -----------------------------------------------------------------


def wrapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return wrap(lambda q: attend(q, k, v), q)


def checkpoint_in_an_unknown_op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return wrap(lambda q: checkpointed(q, k, v), q)


def looped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    start = torch.tensor(0)
    return while_loop(lambda i, q: i < 2, lambda i, q: (i + 1, attend(q, k, v)), (start, q))[1]


def scanned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scan(lambda carry, x: (carry + 1, attend(carry, x, x)), q, torch.stack([k, v]))[1]


UNKNOWN = {
    "wrap": (wrapped, "wrap"),
    "checkpoint in wrap": (checkpoint_in_an_unknown_op, "wrap"),
    "while_loop": (looped, "while_loop"),
    "scan": (scanned, "scan"),
}


@pytest.mark.parametrize(("fn", "op"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_higher_order_op_is_not_entered(fn: Callable[..., Tensor], op: str) -> None:
    """What its operands mean is not known, so nothing in its body is touched."""
    outcome = compare_forward(fn, compile_quick(fn), qkv())
    assert outcome.kernel_calls == 0
    reason = f"inside the higher-order op {op}, which fa_inductor does not enter"
    assert outcome.reasons == [f"all: {reason}"]


def one_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q[None], k[None], v[None])[0]


def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(one_sample)(q, k, v)


def gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.grad(lambda q: attend(q, k, v).square().sum())(q)


def per_sample_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda q: one_sample(q, k[0], v[0]).sum()))(q)


def tangent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the only path of PyTorch's with a forward-mode formula
        return torch.func.jvp(lambda q: attend(q, k, v), (q,), (torch.ones_like(q),))[1]


@pytest.mark.parametrize("fn", [mapped, gradient, per_sample_gradient, tangent])
def test_a_transform_is_left_alone(fn: Callable[..., Tensor]) -> None:
    """vmap, grad and jvp inside a compiled function keep PyTorch's attention (EX-02, EX-03)."""
    outcome = compare_forward(fn, compile_quick(fn), qkv())
    assert outcome.kernel_calls == 0
    assert len(outcome.reasons) == 1
    assert "inside a torch.func transform" in outcome.reasons[0]


def plain_beside_mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return mapped(q, k, v) + attend(q, k, v)


def test_a_transform_beside_a_plain_attention() -> None:
    """Both equal eager and either has a kernel or a reason (EX-02)."""
    outcome = compare_forward(plain_beside_mapped, compile_quick(plain_beside_mapped), qkv())
    assert len(outcome.report.sites) == 2
    assert all(site.kernel or site.reason_texts for site in outcome.report.sites)
