"""The masked ops on the reference kernel: right, checked, differentiable, and of fixed layouts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from masked_cases import CASES, CAUSAL_PADDING, DENSE, PADDING, Case
from torch import Tensor
from torch.library import opcheck

from fa_inductor import mask_text, masked_ops
from fa_inductor.errors import DerivativeError, DtypeError, FaInductorError, ShapeError
from fa_inductor.kernels import fa4_masked
from fa_inductor.mask_blocks import mask_blocks
from fa_inductor.masked_problem import QUERY_BLOCK, key_block
from poison import poisoned

DOUBLE = [dataclasses.replace(case, dtype=torch.float64) for case in CASES]


def called(case: Case, read: list[Tensor], blocks: list[Tensor], *tensors: Tensor) -> Tensor:
    q, k, v, *sink = tensors
    numbers = (case.dims[0] ** -0.5, "BSHD", False, "reference")
    call = masked_ops.attention_masked
    return call(q, k, v, case.text, read, blocks, *numbers, *(sink or [None]), case.softcap)[0]


def by_definition(case: Case, read: list[Tensor], *tensors: Tensor) -> Tensor:
    q, k, v, *sink = tensors
    k, v = (each.repeat_interleave(case.heads[0] // case.heads[1], 1) for each in (k, v))
    scores = q @ k.mT * case.dims[0] ** -0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    seen = mask_text.rendered(case.text, read, case.shape, "cpu")
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink:
        column = sink[0].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return weights @ v


@pytest.mark.parametrize("case", DOUBLE, ids=str)
def test_as_defined(case: Case) -> None:
    """Forward and gradients, with the blocks that are listed and no others."""
    read = case.read()
    *tensors, grad_out = case.inputs()
    if case.sink:
        tensors.append(torch.randn(case.heads[0], dtype=torch.float64))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    wanted = by_definition(case, read, *leaves)
    wanted_grads = torch.autograd.grad(wanted, leaves, grad_out)
    with poisoned():
        out = called(case, read, case.blocks(read), *leaves)
        grads = torch.autograd.grad(out, leaves, grad_out)
    for ours, theirs in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


SMALL = Case(CAUSAL_PADDING, (2, 1), (150, 150), (8, 8), batch=2, dtype=torch.float64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_opcheck(dynamic: bool) -> None:
    case = SMALL
    read = case.read()
    q, k, v, _ = (tensor.requires_grad_() for tensor in case.inputs())
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    arguments = (q, k, v, case.text, read, case.blocks(read), 0.3, "BSHD", False, "reference")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    more = ("test_aot_dispatch_dynamic",) if dynamic else ("test_aot_dispatch_static",)
    opcheck(masked_ops.attention_masked, (*arguments, sink, 3.0), test_utils=(*checks, *more))
    count = torch.randint(0, 9, (2, 1, 3, 2), dtype=torch.int32)
    for by_key in (False, True):
        opcheck(mask_blocks, (count, 8, by_key), test_utils=(*checks, *more))


def test_lists_of_blocks() -> None:
    count = torch.tensor([[[[0, 7, 8, 1], [8, 8, 0, 0]]]], dtype=torch.int32)
    partial_count, partial, whole_count, whole = mask_blocks(count, 8, False)
    assert partial_count.tolist() == [[[2, 0]]]
    assert whole_count.tolist() == [[[1, 2]]]
    assert partial[0, 0, 0, :2].tolist() == [1, 3]
    assert whole[0, 0, 0, :1].tolist() == [2]
    assert whole[0, 0, 1, :2].tolist() == [0, 1]
    partial_count, partial, whole_count, whole = mask_blocks(count, 8, True)
    assert partial_count.tolist() == [[[0, 1, 0, 1]]]
    assert whole_count.tolist() == [[[1, 1, 1, 0]]]
    assert partial[0, 0, 3, :1].tolist() == [0]
    assert all(each.is_contiguous() for each in (partial_count, partial, whole_count, whole))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lists_say_what_the_mask_shows(case: Case) -> None:
    """Every block of the dense mask, looked at by itself: in one list if it shows all of a whole
    block, in the other if it shows anything else, in rising order."""
    read = case.read()
    blocks, tiles = case.blocks(read), (QUERY_BLOCK, key_block(case.dims[0]))
    seen = mask_text.rendered(case.text, read, case.shape, "cpu")
    rows = [part.split(tiles[1], 3) for part in seen.split(tiles[0], 2)]
    for given, lines in ((blocks[:4], rows), (blocks[4:], list(zip(*rows, strict=True)))):
        counts_and_lists = [each.expand(*case.shape[:2], *each.shape[2:]) for each in given]
        for b, h, line in itertools.product(*map(range, counts_and_lists[0].shape)):
            shown = [int(part[b, h].sum()) for part in lines[line]]
            whole = [n for n, each in enumerate(shown) if each == tiles[0] * tiles[1]]
            partial = [n for n, each in enumerate(shown) if each and n not in whole]
            own = [each[b, h, line] for each in counts_and_lists]
            assert own[1][: own[0]].tolist() == partial
            assert own[3][: own[2]].tolist() == whole


BROKEN = {
    "unknown name": ({"text": "(x <= i)"}, ShapeError, "x"),
    "a call": ({"text": "(print(j) == i)"}, ShapeError, "print"),
    "too few tensors": ({"read": []}, ShapeError, "reads 1 tensors, got 0"),
    "rank": ({"read": [torch.ones(150)]}, DtypeError, "float32"),
    "too few indices": ({"read": [torch.ones(150, dtype=torch.bool)]}, ShapeError, "2 indices"),
    "blocks of another mask": ({"lengths": (150, 300)}, ShapeError, "128 queries and 128 keys"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refused(name: str) -> None:
    changed, error, text = BROKEN[name]
    read, blocks = SMALL.read(), SMALL.blocks(SMALL.read())
    case = dataclasses.replace(SMALL, **{k: v for k, v in changed.items() if k != "read"})
    with pytest.raises(error, match=text) as caught:
        called(case, changed.get("read", read), blocks, *case.inputs()[:3])
    assert isinstance(caught.value, FaInductorError)


def test_a_backward_needs_the_blocks_by_key() -> None:
    read = SMALL.read()
    tensors = [tensor.requires_grad_() for tensor in SMALL.inputs()[:3]]
    out = called(SMALL, read, SMALL.blocks(read)[:4], *tensors)
    with pytest.raises(ShapeError, match="by key"):
        out.sum().backward()


def test_second_derivatives_are_refused_by_name() -> None:
    read = SMALL.read()
    tensors = [tensor.requires_grad_() for tensor in SMALL.inputs()[:3]]
    out = called(SMALL, read, SMALL.blocks(read), *tensors)
    (grad,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(DerivativeError, match="attention_masked_backward"):
        grad.sum().backward()


def test_nothing_to_attend_to() -> None:
    for lengths in ((0, 150), (150, 0)):
        case = dataclasses.replace(SMALL, text=PADDING, lengths=lengths)
        tensors = [tensor.requires_grad_() for tensor in case.inputs()[:3]]
        shape = (1, 1, -(-lengths[0] // 128), -(-lengths[1] // 128))
        count = torch.zeros(shape, dtype=torch.int32)
        made = [mask_blocks(count, 1, by_key) for by_key in (False, True)]
        blocks = [tensor for each in made for tensor in each]
        read = [torch.ones(2, lengths[1], dtype=torch.bool)]
        with poisoned():
            out = called(case, read, blocks, *tensors)
            out.sum().backward()
        assert torch.equal(out, torch.zeros_like(out))
        assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in tensors)


def test_the_source_that_fa4_is_given() -> None:
    """Without short cuts, and with every read inside of its tensor."""
    source = fa4_masked.mask_source("((not (j <= i)) or (t0[b, j - 5] != 0)) and (t1[i] == h)")
    assert "and" not in source.replace("cutlass.and", "")
    assert "cutlass.max(cutlass.min(j - 5, tensors[0].shape[1] - 1), 0)" in source
    assert "tensors[1][cutlass.min(i, tensors[1].shape[0] - 1)]" in source
    assert "cutlass.Boolean(j <= i) == False" in source


def test_dense_masks_are_read_as_they_lie() -> None:
    """Any strides, broadcast ones too."""
    case = dataclasses.replace(SMALL, text=DENSE)
    dense = (torch.rand(2, 1, 150, 150) < 0.5).mT
    tensors = case.inputs()[:3]
    wanted = by_definition(case, [dense], *tensors)
    torch.testing.assert_close(called(case, [dense], case.blocks([dense]), *tensors), wanted)
