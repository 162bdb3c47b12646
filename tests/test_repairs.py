"""Copies of what FA4 and cuDNN cannot read: when, of what, and that the plan knew of them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest
import torch
from attention_inputs import in_order, qkv
from torch import Tensor

from fa_inductor import layout, ops, repairs
from fa_inductor.errors import DeviceError, ShapeError
from fa_inductor.problem import Inputs
from fa_inductor.spec import AttentionSpec, TensorSpec

HALF = torch.bfloat16
NAMES = ("q", "k", "v", "bias")

all_kernels = pytest.mark.parametrize("kernel", layout.ALIGNED_KERNELS)


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The copies of one test."""
    fresh: dict[str, int] = {}
    monkeypatch.setattr(repairs, "counts", fresh)
    repairs._log_once.cache_clear()
    return fresh


def misaligned(tensor: Tensor) -> Tensor:
    """The same values in the same order, one element past an aligned pointer."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return memory.copy_(tensor)


def inputs(**changed: Tensor | None) -> Inputs:
    """What both kernels read as it is, with some of it replaced."""
    return Inputs(*qkv(dtype=HALF))._replace(**changed)


def bhsd(heads: int = 4, length: int = 6, d: int = 8) -> Tensor:
    return in_order((2, heads, length, d), (0, 2, 1), HALF)


def readable(given: Inputs, kernel: str) -> Inputs:
    """With all values unchanged, and nothing left to copy."""
    found = repairs.readable_inputs(given, kernel)
    for name, ours, theirs in zip(Inputs._fields, found, given, strict=True):
        if theirs is None or name == "bias":
            continue
        assert ours.shape == theirs.shape, name
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    if given.bias is not None:
        torch.testing.assert_close(found.bias, given.bias.expand_as(found.bias), rtol=0, atol=0)
    assert repairs.readable_inputs(found, kernel) is found
    return found


# --- q, k and v -----------------------------------------------------------------------------------

COPIED: dict[str, Callable[[], Tensor]] = {
    "pointer": lambda: misaligned(bhsd()),
    "innermost stride 2": lambda: bhsd(d=16)[..., ::2],
    "innermost stride 0": lambda: bhsd(d=1).expand(-1, -1, -1, 8),
    "D outermost": lambda: torch.randn(8, 2, 4, 6).to(HALF).permute(1, 2, 3, 0),
    "strides of 12 elements": lambda: bhsd(d=12)[..., :8],
    "strides of 4 elements": lambda: bhsd(d=4)[:, :3],
    "(B, H, S, D) of D 4": lambda: torch.randn(2, 4, 6, 4).to(HALF),
    "expanded heads of a misaligned tensor": lambda: misaligned(bhsd(1)).expand(-1, 4, -1, -1),
    "expanded batch of D 12": lambda: bhsd(d=12)[:1, ..., :8].expand(2, -1, -1, -1),
    "expanded heads of D 4": lambda: bhsd(1, d=4).expand(-1, 4, -1, -1),
}
NOT_COPIED: dict[str, Callable[[], Tensor]] = {
    "contiguous (B, S, H, D)": bhsd,
    "contiguous (B, S, H, D) of D 4": lambda: bhsd(d=4),
    "contiguous (B, H, S, D)": lambda: torch.randn(2, 4, 6, 8).to(HALF),
    "packed": lambda: torch.randn(2, 6, 3, 4, 8).to(HALF).permute(2, 0, 3, 1, 4)[1],
    "every second token": lambda: bhsd(length=12)[:, :, ::2],
    "expanded heads": lambda: bhsd(1).expand(-1, 4, -1, -1),
    "expanded batch": lambda: bhsd()[:1].expand(2, -1, -1, -1),
    "B=1 with a stride of 3331333": lambda: bhsd().as_strided((1, 4, 6, 8), (3331333, 8, 32, 1)),
    "S=1 with a stride of 3": lambda: bhsd().as_strided((2, 4, 1, 8), (192, 8, 3, 1)),
    "D=1 with a stride of 3331333": lambda: torch.zeros(1024, dtype=HALF).as_strided(
        (2, 4, 6, 1), (512, 8, 64, 3331333)
    ),
    "no element": lambda: bhsd(length=0)[..., ::2],
}


@all_kernels
@pytest.mark.parametrize("name", COPIED)
def test_what_is_copied(name: str, kernel: str, counts: dict[str, int]) -> None:
    """Each tensor by itself, into dense (B, S, H, D)."""
    for field in "qkv":
        counts.clear()
        tensor = COPIED[name]()
        copy = getattr(readable(inputs(**{field: tensor}), kernel), field)
        assert counts == {field: 1}
        assert copy.data_ptr() % layout.ALIGNMENT == 0
        assert layout.stride_reason(TensorSpec.of(copy), copy.element_size()) is None


@all_kernels
@pytest.mark.parametrize("name", NOT_COPIED)
def test_what_is_not_copied(name: str, kernel: str, counts: dict[str, int]) -> None:
    tensor = NOT_COPIED[name]()
    given = inputs(q=tensor, k=tensor, v=tensor)
    assert readable(given, kernel) is given
    assert counts == {}


@pytest.mark.parametrize("kernel", ["reference", "a plugin"])
def test_other_kernels_read_anything(kernel: str) -> None:
    given = inputs(q=misaligned(bhsd()), k=bhsd(d=16)[..., ::2])
    assert repairs.readable_inputs(given, kernel) is given
    saved = (given.q, misaligned(torch.randn(2, 4, 6)), given.k, None)
    assert repairs.readable_saved(saved, kernel) is saved


@all_kernels
def test_what_is_expanded_stays_expanded(kernel: str) -> None:
    """Copied once, not once for each head or batch."""
    heads = misaligned(bhsd(1)).expand(-1, 4, -1, -1)
    batch = bhsd(d=12)[:1, ..., :8].expand(2, -1, -1, -1)
    found = readable(inputs(k=heads, v=batch), kernel)
    assert found.k.stride() == (48, 0, 8, 1)
    assert found.v.stride() == (0, 8, 32, 1)
    assert found.k.untyped_storage().nbytes() == heads[:, :1].nbytes


@all_kernels
def test_an_op_call_with_expanded_short_rows_says_what_is_wrong(kernel: str) -> None:
    """Such rows cannot be aligned while expanded: the copy is whole, and made once."""
    q, k, v = qkv(hkv=1, d=4, dv=4, dtype=HALF)
    k, v = (tensor.expand(-1, 4, -1, -1) for tensor in (k, v))
    with pytest.raises((DeviceError, ShapeError), match=r"CUDA|head dim"):
        ops.attention(q, k, v, None, "none", "BSHD", False, kernel)


# --- Bias and small tensors -----------------------------------------------------------------------

COPIED_BIASES: dict[str, Callable[[], Tensor]] = {
    "pointer": lambda: misaligned(torch.randn(2, 4, 5, 6)),
    "broadcast over keys": lambda: torch.randn(2, 4, 5, 1),
    "expanded over keys": lambda: torch.randn(2, 4, 5, 1).expand(-1, -1, -1, 6),
    "transposed": lambda: torch.randn(2, 4, 6, 5).mT,
    "expanded heads, transposed": lambda: torch.randn(2, 1, 6, 5).mT.expand(-1, 4, -1, -1),
    "one number": lambda: torch.randn(1, 1, 1, 1),
}
READ_BIASES: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: torch.randn(2, 4, 5, 6),
    "of odd strides": lambda: torch.randn(2, 4, 5, 7)[..., :6],
    "broadcast over all but keys": lambda: torch.randn(1, 1, 1, 6),
    "expanded": lambda: torch.randn(1, 1, 1, 6).expand(2, 4, 5, 6),
}


@all_kernels
@pytest.mark.parametrize("name", COPIED_BIASES)
def test_biases_that_are_copied(name: str, kernel: str, counts: dict[str, int]) -> None:
    """Whole along the keys, otherwise of the bias's own size and still expanded."""
    bias = COPIED_BIASES[name]()
    copy = readable(inputs(bias=bias), kernel).bias
    assert counts == {"bias": 1}
    assert copy.shape == (*bias.shape[:3], 6)
    assert copy.stride()[3] == 1
    for dim in range(3):
        assert (copy.stride(dim) == 0) == (bias.stride(dim) == 0 and bias.shape[dim] > 1)


@all_kernels
@pytest.mark.parametrize("name", READ_BIASES)
def test_biases_that_are_not_copied(name: str, kernel: str, counts: dict[str, int]) -> None:
    given = inputs(bias=READ_BIASES[name]())
    assert readable(given, kernel) is given
    assert counts == {}


@all_kernels
def test_one_key_needs_no_stride_along_the_keys(kernel: str) -> None:
    q, k, v = qkv(sk=1, dtype=HALF)
    given = Inputs(q, k, v, bias=torch.randn(2, 4, 5, 3)[..., :1])
    assert readable(given, kernel) is given


@all_kernels
def test_small_tensors(kernel: str, counts: dict[str, int]) -> None:
    """Contiguous and aligned, or copied."""
    lengths = torch.tensor([5, 5, 3, 3], dtype=torch.int32)
    fine = inputs(sink=torch.randn(4), seqlens_q=lengths[:2], rng=torch.tensor([1, 2]))
    assert readable(fine, kernel) is fine
    given = inputs(
        sink=torch.randn(8)[::2],
        seqlens_q=lengths[2:],
        seqlens_k=lengths[:1].expand(2),
        rng=torch.tensor([0, 1, 2])[1:],
    )
    found = readable(given, kernel)
    assert counts == dict.fromkeys(("sink", "seqlens_q", "seqlens_k", "rng"), 1)
    assert all(tensor.is_contiguous() for tensor in found[4:])
    assert all(tensor.data_ptr() % layout.ALIGNMENT == 0 for tensor in found[4:])


# --- What was saved for the backward --------------------------------------------------------------


@all_kernels
def test_saved_tensors(kernel: str, counts: dict[str, int]) -> None:
    """out and its gradient as q, k and v; lse and its gradient contiguous."""
    out, lse = bhsd(), torch.randn(2, 4, 6)
    for fine in ((out, lse, bhsd(), None), (out, lse, out.detach(), torch.randn(2, 4, 6))):
        assert repairs.readable_saved(fine, kernel) is fine
    assert counts == {}
    saved = (
        misaligned(out),
        torch.randn(2, 6, 4).transpose(1, 2),
        torch.ones((), dtype=HALF).expand(out.shape),  # the gradient of out.sum()
        torch.ones(()).expand(lse.shape),
    )
    found = repairs.readable_saved(saved, kernel)
    assert counts == dict.fromkeys(("out", "lse", "grad_out", "grad_lse"), 1)
    torch.testing.assert_close(found, saved, rtol=0, atol=0)
    assert all(tensor.data_ptr() % layout.ALIGNMENT == 0 for tensor in found)
    assert found[1].is_contiguous()
    assert found[3].is_contiguous()
    assert repairs.readable_saved(found, kernel) is found
    shifted = (out, misaligned(lse), out, misaligned(lse))
    repairs.readable_saved(shifted, kernel)
    assert counts == {"out": 1, "lse": 2, "grad_out": 1, "grad_lse": 2}


# --- Counted, logged and planned ------------------------------------------------------------------


def test_copies_are_counted_each_time_and_logged_once(
    counts: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    given = inputs(q=misaligned(bhsd()), bias=torch.randn(1, 1, 5, 1))
    with caplog.at_level(logging.INFO, "fa_inductor"):
        for _ in range(3):
            repairs.readable_inputs(given, "cudnn")
    assert counts == {"q": 3, "bias": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "q is copied on each call: pointer 2 bytes past a multiple of 16",
        "bias is copied on each call: innermost stride 0",
    ]


def random_layout(chance: random.Random, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Cut out of a larger tensor in any memory order, some dimensions expanded or stepped over."""
    order = list(range(4))
    if chance.random() < 0.7:
        order[:3] = chance.sample(order[:3], 3)
    else:
        chance.shuffle(order)
    expanded = [chance.random() < 0.15 for _ in size]
    step = [2 if chance.random() < 0.1 else 1 for _ in size]
    extra = [chance.choice((0, 0, 0, 1, 4, 8)) for _ in size]
    starts = [chance.randint(0, more) if chance.random() < 0.3 else 0 for more in extra]
    inner = [1 if wide else n for wide, n in zip(expanded, size, strict=True)]
    whole = [n * by + more for n, by, more in zip(inner, step, extra, strict=True)]
    tensor = torch.empty_permuted(whole, order, dtype=dtype).copy_(torch.randn(whole))
    for dim, (n, by, start) in enumerate(zip(inner, step, starts, strict=True)):
        tensor = tensor.narrow(dim, start, n * by)[(slice(None),) * dim + (slice(None, None, by),)]
    return tensor.expand(size)


def test_planned_copies_are_the_actual_ones(counts: dict[str, int]) -> None:
    """For fresh memory; and what was copied needs no other copy."""
    chance, copied = random.Random(0), dict.fromkeys(NAMES, 0)
    for _ in range(500):
        dtype = chance.choice((torch.float16, torch.bfloat16))
        b, hq, sq, sk, d = (chance.choice((1, 2, 3, 8)) for _ in range(5))
        hkv = chance.choice([n for n in (1, 2, 3, 8) if hq % n == 0])
        dims = (d, chance.choice((1, 4, 8, 16)))
        sizes = ((b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dims[1]))
        q, k, v = (random_layout(chance, size, dtype) for size in sizes)
        full = (b, hq, sq, sk)
        bias = random_layout(chance, tuple(chance.choice((1, n)) for n in full), dtype)
        specs = [TensorSpec.of(tensor) for tensor in (q, k, v)]
        spec = AttentionSpec(*specs, dtype, bias=TensorSpec.of(bias))
        kernel = chance.choice(layout.ALIGNED_KERNELS)
        counts.clear()
        readable(Inputs(q, k, v, bias if kernel == "cudnn" else None), kernel)
        assert set(layout.copies(spec, kernel)) == set(counts), spec.to_json()
        for name in counts:
            copied[name] += 1
    assert all(50 < number < 450 for number in copied.values()), copied


def test_an_aligned_view_of_an_odd_offset_is_judged_by_its_pointer() -> None:
    """At run time the pointer counts; what has no element has nothing to read."""
    memory = torch.empty(3 + 2 * 6 * 4 * 8, dtype=HALF)
    shift = (-memory.data_ptr() // 2) % 8
    assert shift == 0, "fresh memory is aligned"
    given = inputs(k=memory[3:].view(2, 6, 4, 8).transpose(1, 2))
    assert repairs.readable_inputs(given, "fa4").k is not given.k
    detached = torch.frombuffer(bytearray(memory.nbytes), dtype=HALF)
    aligned = detached[(-detached.data_ptr() // 2) % 8 :][: 2 * 5 * 4 * 8]
    given = inputs(q=aligned.view(2, 5, 4, 8).transpose(1, 2))
    assert repairs.readable_inputs(given, "fa4") is given
