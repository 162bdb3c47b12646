"""A scale or dropout that is an attribute of a module: a symbol as soon as two modules differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_inductor.compile_pass import run
from fa_inductor.config import Config
from fa_inductor.target import Target
from helpers import compile_quick, kernels_of, oracle, relative_error, run_reported
from poison import poisoned


class Attention(nn.Module):
    def __init__(self, scale: float, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.scale, self.dropout_p = scale, dropout_p

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale, dropout_p=self.dropout_p)


def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return module(q, k, v)


def test_scales_that_differ_between_modules() -> None:
    compiled = compile_quick(attend)
    with poisoned():
        for scale in (0.3, 0.5, 0.7, -0.2):
            q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
            out, report = run_reported(compiled, Attention(scale), q, k, v)
            assert set(kernels_of(report)) <= {"reference"}
            assert relative_error(out, oracle(q, k, v, scale=scale)) < 1e-5


def test_a_symbolic_scale_is_guarded_to_be_positive_on_fa4() -> None:
    """FA4 takes the scale at run time, so any positive one is the same graph."""
    planned: list[str | None] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        config = Config(kernels=("fa4",), on_fallback="ignore")
        sites = run(gm, config, Target.of_name("sm_90a"), apply=False)
        planned.extend(site.kernel for site in sites)
        return gm.forward

    compiled = torch.compile(attend, backend=backend)
    q = torch.randn(2, 4, 9, 64, dtype=torch.bfloat16)
    for scale in (0.3, 0.5, 0.7):
        compiled(Attention(scale), q, q, q)
    assert set(planned) == {"fa4"}
    planned.clear()
    compiled(Attention(-0.2), q, q, q)
    assert planned == [None]


BY_HAND: dict[str, Callable[..., Tensor]] = {
    "scores": lambda q, k, scale: q @ k.mT * scale,
    "scores from the left": lambda q, k, scale: scale * (q @ k.mT) * 1.0,
    "scores divided": lambda q, k, scale: q @ k.mT / (1 / scale),
    "queries": lambda q, k, scale: (q * scale) @ (k / 2.0).mT * 2.0,
    "queries and keys": lambda q, k, scale: (q * scale) @ (k / scale).mT * scale,
    "inside tanh": lambda q, k, scale: torch.tanh(q @ k.mT * scale / 1e4) * 1e4,
}


@pytest.mark.parametrize("way", BY_HAND)
def test_scales_of_hand_written_attention(way: str) -> None:
    """The op takes the number as the graph has it, and nothing is compiled anew for another."""

    class ByHand(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return BY_HAND[way](q, k, self.scale).softmax(-1) @ v

    compiled = compile_quick(attend)
    graphs = []
    with poisoned():
        for scale in (0.3, 0.5, 0.7, 0.2):
            q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
            out, report = run_reported(compiled, ByHand(scale), q, k, v)
            assert set(kernels_of(report)) <= {"reference"}
            assert relative_error(out, oracle(q, k, v, scale=scale)) < 1e-5
            graphs.append(len(report.graphs))
    assert graphs[2:] == [0, 0]


@pytest.mark.parametrize("what", ["softcap", "masked scores"])
def test_numbers_of_hand_written_attention_that_must_be_known(what: str) -> None:
    class ByHand(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.mT
            scores = torch.tanh(scores) if what == "softcap" else scores + k[:, :, None, :, 0]
            return (scores * self.scale).softmax(-1) @ v

    compiled = compile_quick(attend)
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    for scale in (0.3, 0.5):
        module = ByHand(scale)
        with poisoned():
            out, report = run_reported(compiled, module, q, k, v)
        torch.testing.assert_close(out, module(q, k, v))
    (reason,) = {text for site in report.sites for text in site.reason_texts}
    assert "a symbolic number" in reason


def attended(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return module(x, x, x, need_weights=False)[0]


def test_a_dropout_that_becomes_a_symbol_is_never_dropped() -> None:
    """Nor is it a fallback: it is fixed, in the attempt that Dynamo throws away as well."""
    compiled = compile_quick(attend, on_fallback="error")
    v = torch.eye(64).expand(2, 4, 64, 64)  # so that the output is the weights
    with poisoned():
        for dropout_p in (0.0, 0.5, 0.9, 0.3):
            q, k = (torch.randn(2, 4, 64, 8) for _ in range(2))
            out, report = run_reported(compiled, Attention(0.3, dropout_p), q, k, v)
            assert {site.spec and site.spec.dropout_p for site in report.sites} == {dropout_p}
            assert float(out.eq(0).float().mean()) == pytest.approx(dropout_p, abs=0.02)
            exact = relative_error(out, oracle(q, k, v, scale=0.3)) < 1e-5
            assert exact is (dropout_p == 0)


def test_dropouts_that_differ_between_pytorch_s_modules() -> None:
    compiled = compile_quick(attended, on_fallback="error")
    x = torch.randn(2, 7, 16)
    with poisoned():
        for dropout_p in (0.0, 0.5, 0.9, 0.3):
            module = nn.MultiheadAttention(16, 2, dropout=dropout_p, batch_first=True)
            out, report = run_reported(compiled, module, x)
            assert {site.spec and site.spec.dropout_p for site in report.sites} == {dropout_p}
            whole = attended(module.eval(), x).detach()
            assert (relative_error(out.detach(), whole) < 1e-5) is (dropout_p == 0)
