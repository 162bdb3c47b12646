"""Copies around attention that only change the layout are not made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_attention import attend as by_hand
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from comparison import compare_with_eager
from fa_inductor import compile_pass
from fa_inductor.config import Config
from helpers import compile_quick, kernels_of

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
B, S, H, D = 2, 6, 4, 8


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def heads(x: Tensor) -> Tensor:
    return x.view(B, -1, H, D).transpose(1, 2)


def projections() -> list[Tensor]:
    return [torch.randn(B, S, H * D) for _ in range(3)]


def copies_in(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> int:
    """How many copies the forward's graph makes after the pass, each of them a kernel."""
    found: list[int] = []

    def look(gm: fx.GraphModule, _: object) -> Callable[..., Any]:
        found.append(sum(node.target is torch.ops.aten.clone.default for node in gm.graph.nodes))
        return gm.forward

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        compile_pass.run(gm, Config(kernels=("reference",)))
        return aot_autograd(fw_compiler=look)(gm, example_inputs)

    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    compiled(*(tensor.requires_grad_() for tensor in inputs))
    return found[0]


def copied_inputs(attend: Attention) -> Callable[..., Tensor]:
    return lambda *x: attend(*(heads(each).contiguous() for each in x))


def copied_output(attend: Attention) -> Callable[..., Tensor]:
    return lambda *x: attend(*map(heads, x)).transpose(1, 2).contiguous().view(B, -1, H * D) * 2


def reshaped_output(attend: Attention) -> Callable[..., Tensor]:
    return lambda *x: attend(*map(heads, x)).permute(0, 2, 1, 3).reshape(B, -1, H * D) * 2


def everything(attend: Attention) -> Callable[..., Tensor]:
    def fn(*x: Tensor) -> Tensor:
        q, k, v = (heads(each).contiguous() for each in x)
        return attend(q, k, v).transpose(1, 2).contiguous().flatten(2).sin()

    return fn


WAYS = [copied_inputs, copied_output, reshaped_output, everything]


@pytest.mark.parametrize("attend", [sdpa, by_hand])
@pytest.mark.parametrize("way", WAYS)
def test_no_copy_is_left(way: Callable[..., Any], attend: Attention) -> None:
    fn = way(attend)
    assert copies_in(fn, projections()) == 0
    torch._dynamo.reset()
    outcome = compare_with_eager(fn, compile_quick(fn), projections())
    assert kernels_of(outcome.report) == ["reference"]


# --- Copies that must stay ------------------------------------------------------------------------


def used_elsewhere(*x: Tensor) -> Tensor:
    q, k, v = map(heads, x)
    k = k.contiguous()
    return sdpa(q, k, v) + k.sin()


def source_written_to(*x: Tensor) -> Tensor:
    q, k, v = (heads(each.clone()) for each in x)
    copy = k.contiguous()
    k.mul_(2)
    return sdpa(q, copy, v) + k.sin()


def copy_written_to(*x: Tensor) -> Tensor:
    q, k, v = map(heads, x)
    copy = k.contiguous()
    copy.mul_(2)
    return sdpa(q, copy, v)


def repeated_in_memory(*x: Tensor) -> Tensor:
    q, k, v = map(heads, x)
    return sdpa(q, k[:, :, :1].expand(-1, -1, S, -1).contiguous(), v)


def without_gradient(*x: Tensor) -> Tensor:
    q, k, v = map(heads, x)
    with torch.no_grad():
        copy = k.contiguous()
    return sdpa(q, copy, v) + k.sum()


def innermost_apart(*x: Tensor) -> Tensor:
    q, k, v = (heads(torch.cat([each, each], -1)[..., ::2]) for each in x)
    return sdpa(q, k.contiguous(), v)


def output_written_to(*x: Tensor) -> Tensor:
    out = by_hand(*map(heads, x)).transpose(1, 2).contiguous()
    out.mul_(2)
    return out.sin()


def output_handed_out(*x: Tensor) -> Tensor:
    return by_hand(*map(heads, x)).transpose(1, 2).contiguous()


def output_also_read_as_it_is(*x: Tensor) -> Tensor:
    out = by_hand(*map(heads, x))
    return out.transpose(1, 2).contiguous().sin() + out.view(B * H, S, D).sum()


def output_cloned(*x: Tensor) -> Tensor:
    """A clone keeps the layout that it finds, and a later view may count on it."""
    return by_hand(*map(heads, x)).transpose(1, 2).clone().transpose(1, 2).view(-1).sin()


@pytest.mark.parametrize(
    "fn",
    [
        used_elsewhere,
        source_written_to,
        copy_written_to,
        repeated_in_memory,
        without_gradient,
        innermost_apart,
        output_written_to,
        output_handed_out,
        output_also_read_as_it_is,
        output_cloned,
    ],
)
def test_copies_that_stay(fn: Callable[..., Tensor]) -> None:
    assert copies_in(fn, projections()) >= 1
    torch._dynamo.reset()
    outcome = compare_with_eager(fn, compile_quick(fn), projections())
    assert kernels_of(outcome.report) == ["reference"]


@pytest.mark.parametrize("attend", [sdpa, by_hand])
@pytest.mark.parametrize("way", ["contiguous", "repeated"])
def test_an_input_that_is_written_to_afterwards(way: str, attend: Attention) -> None:
    """The code's backward reads its own copy, so ours must not read the input."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if way == "contiguous":
            out = attend(q, k.contiguous(), v)
        else:
            out = attend(q, *(x.repeat_interleave(2, 1) for x in (k[:, :2], v[:, :2])))
        k.mul_(0.5)
        return out

    compiled = compile_quick(fn)
    q, k, v = map(heads, projections())
    results = []
    for called in (fn, compiled):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, v)]
        out = called(leaves[0], k.clone(), leaves[1])
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_an_output_that_is_changed_afterwards_still_has_its_gradient() -> None:
    """The op keeps its output for its backward: what it hands out must be other memory."""
    fn = output_handed_out
    compiled = compile_quick(fn)
    inputs = [tensor.requires_grad_() for tensor in projections()]
    results = []
    for called in (fn, compiled):
        out = called(*inputs)
        out.mul_(2)
        results.append(torch.autograd.grad(out.sin().sum(), inputs))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
