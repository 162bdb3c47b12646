"""FA4 behind the op for variable lengths: what it is given, and launches repeated for others.

CPU functions stand in for FA4's entries. What they compute comes from the lengths' values at the
time of the launch, as on a GPU, so that a launch repeated with stale lengths would show.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from sequence_oracle import packed
from torch import Tensor

from fa_inductor import call_cache, op_calls, repairs, torch_compat, varlen_calls, varlen_ops
from fa_inductor.kernels import fa4, fa4_varlen, reference_varlen
from fa_inductor.kernels.variants import MASKED, VARLEN, VariantKernels
from fa_inductor.problem import Gradients, Problem
from fa_inductor.varlen_problem import VarlenCall, VarlenInputs
from helpers import clone_inputs
from poison import poisoned


class SinkTensors(NamedTuple):
    """FA4 hands these over as one argument."""

    lse: Tensor
    sink: Tensor
    grad_sink: Tensor


class FA4:
    """`flash_attn.cute.interface`, as far as `fa4_varlen` uses it."""

    BIN_BATCH_SEARCH_THRESH = 256

    def __init__(self) -> None:
        self.entered: list[dict[str, Any]] = []
        for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
            entry = getattr(self, name)
            setattr(self, name, Entry(entry))
        self._bwd_preprocess = Entry(None)
        self._bwd_postprocess_convert = Entry(None)

    def _flash_attn_fwd(self, cache: Any, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> None:
        self.entered.append(given)
        cache["fwd"] = self.forward
        tensors = [given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "learnable_sink")]
        cache["fwd"](q, k, v, *tensors, given["out"], given["lse"], _problem(given))

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        *lengths, sink, out, lse, problem = rest
        reference_varlen.forward(problem, VarlenInputs(q, k, v, *lengths, sink), out, lse)

    def _flash_attn_bwd(self, cache: Any, *tensors: Tensor, **given: Any) -> Any:
        self.entered.append(given)
        q, k, v, out, grad_out, lse = tensors
        sink, grads = given["learnable_sink"], [given[name] for name in ("dq", "dk", "dv")]
        stats = torch.empty(lse.shape)  # the preprocess kernel writes it
        sums = torch.zeros(k.shape)  # the main kernel adds to it
        before, after = self._bwd_preprocess.compile_cache, self._bwd_postprocess_convert
        before["pre"] = lambda out, lse, stats: stats.copy_(lse)
        before["pre"](out, lse, stats)
        cache["bwd"] = self.backward
        lengths = [given["cu_seqlens_q"], given["cu_seqlens_k"]]
        saved = [out, stats, grad_out, given["dlse"]]
        grad_sink = None if sink is None else torch.empty_like(sink)
        last = None if sink is None else SinkTensors(lse, sink, grad_sink)
        cache["bwd"](q, k, v, *lengths, *saved, grads[0], sums, grads[2], last, _problem(given))
        after.compile_cache["post"] = lambda sums, grad: grad.copy_(sums)
        after.compile_cache["post"](sums, grads[1])
        return (*grads, grad_sink)

    @staticmethod
    def backward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        *lengths, out, lse, grad_out, grad_lse, grad_q, sums, grad_v, last, problem = rest
        sink, grad_sink = (None, None) if last is None else (last.sink, last.grad_sink)
        grad_k = torch.empty_like(sums)
        grads = Gradients(grad_q, grad_k, grad_v, sink=grad_sink)
        inputs = VarlenInputs(q, k, v, *lengths, sink)
        reference_varlen.backward(problem, inputs, out, lse, grad_out, grad_lse, grads)
        sums += grad_k


class Entry:
    """A function with a `compile_cache`, through which it launches."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compile_cache: dict[str, Any] = {}

    def __call__(self, *tensors: Tensor, **given: Any) -> Any:
        return self.function(self.compile_cache, *tensors, **given)


def _problem(given: dict[str, Any]) -> Problem:
    return Problem(
        given["softmax_scale"],
        "bottom_right" if given["causal"] else "none",
        given["window_size_left"],
        given["window_size_right"],
        given["softcap"],
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FA4]:
    """The op's kernel "fa4" on CPU tensors."""
    interface = FA4()
    monkeypatch.setattr(fa4, "_interface", lambda: interface)
    monkeypatch.setattr(fa4_varlen, "check", lambda problem, inputs: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch_compat, "empty_on_current_gpu", _empty)
    monkeypatch.setattr(op_calls, "calls", call_cache.Calls())
    return interface


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    made = torch.empty_strided(size, stride, dtype=dtype)
    return made.fill_(float("nan"))


def lengths(*starts: int) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


# float32 tensors whose strides are multiples of 16 bytes, as FA4 wants them.
def qkv(grad: bool = True) -> list[Tensor]:
    shapes = ((12, 4, 8), (12, 2, 8), (12, 2, 16))
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def check(
    leaves: list[Tensor],
    starts_q: Tensor,
    starts_k: Tensor,
    bounds: tuple[int, int] = (12, 12),
    **numbers: Any,
) -> None:
    """Values and gradients, of a loss over out and lse, against the oracle."""
    q, k, v, *sink = leaves
    exact = clone_inputs(*leaves, dtype=torch.float64)
    starts = (starts_q.tolist(), starts_k.tolist())
    wanted, wanted_lse = packed(*exact[:3], *starts, *exact[3:], causal=True, **numbers)
    extras = (*(sink or [None]), numbers.get("window_left"), None, numbers.get("softcap", 0.0))
    with poisoned():
        out, lse = varlen_ops.attention_varlen(
            *(q, k, v, starts_q, starts_k, *bounds, numbers.get("scale")),
            *("bottom_right", True, "fa4", *extras),
        )
        seen = ~torch.isneginf(wanted_lse)
        loss = out.square().sum() + lse[seen].square().sum()
        wanted_grads = [t for t in leaves if t.requires_grad]
        grads = torch.autograd.grad(loss, wanted_grads)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-6)
    loss = wanted.square().sum() + wanted_lse[seen].square().sum()
    leaf = [e for e, t in zip(exact, leaves, strict=True) if t.requires_grad]
    for ours, theirs in zip(grads, torch.autograd.grad(loss, leaf), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_what_fa4_is_given(fake: FA4) -> None:
    """Each argument by its name; a bound that is not known and no window are None."""
    q, k, v = qkv()
    starts = lengths(0, 5, 12)
    rest = (starts, starts.clone(), 0, 9, 0.3, "bottom_right", True, "fa4")
    sink = torch.randn(4)
    out, lse = varlen_ops.attention_varlen(q, k, v, *rest, sink, 4, None, 2.0)
    (out.sum() + lse.sum()).backward()
    forward, backward = fake.entered
    shared = {"softmax_scale": 0.3, "causal": True, "softcap": 2.0}
    shared |= {"window_size_left": 4, "window_size_right": None}
    shared |= {"max_seqlen_q": None, "max_seqlen_k": 9}
    for given in (forward, backward):
        assert {name: given[name] for name in shared} == shared
        assert given["cu_seqlens_q"] is starts
        assert given["cu_seqlens_k"] is rest[1]
        assert given["learnable_sink"].data_ptr() == sink.data_ptr()
    assert backward["deterministic"] is True
    assert backward["dlse"] is not None


@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("shared", [False, True], ids=["two tensors", "one tensor"])
def test_launches_are_repeated_for_other_lengths(fake: FA4, shared: bool, with_sink: bool) -> None:
    """Equal shapes, other values: the second call and all later ones are right."""
    every = [(0, 5, 12), (0, 12, 12), (0, 0, 12), (0, 11, 12)]
    for count, values in enumerate(every):
        leaves = qkv()
        if with_sink:
            leaves.append(torch.randn(4, requires_grad=True))
        starts_q = lengths(*values)
        starts_k = starts_q if shared else lengths(0, 12 - values[1], 12)
        check(leaves, starts_q, starts_k, window_left=3, softcap=2.0)
        assert (len(fake.entered), op_calls.calls.repeated) == (2, 2 * count)


def test_a_sink_without_a_gradient_and_with_one(fake: FA4) -> None:
    """The forward is the same, the backward is not."""
    for repeated, grad in ((0, False), (2, False), (3, True), (5, True), (7, False)):
        sink = torch.randn(4, requires_grad=grad)
        check([*qkv(), sink], lengths(0, 5, 12), lengths(0, 7, 12))
        assert op_calls.calls.repeated == repeated


@pytest.mark.parametrize("again", [lambda x: x, lambda x: x[:]], ids=["itself", "a view of it"])
def test_one_tensor_of_lengths_is_not_taken_for_two(fake: FA4, again: Any) -> None:
    """Noted with one memory in both places, the launch must not be repeated for two."""
    starts = lengths(0, 5, 12)
    check(qkv(), starts, again(starts))
    check(qkv(), lengths(0, 5, 12), lengths(0, 8, 12))
    check(qkv(), starts, again(starts))
    check(qkv(), lengths(0, 3, 12), lengths(0, 2, 12))
    assert (len(fake.entered), op_calls.calls.repeated) == (4, 4)


@pytest.mark.parametrize(
    "change",
    [{"bounds": (12, 7)}, {"scale": 0.3}, {"window_left": 2}, {"softcap": 3.0}],
    ids=lambda change: next(iter(change)),
)
def test_other_numbers_take_the_entry(fake: FA4, change: dict[str, Any]) -> None:
    starts = (lengths(0, 5, 12), lengths(0, 7, 12))
    for _ in range(2):
        check(qkv(), *starts)
        check(qkv(), *starts, **change)
    assert (len(fake.entered), op_calls.calls.repeated) == (4, 4)


def test_many_sequences_always_take_the_entry(fake: FA4) -> None:
    """FA4 then sums up their tiles in one more kernel, which is not noted."""
    fake.BIN_BATCH_SEARCH_THRESH = 1
    for _ in range(2):
        check(qkv(), lengths(0, 5, 12), lengths(0, 7, 12))
    assert (len(fake.entered), op_calls.calls.repeated) == (4, 0)


@pytest.mark.parametrize(
    ("totals", "starts"),
    [((0, 3), ((0, 0), (0, 3))), ((3, 0), ((0, 3), (0, 0))), ((3, 3), ((0,), (0,)))],
    ids=["no query", "no key", "no sequence"],
)
def test_nothing_to_attend_to_never_reaches_fa4(
    fake: FA4, totals: tuple[int, int], starts: tuple[tuple[int, ...], ...]
) -> None:
    shapes = ((totals[0], 4, 8), (totals[1], 2, 8), (totals[1], 2, 16))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    rest = (*(lengths(*each) for each in starts), 3, 3, None, "none", False, "fa4")
    with poisoned():
        out, lse = varlen_ops.attention_varlen(*leaves, *rest)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert fake.entered == []
    assert (out == 0).all()
    assert torch.isneginf(lse).all()
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sink"])
def test_a_pointer_that_is_not_aligned_is_copied(fake: FA4, name: str) -> None:
    names = ("q", "k", "v", "sink", "cu_seqlens_q", "cu_seqlens_k")
    for shifted in (False, True, False):
        leaves = [*qkv(), torch.randn(4, requires_grad=True)]
        tensors = [*leaves, lengths(0, 5, 12), lengths(0, 7, 12)]
        before = repairs.counts.get(_DENSE_NAMES.get(name, name), 0)
        if shifted:
            place = names.index(name)
            tensors[place] = _shifted(tensors[place])
        check(tensors[:4], *tensors[4:])
        copies = repairs.counts.get(_DENSE_NAMES.get(name, name), 0) - before
        assert copies == (2 if shifted else 0)  # forward and backward
    # The copies are of a class that is known.
    assert (len(fake.entered), op_calls.calls.repeated) == (2, 4)


_DENSE_NAMES = {"cu_seqlens_q": "seqlens_q", "cu_seqlens_k": "seqlens_k"}


def _shifted(tensor: Tensor) -> Tensor:
    """The same values one element past an aligned pointer."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    flat.copy_(tensor.detach())
    return flat.requires_grad_(tensor.requires_grad)


VIEWS = {
    "innermost stride": lambda: torch.randn(12, 8, 2).transpose(1, 2),
    "odd row": lambda: torch.randn(12, 2, 9)[..., :8],
    "odd token": lambda: torch.randn(12, 17)[:, :16].unflatten(1, (2, 8)),
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_strides_that_fa4_would_copy(make: Any) -> None:
    k = make()
    call = VarlenCall(*qkv()[:1], k, torch.randn(12, 2, 16), *_lengths(), 12, 12, *_PLAIN)
    readable = varlen_calls._readable(call)
    assert readable.k is not k
    assert readable.k.is_contiguous()
    assert torch.equal(readable.k, k)
    assert readable.q.data_ptr() == call.q.data_ptr()
    assert readable[5:11] == call[5:11]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(12, 3, 2, 8)[:, 1],
        lambda: torch.randn(2, 12, 8).transpose(0, 1),
        lambda: torch.randn(12, 1, 8).expand(12, 2, 8),
        lambda: torch.randn(24, 2, 8)[::2],
    ],
    ids=["packed", "heads first", "expanded", "every second"],
)
def test_views_that_fa4_reads_as_they_are(make: Any) -> None:
    call = VarlenCall(*qkv()[:1], make(), torch.randn(12, 2, 16), *_lengths(), 12, 12, *_PLAIN)
    assert varlen_calls._readable(call) is call


def test_gradients_of_other_layouts_are_copied() -> None:
    out, lse = torch.randn(12, 4, 16), torch.randn(4, 12)
    ones = torch.ones(()).expand(12, 4, 16)
    saved = varlen_calls._readable_saved((out, lse, ones, lse.mT.contiguous().mT), "fa4")
    assert (saved[0].data_ptr(), saved[1]) == (out.data_ptr(), lse)
    assert saved[2].stride(2) == 1
    assert torch.equal(saved[2], ones)
    assert saved[3] is not None
    assert saved[3].is_contiguous()
    aligned = (out, lse, torch.randn(12, 4, 16), None)
    assert varlen_calls._readable_saved(aligned, "fa4") is aligned
    assert varlen_calls._readable_saved((out, lse, ones, None), "reference")[2] is ones


_PLAIN = (None, "none", False, "fa4")


def _lengths() -> tuple[Tensor, Tensor]:
    return lengths(0, 5, 12), lengths(0, 7, 12)


@pytest.mark.parametrize("kernels", [VARLEN, MASKED], ids=lambda kernels: kernels.takes)
def test_each_kernel_has_its_module(kernels: VariantKernels) -> None:
    for name in kernels.modules:
        module = kernels.load(name)
        assert all(callable(getattr(module, part)) for part in ("check", "forward", "backward"))
