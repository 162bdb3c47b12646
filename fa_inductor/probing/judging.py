"""One cell: run it on poisoned memory, and say what is wrong with it, the plainest cause first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import call_cache
from ..errors import FallbackError
from .cells import Cell, Outcome
from .data import Drawn, Sizes, draw
from .launches import Graphs, Launched, launches
from .oracle import Attention, Sampled, sample
from .poison import FINITE, NAN, Poison, deterministically_filled, poisoned
from .subjects import Subject
from .ways import NEED_GPU, Run, prepare

# Of the sampled rows against float64. bfloat16 rounds to 2^-9: the scores' operands are exact,
# weights and output are rounded once each; gradients go through four such roundings.
TOLERANCES = {
    torch.bfloat16: (1e-2, 4e-2),
    torch.float16: (2e-3, 8e-3),
    torch.float32: (1e-4, 1e-4),
}
# How far two runs may be apart where a kernel adds up in any order.
_MOVED = 0.5
# How much nearer to the answer of an earlier call a wrong output has to be, to be that answer.
_STALE = 20.0
# What an attention may raise is what its cell has to say.
_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


@dataclass(frozen=True)
class Setting:
    """Where cells run: sizes, dtype, device."""

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def judge(subject: Subject, cell: Cell, setting: Setting) -> Outcome:
    """Run the cell: once to compile, then on other inputs, with two different poisons, and again.

    An exception of the subject's is a verdict, "error", with its text.
    """
    start = time.perf_counter()
    blank = Outcome(cell, subject.name, "not applicable")
    if reason := _not_applicable(subject, cell, setting):
        return replace(blank, detail=reason)
    torch._dynamo.reset()
    call_cache.forget()  # a cell is to be what the first call of a process would be
    # On a GPU PyTorch's deterministic mode would choose other kernels.
    with poisoned(deterministic_fill=not setting.on_gpu) as poison:
        graphs = Graphs()
        run = prepare(subject, cell.way, cell.passes == "fwd+bwd", graphs)
        try:
            outcome = _judged(subject, cell, setting, run, graphs, poison)
        except _FAILURES as error:
            detail = f"{type(error).__name__}: {str(error)[:400]}"
            inner = getattr(error, "inner_exception", error)
            if isinstance(inner, FallbackError):  # a limit that the support table names
                outcome = replace(blank, detail=str(inner))
            elif graphs.faults:  # the plainer cause of whatever was raised
                outcome = replace(blank, verdict="layout", detail=graphs.faults[0])
            else:
                outcome = replace(blank, verdict="error", detail=detail)
    return replace(outcome, seconds=time.perf_counter() - start)


def _not_applicable(subject: Subject, cell: Cell, setting: Setting) -> str | None:
    if cell.way in NEED_GPU and not setting.on_gpu:
        return f"{cell.way} needs a GPU"
    if cell.data == "masked rows":
        if not subject.takes_kept or (cell.way == "eager" and subject.eager is not None):
            return "what is called takes no padding"
        if subject.scores_limit is not None and cell.length > subject.scores_limit:
            return f"a mask of {cell.length} x {cell.length} elements"
    return None


def _judged(
    subject: Subject, cell: Cell, setting: Setting, run: Run, graphs: Graphs, poison: Poison
) -> Outcome:
    # One graph is to serve all lengths where the length is a symbol.
    first = cell.length // 2 + 3 if cell.way == "dynamic" else cell.length
    before, drawn = (
        draw(cell.data, length, setting.sizes, setting.device, setting.dtype, seed)
        for seed, length in ((1, first), (2, cell.length))
    )
    run(before)
    compiled = graphs.count
    with launches(graphs.opaque, setting.on_gpu) as launched, poison.refilled(NAN):
        made = run(drawn)
    with poison.refilled(FINITE):
        other = run(drawn)
    with poison.refilled(NAN):
        again = run(drawn)
    right = _oracle(subject, setting, drawn, cell)
    errors = dict(_errors(right, made))
    outcome = Outcome(
        cell,
        subject.name,
        "ok",
        errors=tuple(errors.items()),
        kernels=tuple(launched.kernels),
        launched=len(launched.kernels),
        expected=None if cell.way == "eager" else graphs.attentions,
        repeatable=all(torch.equal(a, b) for a, b in zip(made, again, strict=True)),
        recompiles=graphs.count - compiled,
        syncs=launched.syncs,
    )
    # The allocator hands blocks on within a run: only the ops' own filling reaches all of them.
    unset = (lambda: _unset(run, drawn)) if setting.on_gpu else None
    runs = (made, other, again)
    faults = _faults(subject, cell, setting, graphs, launched, runs, before, errors, unset)
    verdict, detail = next(faults, ("ok", ""))
    return replace(outcome, verdict=verdict, detail=detail)


def _unset(run: Run, drawn: Drawn) -> float:
    """The share of the output that stays NaN where `torch.empty` is filled with it; 0 where it
    cannot be had so, as not every kernel is deterministic."""
    try:
        with deterministically_filled():
            out = run(drawn)[0]
    except _FAILURES:
        return 0.0
    return float(out.isnan().double().mean())


def _faults(
    subject: Subject,
    cell: Cell,
    setting: Setting,
    graphs: Graphs,
    launched: Launched,
    runs: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
    before: Drawn,
    errors: dict[str, float],
    unset: Callable[[], float] | None,
) -> Iterator[tuple[str, str]]:
    """(verdict, detail) of all that is wrong."""
    made, other, again = runs
    names = ("out", "dq", "dk", "dv")[: len(made)]
    unwritten = {
        name: float((a.isnan() & ~b.isnan()).double().mean())
        for name, a, b in zip(names, made, other, strict=True)
    }
    worst = max(unwritten, key=lambda name: unwritten[name])
    if cell.way != "eager" and not graphs.attentions and not graphs.written_out:
        calls = ", ".join(dict.fromkeys(graphs.nodes)) or "nothing"
        yield (
            "unlaunched",
            f"the captured graph holds no attention: it calls {calls}; {unwritten['out']:.0%} of "
            "the output was never written",
        )
    if unwritten[worst]:
        if not launched.kernels:
            yield (
                "unlaunched",
                f"no attention kernel ran, {unwritten[worst]:.0%} of {worst} is unset",
            )
        yield "unwritten", f"{unwritten[worst]:.2%} of {worst} was never written"
    for name, tensor in zip(names, made, strict=True):
        if not (finite := tensor.isfinite()).all():
            yield "NaN", f"{float((~finite).double().mean()):.2%} of {name} is not finite"
    if graphs.faults:
        yield "layout", graphs.faults[0]
    forward, backward = TOLERANCES[setting.dtype]
    wrong = {
        name: error
        for name, error in errors.items()
        if not error <= (forward if name == "out" else backward)
    }
    if wrong and unset is not None and (share := unset()):
        yield "unwritten", f"{share:.2%} of out was never written"
    if wrong and before.tensors[0].shape == made[0].shape:
        stale = dict(_errors(_oracle(subject, setting, before, cell), made))
        if all(_STALE * stale[name] <= wrong[name] for name in wrong):
            yield "stale", f"{', '.join(wrong)} belong to the inputs of an earlier call"
    if wrong:
        name = max(wrong, key=lambda each: wrong[each])
        yield "wrong", f"{name} is wrong by {wrong[name]:.1e}"
    for name, a, b in zip(names, made, again, strict=True):
        apart = float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-30))
        if not apart <= _MOVED * (forward if name == "out" else backward):
            yield "moved", f"{name} moved by {apart:.1e} between two runs"
    if cell.way != "eager" and len(launched.kernels) < graphs.attentions:
        yield "fewer", f"{len(launched.kernels)} launched, {graphs.attentions} in the graph"
    calls_one = graphs.attentions if cell.way != "eager" else subject.eager is not None
    if setting.on_gpu and calls_one and not launched.kernels:
        yield "unlaunched", "no attention kernel was seen by the profiler"


def _oracle(subject: Subject, setting: Setting, drawn: Drawn, cell: Cell) -> Sampled:
    scale = setting.sizes.scale if subject.scale is None else subject.scale
    kept = drawn.kept if subject.takes_kept else None
    grad = drawn.grad_out if cell.passes == "fwd+bwd" else None
    return sample(Attention(scale, subject.causal, kept), drawn.tensors, grad)


def _errors(right: Sampled, made: Sequence[Tensor]) -> Iterator[tuple[str, float]]:
    """Relative error by tensor, of the worst sampled row: its distance by its own norm, by a row's
    usual norm, or by what rounding alone makes of a sum that cancels, whichever is largest."""
    for name, ours, theirs in right.pairs(made):
        distance = (ours.double() - theirs).norm(dim=-1)
        norm = theirs.norm(dim=-1)
        if name in right.noise:
            norm = torch.maximum(norm, right.noise[name])
        size = torch.maximum(norm, norm.square().mean().sqrt()).clamp_min(1e-30)
        yield name, float((distance / size).nan_to_num(nan=float("inf")).max())
