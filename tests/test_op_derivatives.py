"""Derivatives of the attention ops that are not there are refused, and autocast's rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_inputs import FLOATS, arguments, attend, dtype_id, leaves, lengths, qkv, rng
from torch import Tensor
from torch.autograd import forward_ad

from fa_inductor import ops
from fa_inductor.errors import DerivativeError, DtypeError
from poison import poisoned

# --- Derivatives --------------------------------------------------------------------------------

KEYS, VALUES = qkv()[1:]
OP = r"fa_inductor\.attention"


def square_of_attention(q: Tensor) -> Tensor:
    return ops.attention(q, KEYS, VALUES, *arguments())[0].square().sum()


def query_gradient(q: Tensor) -> Tensor:
    q = q.detach().requires_grad_()
    return torch.autograd.grad(square_of_attention(q), q, create_graph=True)[0]


def double_backward() -> Any:
    q = qkv()[0].requires_grad_()
    gradient = torch.autograd.grad(square_of_attention(q), q, create_graph=True)[0]
    gradient.square().sum().backward()
    return q.grad


def hessian_vector_product() -> Any:
    q = qkv()[0]
    return torch.autograd.functional.hvp(square_of_attention, q, torch.ones_like(q))


def forward_over_reverse() -> Any:
    """A tangent that reaches only the gradient op, through grad_out."""
    q, k, v = qkv()
    out, lse = ops.attention(q, k, v, *arguments())
    with forward_ad.dual_level():
        grad_out = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        return ops.attention_backward(
            grad_out, None, q, k, v, out, lse, None, "none", False, "reference"
        )


def forward_over_gradients(op: Any, name: str) -> Callable[[], Any]:
    """A tangent in one argument of a gradient op, above or below autograd."""

    def derive() -> Any:
        tensors = {**every_input(), "seqlens_k": lengths(6, 3), "rng": rng(0)}
        out, lse = attend(tensors)
        call = {**tensors, "out": out, "lse": lse}
        call.update(grad_out=torch.ones_like(out), grad_lse=torch.ones_like(lse))
        numbers = {"scale": None, "causal": "none", "deterministic": False, "kernel": "reference"}
        with forward_ad.dual_level():
            call[name] = forward_ad.make_dual(call[name], torch.ones_like(call[name]))
            return op(**call, **numbers, bias_grad=True, sink_grad=True)

    return derive


def every_input() -> dict[str, Tensor]:
    q, k, v = qkv()
    return {"q": q, "k": k, "v": v, "bias": torch.randn(2, 4, 5, 6), "sink": torch.randn(4)}


def forward_mode(name: str) -> Any:
    tensors = every_input()
    primal = tensors[name]
    return torch.func.jvp(
        lambda changed: attend({**tensors, name: changed})[0],
        (primal,),
        (torch.ones_like(primal),),
    )


def forward_mode_without_grad() -> Any:
    with torch.no_grad():
        return forward_mode("q")


def double_backward_of(name: str) -> Any:
    tensors = leaves(every_input())
    loss = attend(tensors)[0].square().sum()
    gradient = torch.autograd.grad(loss, tensors[name], create_graph=True)[0]
    gradient.square().sum().backward()
    return tensors[name].grad


UNSUPPORTED_DERIVATIVES: dict[str, Callable[[], Any]] = {
    "double backward": double_backward,
    "hessian-vector product": hessian_vector_product,
    "double backward of bias": lambda: double_backward_of("bias"),
    "double backward of sink": lambda: double_backward_of("sink"),
    **{f"jvp in {name}": lambda name=name: forward_mode(name) for name in every_input()},
    "jvp under no_grad": forward_mode_without_grad,
    "jacfwd": lambda: torch.func.jacfwd(square_of_attention)(qkv()[0]),
    "forward over reverse": forward_over_reverse,
    **{
        f"{name}'s tangent in {op._schema.name}": forward_over_gradients(op, name)
        for op in (ops.attention_backward_all, ops.attention_gradients_all)
        for name in ("grad_out", "grad_lse", "q", "bias", "sink", "out", "lse")
    },
}


@pytest.mark.parametrize(
    "derive", UNSUPPORTED_DERIVATIVES.values(), ids=UNSUPPORTED_DERIVATIVES.keys()
)
def test_missing_derivatives_are_refused_by_name(derive: Callable[[], Any]) -> None:
    """Second and forward-mode derivatives raise and name the op, never give zeros (EX-03)."""
    with pytest.raises(DerivativeError, match=OP):
        derive()


FUNCTORCH_GRADIENTS: dict[str, Callable[[Tensor], Any]] = {
    "grad of grad": torch.func.grad(
        lambda q: torch.func.grad(square_of_attention)(q).square().sum()
    ),
    "hessian": torch.func.hessian(square_of_attention),
    "jvp of grad": lambda q: torch.func.jvp(torch.func.grad(square_of_attention), (q,), (q,)),
}


@pytest.mark.parametrize("derive", FUNCTORCH_GRADIENTS.values(), ids=FUNCTORCH_GRADIENTS.keys())
def test_functorch_second_derivatives_are_refused_by_name(derive: Callable[[Tensor], Any]) -> None:
    """The same through `torch.func`, whose gradients take another way to the op (EX-03)."""
    with pytest.raises(DerivativeError, match=OP):
        derive(qkv()[0])


def test_a_functorch_gradient_is_right_or_refused_by_name() -> None:
    """`torch.func.grad` of the op: PyTorch's value, or an error that says whose it is (EX-03)."""
    q = qkv()[0]
    try:
        gradient = torch.func.grad(square_of_attention)(q)
    except DerivativeError:
        return
    torch.testing.assert_close(gradient, query_gradient(q))


def test_vmap_of_the_op_is_a_loop_over_it() -> None:
    """Without a batching rule PyTorch calls the op once for each sample (EX-02)."""
    q = torch.stack([qkv()[0] for _ in range(3)])
    with poisoned():
        mapped = torch.func.vmap(square_of_attention)(q)
        looped = torch.stack([square_of_attention(sample) for sample in q])
    torch.testing.assert_close(mapped, looped)


def test_a_tangent_elsewhere_does_not_disturb_the_op() -> None:
    """Forward mode over other tensors is none of the op's business (EX-03)."""
    q = qkv()[0]
    with poisoned():
        expected = query_gradient(q)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.ones(3), torch.ones(3))
            torch.testing.assert_close(query_gradient(q), expected)


# --- Autocast -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=["to bf16", "to fp16"])
def test_autocast_follows_the_rule_of_sdpa(dtype: torch.dtype, autocast: torch.dtype) -> None:
    """Same output dtype as PyTorch's attention; gradients keep their input's dtype (DT-01)."""
    q, k, v = (tensor.requires_grad_() for tensor in qkv(dtype=dtype))
    with torch.autocast("cpu", autocast):
        expected = F.scaled_dot_product_attention(q, k, v)
        out, lse = ops.attention(q, k, v, *arguments())
    assert out.dtype == expected.dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert [grad.dtype for grad in grads] == [dtype] * 3


@pytest.mark.parametrize("bias_dtype", FLOATS, ids=dtype_id)
def test_autocast_casts_the_bias_and_leaves_the_rest(bias_dtype: torch.dtype) -> None:
    """As it does sdpa's mask, but not a float64 one; each gradient keeps its input's dtype."""
    bias = torch.randn(2, 4, 5, 6).to(bias_dtype)
    tensors = leaves({**every_input(), "bias": bias})
    numbers = {"window_left": 3, "softcap": 2.0}
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(tensors, **numbers)
    cast = {name: tensors[name].detach().bfloat16() for name in "qkv"}
    rounded = bias if bias_dtype == torch.float64 else bias.bfloat16()
    expected, _ = attend({**cast, "bias": rounded, "sink": tensors["sink"].detach()}, **numbers)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    grads = torch.autograd.grad(out.sum() + lse.sum(), tuple(tensors.values()))
    assert [grad.dtype for grad in grads] == [tensor.dtype for tensor in tensors.values()]


def test_autocast_unites_mixed_dtypes_and_takes_keywords() -> None:
    """fp32 q and k with bf16 v meet in autocast's dtype, and are refused outside (DT-01)."""
    q, k, v = qkv()
    names = ("scale", "causal", "out_order", "deterministic", "kernel")
    keywords = dict(zip(names, arguments(), strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = ops.attention(q=q, k=k, v=v.bfloat16(), **keywords)
        with torch.autocast("cpu", enabled=False), pytest.raises(DtypeError):
            ops.attention(q, k, v.bfloat16(), *arguments())
    expected, _ = ops.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), *arguments())
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
