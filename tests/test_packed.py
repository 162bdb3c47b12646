"""q, k and v out of one projection: found, and differentiated into one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.autograd import forward_ad

from comparison import compare_with_eager
from fa_inductor import compile_pass, packed_ops
from fa_inductor.config import Config
from fa_inductor.errors import DerivativeError, ShapeError
from fa_inductor.kernels import reference
from fa_inductor.patterns import packed as packed_pattern
from helpers import compile_reference
from poison import poisoned

B, S, H, D = 2, 6, 4, 8
attend = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_pattern, "WORTH_FROM", 0)


def _bs3hd(p: Tensor) -> Tensor:
    q, k, v = p.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v, is_causal=True)


def _chunks(p: Tensor) -> Tensor:
    q, k, v = (part.view(B, S, H, D).transpose(1, 2) for part in p.chunk(3, -1))
    return attend(q, k, v)


def _bsh3d(p: Tensor) -> Tensor:
    p = p.view(B, S, H, 3, D)
    q, k, v = (p[:, :, :, i].transpose(1, 2) for i in range(3))
    return attend(q, k, v, scale=0.3)


def _sb3hd(p: Tensor) -> Tensor:
    q, k, v = p.view(S, B, 3, H, D).permute(2, 1, 3, 0, 4).unbind(0)
    return attend(q, k, v)


def _grouped(p: Tensor) -> Tensor:
    q, k, v = p.view(B, S, 3 * H, D).split([H + 4, H // 2, H // 2], 2)
    return attend(*(part.transpose(1, 2) for part in (q, k, v)), enable_gqa=True)


def _also_used_elsewhere(p: Tensor) -> Tensor:
    q, k, v = p.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v) + v * p.sum()


FOUND = (_bs3hd, _chunks, _bsh3d, _sb3hd, _grouped, _also_used_elsewhere)


def _changed_query(p: Tensor) -> Tensor:
    q, k, v = p.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q * 2, k, v)


def _in_another_order(p: Tensor) -> Tensor:
    k, q, v = p.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v)


def _one_twice(p: Tensor) -> Tensor:
    q, k, _ = p.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, k)


def _detached(p: Tensor) -> Tensor:
    q, k, v = p.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k.detach(), v)


def _overlapping(p: Tensor) -> Tensor:
    size, stride = (B, H, S, D), (S * 3 * H * D, D, 3 * H * D, 1)
    q, k, v = (p.as_strided(size, stride, 16 * i) for i in range(3))
    return attend(q, k, v)


def _with_a_gap(p: Tensor) -> Tensor:
    q, k, v = p.view(B, S, 3, H, D)[:, :, :, :2].permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v)


_MASK = torch.rand(S, S, generator=torch.Generator().manual_seed(0)) > 0.3


def _masked(p: Tensor) -> Tensor:
    q, k, v = p.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return attend(q, k, v, _MASK)


def _copied(p: Tensor) -> Tensor:
    q, k, v = p.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).contiguous().unbind(0)
    return attend(q, k, v + 0)


LEFT = (
    *(_changed_query, _in_another_order, _one_twice, _detached, _overlapping, _with_a_gap),
    *(_masked, _copied),
)


def _compiled(fn: Callable[..., Any], ops: list[str]) -> Callable[..., Any]:
    """`fn` through the pass and AOTAutograd; `ops` gets the names of ours in the graph."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        compile_pass.run(gm, Config(kernels=("reference",), on_fallback="ignore"))
        names = (str(node.target) for node in gm.graph.nodes)
        ops.extend(name.split(".")[1] for name in names if name.startswith("fa_inductor."))
        return aot_eager(gm, inputs)

    return torch.compile(fn, backend=backend, fullgraph=True)


def _projected(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: fn(x @ w)


def _inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, S, 16), torch.randn(16, 3 * H * D) / 4


@pytest.mark.parametrize("fn", FOUND, ids=lambda fn: fn.__name__)
def test_views_that_fill_a_projection(fn: Callable[[Tensor], Tensor]) -> None:
    ops: list[str] = []
    compare_with_eager(_projected(fn), _compiled(_projected(fn), ops), _inputs())
    assert ops == ["attention_packed"]


@pytest.mark.parametrize("fn", LEFT, ids=lambda fn: fn.__name__)
def test_what_does_not_fill_one_is_an_attention_of_three(fn: Callable[[Tensor], Tensor]) -> None:
    ops: list[str] = []
    compare_with_eager(_projected(fn), _compiled(_projected(fn), ops), _inputs())
    assert ops[-1] == ("attention_masked" if fn is _masked else "attention")
    assert "attention_packed" not in ops


def test_a_small_projection_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_pattern, "WORTH_FROM", B * S * 3 * H * D + 1)
    ops: list[str] = []
    compare_with_eager(_projected(_bs3hd), _compiled(_projected(_bs3hd), ops), _inputs())
    assert ops == ["attention"]


def test_without_gradients_there_is_nothing_to_gain() -> None:
    ops: list[str] = []
    with torch.no_grad():
        _compiled(_projected(_bs3hd), ops)(*_inputs())
    assert ops == ["attention_inference"]


def test_through_inductor() -> None:
    compare_with_eager(_projected(_bs3hd), compile_reference(_projected(_bs3hd)), _inputs())


def test_the_kernel_writes_into_the_packed_gradient() -> None:
    """Its three gradients are one tensor's memory, and nothing puts them together afterwards."""
    seen: list[int] = []
    backward = reference.backward

    def noting(problem: Any, inputs: Any, out: Any, lse: Any, *rest: Any) -> None:
        backward(problem, inputs, out, lse, *rest)
        seen.extend(grad.untyped_storage().data_ptr() for grad in rest[-1][:3])

    packed = torch.randn(B, S, 3 * H * D, requires_grad=True)
    with mock.patch.object(reference, "backward", noting):
        _compiled(_bs3hd, [])(packed).sum().backward()
    assert len(seen) == 3
    assert len(set(seen)) == 1


VIEWS = [[B, H, S, D, S * 3 * H * D, D, 3 * H * D, 1, i * H * D] for i in range(3)]
ARGUMENTS = (None, "top_left", "BSHD", True, "reference")


def test_opcheck() -> None:
    packed = torch.randn(B, S, 3, H, D, requires_grad=True)
    with poisoned():
        torch.library.opcheck(packed_ops.attention_packed, (packed, *VIEWS, *ARGUMENTS))


def test_gradients_of_lse_too() -> None:
    packed = torch.randn(B, S, 3, H, D, dtype=torch.float64, requires_grad=True)

    def both(packed: Tensor) -> tuple[Tensor, Tensor]:
        return packed_ops.attention_packed(packed, *VIEWS, *ARGUMENTS)

    torch.autograd.gradcheck(both, packed)


def test_what_is_not_filled_or_not_contiguous_is_refused() -> None:
    packed = torch.randn(B, S, 3, H, D)
    with pytest.raises(ShapeError, match="has 1152 elements"):
        packed_ops.attention_packed(packed, *VIEWS[:2], [1] * 9, *ARGUMENTS)
    with pytest.raises(ShapeError, match="packed must be contiguous"):
        packed_ops.attention_packed(packed.transpose(0, 1), *VIEWS, *ARGUMENTS)


def test_tangents_are_refused_below_autograd_too() -> None:
    """What a compiled graph does with a dual tensor: the views would lose its tangent."""
    packed = torch.randn(B, S, 3, H, D)
    out, lse = packed_ops.attention_packed(packed, *VIEWS, *ARGUMENTS)
    saved = (out, None, packed, out, lse, *VIEWS, None, "top_left", True, "reference")
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(packed, torch.ones_like(packed))
        with pytest.raises(DerivativeError, match=r"fa_inductor\.attention_packed"):
            packed_ops.attention_packed_forward(dual, *VIEWS, *ARGUMENTS)
        dual = forward_ad.make_dual(out, torch.ones_like(out))
        with pytest.raises(DerivativeError, match=r"attention_packed_backward"):
            packed_ops.attention_packed_gradients(dual, *saved[1:])
