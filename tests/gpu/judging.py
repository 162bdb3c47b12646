"""One attention call of the ops on one kernel, judged against float64.

The yardstick is the same attention in plain PyTorch of the same dtype: a kernel may be at most
twice as far from float64 as that. It is called on memory full of NaN, and twice, as the second
call of the same metadata takes another way through the op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from allocator import poison
from torch import Tensor

from fa_inductor import ops
from fa_inductor.problem import Inputs, Problem
from fa_inductor.spec import AttentionSpec, TensorSpec, default_scale

# Bounds on the relative error in the norm. bf16 rounds to 2^-9, fp16 to 2^-12; scores, weights,
# output and their gradients are each rounded once, and peaked softmaxes amplify it.
BOUNDS = {
    torch.bfloat16: {"out": 1.5e-2, "lse": 1e-3, "grad": 4e-2},
    torch.float16: {"out": 3e-3, "lse": 1e-3, "grad": 8e-3},
}
# For rows whose softmax sees logits of 100 and more: one rounding of a score moves a weight.
PEAKED = 4.0
FLOOR = 1e-5  # of the largest absolute value: float32 sums in another order
# Of the products that cancel in a gradient: of them float32 keeps 24 bits.
NOISE = 2.0**-21
FEW = 64  # fewer elements than this are judged by the norm alone


@dataclass(frozen=True)
class Call:
    """One call of `ops.attention`, and of its gradient when `grad_out` is given.

    bias_grad, sink_grad: whether those are differentiated. peaked: whether logits are huge.
    """

    problem: Problem
    inputs: Inputs
    out_order: str = "BSHD"
    grad_out: Tensor | None = None
    bias_grad: bool = False
    with_lse: bool = True
    peaked: bool = False

    @property
    def sink_grad(self) -> bool:
        return self.inputs.sink is not None

    def spec(self) -> AttentionSpec:
        inputs, problem = self.inputs, self.problem
        bias = inputs.bias
        return AttentionSpec(
            *(TensorSpec.of(tensor) for tensor in inputs[:3]),
            inputs.q.dtype,
            causal=problem.causal,
            scale=problem.scale,
            mask=None if bias is None else f"attn_mask {tuple(bias.shape)}",
            bias=None if bias is None else TensorSpec.of(bias),
            bias_needs_grad=self.bias_grad,
            dropout_p=problem.dropout_p,
            window=(problem.window_left, problem.window_right),
            softcap=problem.softcap,
            has_sink=inputs.sink is not None,
            has_seqlens=inputs.seqlens_q is not None or inputs.seqlens_k is not None,
            needs_grad=self.grad_out is not None,
            deterministic=problem.deterministic,
        )

    def forward(self, kernel: str) -> tuple[Tensor, Tensor]:
        problem = self.problem
        with torch.no_grad():
            return ops.attention(
                *self.inputs[:3],
                problem.scale,
                problem.causal,
                self.out_order,
                problem.deterministic,
                kernel,
                *self.inputs[3:],
                *self._numbers,
                self.with_lse,
            )

    def backward(self, kernel: str, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
        """Gradients by name."""
        problem, extras = self.problem, (*self.inputs[3:], *self._numbers)
        saved = (self.grad_out, None, *self.inputs[:3], out, lse, problem.scale, problem.causal)
        saved += (problem.deterministic, kernel)
        wanted = (self.bias_grad, self.sink_grad)
        with torch.no_grad():
            if any(wanted):
                made = ops.attention_backward_all(*saved, *wanted, *extras)
            else:
                made = ops.attention_backward(*saved, *extras)
        return {name: grad for name, grad in zip(self.wanted, made, strict=False) if grad.numel()}

    @property
    def wanted(self) -> tuple[str, ...]:
        return ("dq", "dk", "dv", "dbias", "dsink")

    @property
    def _numbers(self) -> tuple[Any, ...]:
        problem = self.problem
        bounds = (problem.window_left, problem.window_right)
        return (problem.dropout_p, *bounds, problem.softcap)


def problem_of(d: int, **fields: Any) -> Problem:
    """A `Problem` with the default scale."""
    return Problem(**{"scale": default_scale(d), **fields})


# --- The definition -------------------------------------------------------------------------------


def hidden(problem: Problem, inputs: Inputs) -> Tensor | None:
    """Which scores the band and the lengths mask, (B or 1, 1, Sq, Sk)."""
    left, right = problem.band
    lens = inputs.seqlens_q, inputs.seqlens_k
    if (left, right) == (None, None) and lens == (None, None):
        return None
    device = inputs.q.device
    sq, sk = inputs.q.shape[2], inputs.k.shape[2]
    i = torch.arange(sq, device=device).view(1, 1, -1, 1)
    j = torch.arange(sk, device=device).view(1, 1, 1, -1)
    rows = sq if lens[0] is None else lens[0].long().view(-1, 1, 1, 1)
    keys = sk if lens[1] is None else lens[1].long().view(-1, 1, 1, 1)
    diagonal = i if problem.is_top_left else i + (keys - rows)
    masked = (i >= rows) | (j >= keys)
    if left is not None:
        masked = masked | (j < diagonal - left)
    if right is not None:
        masked = masked | (j > diagonal + right)
    return masked


@dataclass(frozen=True)
class Attended:
    """logits, weights: of every key that is seen, and of the sink behind them where there is one;
    all are in the graph of autograd but lse."""

    out: Tensor
    lse: Tensor
    logits: Tensor
    weights: Tensor


def attend(problem: Problem, inputs: Inputs, exact: bool) -> Attended:
    """Attention by the definition: in float64, or as plain PyTorch does it in the inputs' dtype,
    with float32 for the softmax."""
    q, k, v = inputs[:3]
    narrow, wide = (torch.float64,) * 2 if exact else (q.dtype, torch.float32)
    groups = q.shape[1] // max(1, k.shape[1])
    k, v = (tensor.to(narrow).repeat_interleave(groups, 1) for tensor in (k, v))
    logits = (q.to(narrow) @ k.mT).to(wide) * problem.scale
    if problem.softcap:
        logits = torch.tanh(logits / problem.softcap) * problem.softcap
    if inputs.bias is not None:
        logits = logits + inputs.bias.to(wide)
    masked = hidden(problem, inputs)
    if masked is not None:
        logits = logits.masked_fill(masked, float("-inf"))
    if inputs.sink is not None:
        sink = inputs.sink.to(wide).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], -1)
    lse = logits.detach().logsumexp(-1)
    empty = torch.isneginf(lse)[..., None]
    logits = logits.masked_fill(empty, 0.0)
    weights = logits.softmax(-1).masked_fill(empty, 0.0)
    return Attended(weights[..., : k.shape[2]].to(narrow) @ v, lse, logits, weights)


def results(call: Call, exact: bool) -> dict[str, Tensor]:
    """out, lse and the gradients that the call wants, by the definition.

    With `exact` also "rounding dq" and so on: what rounding the output alone does to a gradient in
    which it stands (all kernels take the sum of out · grad_out from the rounded output).
    """
    dtype = call.inputs.q.dtype
    leaves = [
        tensor.detach().to(torch.float64 if exact else tensor.dtype)
        if tensor is not None and tensor.is_floating_point()
        else tensor
        for tensor in call.inputs
    ]
    wants = [True] * 3 + [call.bias_grad, call.sink_grad]
    named = dict(zip(call.wanted, leaves, strict=False))
    named = {name: named[name] for name, want in zip(call.wanted, wants, strict=True) if want}
    if call.grad_out is not None:
        for leaf in named.values():
            leaf.requires_grad_()
    made = attend(call.problem, Inputs(*leaves), exact)
    found = {"out": made.out.detach(), "lse": made.lse}
    if call.grad_out is None:
        return found
    grad_out = call.grad_out.to(made.out.dtype)
    wanted = list(named.values())
    if exact:
        shift = ((made.out.to(dtype) - made.out).detach() * grad_out).sum(-1, keepdim=True)
        rounding = torch.autograd.grad(
            made.logits, wanted, made.weights.detach() * shift, retain_graph=True, allow_unused=True
        )
        found.update(
            (f"rounding {name}", grad)
            for name, grad in zip(named, rounding, strict=True)
            if grad is not None
        )
    found.update(zip(named, torch.autograd.grad(made.out, wanted, grad_out), strict=True))
    return found


def sizes_of(call: Call) -> list[int]:
    """Bytes of what the op and FA4 are about to allocate."""
    q, _, v = call.inputs[:3]
    item = q.element_size()
    b, h, sq, d = q.shape
    rows = -(-sq // 128) * 128
    made = [b * h * sq * v.shape[3] * item, b * h * sq * 4]
    if call.grad_out is not None:
        made += [t.numel() * t.element_size() for t in call.inputs[:5] if t is not None]
        made += [b * h * rows * -(-d // 32) * 32 * 4, b * h * rows * 4]
    return made


# --- Judging --------------------------------------------------------------------------------------


@dataclass
class Measurements:
    """Numbers still on the device, fetched all at once."""

    names: list[tuple[str, str]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, tensor: str, what: str, value: Tensor) -> None:
        self.names.append((tensor, what))
        self.values.append(value.double())

    def fetch(self) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        numbers = torch.stack(self.values).tolist() if self.values else []
        for (tensor, what), number in zip(self.names, numbers, strict=True):
            found.setdefault(tensor, {})[what] = number
        return found


def measure(
    call: Call, made: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]
) -> dict[str, dict[str, float]]:
    numbers = Measurements()
    empty = torch.isneginf(exact["lse"])
    sinkless = call.inputs.sink is None
    reach = exact["dv"].norm() if "dv" in exact else exact["out"].norm()
    for name, tensor in made.items():
        assert (tensor.shape, tensor.dtype) == (plain[name].shape, plain[name].dtype), name
        if not tensor.numel():
            continue
        actual, wanted = tensor.double(), exact[name].double()
        finite = torch.isfinite(wanted)
        numbers.add(name, "lost", (finite & ~torch.isfinite(actual)).sum())
        error = (actual - wanted).masked_fill(~finite, 0.0)
        kept = wanted.masked_fill(~finite, 0.0)
        distance = (plain[name].double() - wanted).masked_fill(~finite, 0.0)
        numbers.add(name, "error", error.abs().max())
        numbers.add(name, "plain", distance.abs().max())
        rounding = exact.get(f"rounding {name}", torch.zeros_like(error))
        numbers.add(name, "rounding", rounding.abs().max())
        numbers.add(name, "largest", kept.abs().max())
        if name in ("dq", "dk", "dbias"):
            numbers.add(name, "noise", _noise(call, name))
        # With one key a gradient of q or k is zero but for the rounding of its terms.
        scale = kept.norm() if name in ("out", "lse") else torch.maximum(kept.norm(), 1e-3 * reach)
        excess = (error.norm() - 2.0 * rounding.norm()) / scale.clamp_min(1e-30)
        numbers.add(name, "relative", excess)
        if name == "lse":
            numbers.add(name, "not empty", (empty & ~torch.isneginf(actual)).sum())
        if name in ("out", "dq") and sinkless:
            rows = actual.masked_fill(~empty[..., None], 0.0)
            numbers.add(name, "not zero", (rows != 0).sum())
    return numbers.fetch()


def _noise(call: Call, name: str) -> Tensor:
    """How far float32 may be from a gradient that is nothing but what cancels."""
    assert call.grad_out is not None
    q, k, v = call.inputs[:3]
    if 0 in (q.numel(), k.numel(), v.numel()):
        return q.new_zeros(())
    of_weights = call.grad_out.double().norm(dim=-1).max() * v.double().norm(dim=-1).max()
    if name == "dbias":
        return NOISE * of_weights
    factor = (k if name == "dq" else q).double().abs().max()
    return NOISE * of_weights * factor * abs(call.problem.scale)


def objections(
    call: Call, numbers: dict[str, dict[str, float]], elements: dict[str, int]
) -> list[str]:
    """What is wrong, in words; empty when nothing is."""
    found = []
    factor = PEAKED if call.peaked else 1.0
    bounds = BOUNDS[call.inputs.q.dtype]
    for name, each in numbers.items():
        limit = 2.0 * (each["plain"] + each["rounding"])
        limit += max(FLOOR, FLOOR * each["largest"], each.get("noise", 0.0))
        bound = bounds.get(name, bounds["grad"]) * factor
        for what in ("lost", "not empty", "not zero"):
            if each.get(what, 0.0):
                found.append(f"{name}: {each[what]:.0f} elements {what}")
        if elements[name] >= FEW and not each["error"] <= limit:
            found.append(f"{name}: error {each['error']:.2e} > {limit:.2e}")
        if not each["relative"] <= bound:
            found.append(f"{name}: relative error {each['relative']:.2e} > {bound:.1e}")
    return found


def judge(call: Call, kernel: str, runs: int = 2) -> list[str]:
    """Run the call `runs` times on poisoned memory; what is wrong with the results."""
    exact, plain = results(call, exact=True), results(call, exact=False)
    found = []
    for number in range(runs):
        poison(sizes_of(call))
        out, lse = call.forward(kernel)
        made = {"out": out, "lse": lse} if call.with_lse else {"out": out}
        if call.grad_out is not None:
            poison(sizes_of(call))
            made.update(call.backward(kernel, out, lse))
        elements = {name: tensor.numel() for name, tensor in made.items()}
        wrong = objections(call, measure(call, made, exact, plain), elements)
        found += [f"run {number + 1}: {text}" for text in wrong]
    return found


def attempt(run: Callable[[], list[str]]) -> list[str]:
    """What is wrong with a run, an exception included."""
    try:
        return run()
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:300]}"]
