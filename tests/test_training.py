"""Training steps of a model written here: grouped heads, RMSNorm, rotary positions, causal.

Loss and every gradient of the compiled step are compared with eager, with and without activation
checkpointing, in float32 and under autocast, in poisoned memory.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from explained_model import Attention, make_x
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers import compile_quick, compile_reference, kernels_of, relative_error, run_reported
from poison import poisoned

BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS = 2, 11, 40, 32, 2
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8


def _rotated(x: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) of (B, H, S, D), pairs (d, d + D/2)."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(WIDTH)
        self.before_mlp = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KEY_HEADS, KEY_HEADS], dim=1)
        attended = F.scaled_dot_product_attention(
            _rotated(q), _rotated(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x)).relu()


class _Model(nn.Module):
    """tokens (B, S) -> mean cross-entropy of predicting each next token."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.head(x)[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _step(model: nn.Module, run: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Loss and gradients, by parameter name, of one training step."""
    model.zero_grad(set_to_none=True)
    loss = run(tokens)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {"loss": loss.detach(), **{name: grad.clone() for name, grad in grads.items()}}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_training_step_equals_eager(checkpointed: bool) -> None:
    """DR-03: attention inside a checkpoint is rewritten too, and recomputed without complaint."""
    model = _Model(checkpointed)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    with poisoned():
        expected = _step(model, model, tokens)
        compiled = compile_quick(model)
        actual, report = run_reported(lambda: _step(model, compiled, tokens))
    assert len(report.graphs) == 1
    assert kernels_of(report) == ["reference"] * LAYERS
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_training_step_under_autocast(checkpointed: bool) -> None:
    """DT-01: attention runs in bfloat16 where autocast would have it so.

    bfloat16 keeps 8 significant bits, so two correct orders of summation differ by about 2**-8.
    Therefore the yardstick is float64: the compiled step may be off by no more than eager under
    autocast is, plus one unit of rounding for the different order.
    """
    model = _Model(checkpointed)
    exact_model = copy.deepcopy(model).double()
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    exact = _step(exact_model, exact_model, tokens)
    with poisoned():
        with torch.autocast("cpu", torch.bfloat16):
            expected = _step(model, model, tokens)
        compiled = compile_quick(model)
        with torch.autocast("cpu", torch.bfloat16):
            actual, report = run_reported(lambda: _step(model, compiled, tokens))
    assert kernels_of(report) == ["reference"] * LAYERS
    assert {site.spec.dtype for site in report.sites if site.spec} == {torch.bfloat16}
    for name, value in exact.items():
        allowed = relative_error(expected[name], value) + 2.0**-8
        assert relative_error(actual[name], value) <= allowed, name


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_attention_trains_through_inductor(checkpointed: bool) -> None:
    """The whole way down, for the attention alone: the model's many small kernels would cost a
    second of C++ compiler each."""
    module, x = Attention(), make_x().requires_grad_()
    wanted = [x, *module.parameters()]

    def run(x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)

    with poisoned():
        expected = run(x)
        weight = torch.randn_like(expected)
        expected_grads = torch.autograd.grad(expected, wanted, weight)
        result, report = run_reported(compile_reference(run), x)
        grads = torch.autograd.grad(result, wanted, weight)
    assert kernels_of(report) == ["reference"]
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)


def test_second_step_sees_the_updated_weights() -> None:
    """One compile serves all steps, and losses fall together with eager's."""
    model = _Model(checkpointed=False)
    twin = copy.deepcopy(model)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    compiled = compile_quick(model)
    losses: dict[str, list[float]] = {"compiled": [], "eager": []}
    with poisoned():
        for name, module, run in (("eager", twin, twin), ("compiled", model, compiled)):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            for _ in range(3):
                losses[name].append(float(_step(module, run, tokens)["loss"]))
                optimizer.step()
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-5)
    assert losses["eager"][-1] < losses["eager"][0]
