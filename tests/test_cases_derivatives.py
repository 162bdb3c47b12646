"""Cases about derivatives that the ops do not have, through compiled attention (EX-03)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from comparison import TOLERANCE, compare_forward
from fa_inductor.errors import DerivativeError
from helpers import compile_quick, compile_reference
from poison import poisoned

BOTH_ROUTES = pytest.mark.parametrize("compiler", [compile_quick, compile_reference])
attend = F.scaled_dot_product_attention


def randn(*size: int) -> Tensor:
    return torch.randn(size)


def squared(q: Tensor) -> Tensor:
    return attend(q, q, q).square().sum()


@BOTH_ROUTES
def test_a_compiled_second_derivative_is_refused(compiler: Callable[..., Any]) -> None:
    """Of what was compiled there is one derivative; a second one is an error (EX-03)."""
    q = randn(2, 4, 8, 16).requires_grad_()
    gradient = torch.autograd.grad(compiler(squared)(q), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"double backward|second derivatives"):
        gradient.square().sum().backward()
    assert q.grad is None


# By our op, or by newer PyTorch's Dynamo, which takes no dual tensor at all.
REFUSALS = (DerivativeError, Unsupported)


@BOTH_ROUTES
def test_a_compiled_tangent_is_refused(compiler: Callable[..., Any]) -> None:
    """Forward mode through a compiled attention is refused, and never gives 0 (EX-03)."""
    q = randn(2, 4, 8, 16)
    compiled = compiler(squared)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(REFUSALS, match=r"fa_inductor\.attention|dual tensor"):
            compiled(dual)


def test_a_tangent_after_the_first_call_is_refused_too() -> None:
    """The graph compiled without a tangent is not reused for one (EX-03)."""
    q = randn(2, 4, 8, 16)
    compiled = compile_quick(squared)
    with poisoned():
        torch.testing.assert_close(compiled(q), squared(q), **TOLERANCE)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(REFUSALS, match=r"fa_inductor\.attention|dual tensor"):
            compiled(dual)


def hessian_vector_product(q: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the path of PyTorch's that can be differentiated twice
        grad = torch.func.grad(squared)
        return torch.func.jvp(grad, (q,), (torch.ones_like(q),))[1]


def test_higher_derivatives_inside_are_pytorch_s() -> None:
    """A Hessian-vector product inside the compiled function keeps its values (EX-03)."""
    outcome = compare_forward(
        hessian_vector_product, compile_quick(hessian_vector_product), [randn(2, 2, 6, 8)]
    )
    assert outcome.kernel_calls == 0
    assert all(site.reason_texts for site in outcome.report.sites)
