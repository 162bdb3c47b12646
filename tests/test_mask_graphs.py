"""Masks by where they come from: layouts, graphs, autocast, checkpoints, shared by layers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from comparison import TOLERANCE, compare_forward, compare_with_eager, run_poisoned
from fa_inductor import compile_pass
from fa_inductor.config import Config
from fa_inductor.kernels import reference
from helpers import compile_quick, compile_reference, kernels_of, relative_error, run_reported
from poison import poisoned

BOTH_ROUTES = pytest.mark.parametrize("compiler", [compile_quick, compile_reference])
QUICK_KINDS_AND_INDUCTOR = pytest.mark.parametrize(
    ("compiler", "boolean"),
    [(compile_quick, False), (compile_quick, True), (compile_reference, False)],
    ids=["quick-float", "quick-bool", "inductor-float"],
)
KINDS = pytest.mark.parametrize("boolean", [False, True], ids=["float", "bool"])
attend = F.scaled_dot_product_attention


def randn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, dtype=dtype)


def mask_of(*size: int, boolean: bool) -> Tensor:
    return torch.rand(size) > 0.3 if boolean else torch.randn(size)


# --- Memory layouts -----------------------------------------------------------------------------


def strided_masks(queries: int, boolean: bool) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """(2, 8, Sq, 64) masks, and the size in which each is handed to the op: what is only repeated
    in memory is not made larger, but for the keys."""

    def mask(*size: int) -> Tensor:
        return mask_of(*size, boolean=boolean)

    size = (2, 8, queries, 64)
    yield mask(2, 1, queries, 1).expand(size), (2, 1, queries, 64)
    yield mask(2, 8, 64, queries).mT, size
    yield mask(*size), size
    yield mask(2, 8, queries, 128)[..., ::2], size
    yield mask(1, 1, 1, 64).expand(size), (1, 1, 1, 64)
    yield mask(2, 1, 1, 64), (2, 1, 1, 64)
    yield mask(queries, 64), (1, 1, queries, 64)


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Output and gradients of float inputs; unlike a clone, these inputs keep all their strides."""
    ours = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    out = run(*ours)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    wanted = [tensor for tensor in ours if tensor.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, weight)]


@torch._dynamo.config.patch(recompile_limit=32)  # each layout of an input is a graph
@pytest.mark.parametrize(
    ("compiler", "boolean", "query_lengths", "step"),
    [
        (compile_quick, False, (64, 1), 1),
        (compile_quick, True, (64, 1), 1),
        (compile_reference, False, (64,), 2),  # Inductor takes seconds for each
    ],
    ids=["quick-float", "quick-bool", "inductor-float"],
)
def test_one_function_takes_masks_of_any_strides(
    compiler: Callable[..., Any], boolean: bool, query_lengths: tuple[int, ...], step: int
) -> None:
    """No layout is refused, whichever was seen first, and at one query neither. Of a mask that is
    repeated in memory and differentiated, each element has its own gradient (ST-10)."""
    compiled = compiler(lambda *inputs: attend(*inputs))
    for queries in query_lengths:
        for mask, _ in itertools.islice(strided_masks(queries, boolean), 0, None, step):
            inputs = (randn(2, 8, queries, 16), randn(2, 8, 64, 16), randn(2, 8, 64, 16), mask)
            with poisoned():
                found, report = run_reported(with_gradients, compiled, *inputs)
            assert set(kernels_of(report)) <= {"reference"}
            torch.testing.assert_close(found, with_gradients(attend, *inputs), **TOLERANCE)


def biases_handed_over(fn: Callable[..., Any], *inputs: Tensor) -> list[tuple[int, ...]]:
    """The size of each attention op's bias in the graph that AOTAutograd hands on; () for one that
    reads a mask of the user's as it is."""
    sizes: list[tuple[int, ...]] = []

    def look(gm: fx.GraphModule, _: object) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            if "attention_masked" in str(node.target):
                assert [each.op for each in node.args[4]] == ["placeholder"], "no mask as it is"
                sizes.append(())
            elif "fa_inductor.attention" in str(node.target):
                names = [argument.name for argument in node.target._schema.arguments]
                given = dict(zip(names, node.args, strict=False))
                sizes.append(tuple(given["bias"].meta["val"].shape))
        return gm.forward

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        compile_pass.run(gm, Config(kernels=("reference",)))
        return aot_autograd(fw_compiler=look)(gm, example_inputs)

    torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    return sizes


@KINDS
def test_a_mask_is_made_no_larger_than_it_is(boolean: bool) -> None:
    """A copy has at most the mask's own broadcast size (ST-10)."""
    q = randn(2, 8, 64, 16)
    for mask, size in strided_masks(64, boolean):
        torch._dynamo.reset()
        assert biases_handed_over(lambda *x: attend(*x), q, q, q, mask) == [() if boolean else size]


class SingleToken(nn.Module):
    """BERT's attention, (B, 1, 24) of 2 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        batch = x.shape[0]
        q, k, v = (
            project(x).view(batch, 1, 2, 12).permute(0, 2, 1, 3)
            for project in (self.q, self.k, self.v)
        )
        return q, k, v, attend(q, k, v, mask, dropout_p=0.0)


@pytest.mark.parametrize(
    ("batch", "compiler"), [(1, compile_quick), (3, compile_quick), (3, compile_reference)]
)
def test_a_single_token_with_a_mask(batch: int, compiler: Callable[..., Any]) -> None:
    """The softmax of one score is 1: out = v, dq = dk = 0, dv = dout (ST-11)."""
    model, x = SingleToken(), randn(batch, 1, 24)
    with poisoned():
        (_, _, v, out), report = run_reported(compiler(model), x, torch.zeros(batch, 1, 1, 1))
        torch.testing.assert_close(out, v)
        weight = torch.randn_like(out)
        out.backward(weight)
    assert kernels_of(report) == ["reference"]
    for project in (model.q, model.k):
        zero = torch.zeros_like(project.weight)
        torch.testing.assert_close(project.weight.grad, zero, **TOLERANCE)
    torch.testing.assert_close(model.v.bias.grad, weight.sum((0, 2)).flatten())


# --- Where masks come from ----------------------------------------------------------------------


def from_input(x: Tensor, mask: Tensor) -> Tensor:
    return attend(x, x, x, mask)


def from_padding(x: Tensor, mask: Tensor) -> Tensor:
    """As Hugging Face's models do it: causal, and which keys are padding, as bool."""
    i = torch.arange(x.shape[2])
    allowed = (i[:, None] >= i)[None, None] & mask[:, :, :1]
    return attend(x, x, x, attn_mask=allowed)


def from_positions(x: Tensor, mask: Tensor) -> Tensor:
    """A bias that is learned or computed, here ALiBi's (arXiv:2108.12409) beside padding."""
    i = torch.arange(x.shape[2])
    slope = 2.0 ** -torch.arange(1.0, x.shape[1] + 1)[:, None, None]
    bias = -slope * (i[:, None] - i).abs()
    return attend(x, x, x, bias.masked_fill(~mask[:, :, :1], float("-inf")))


@BOTH_ROUTES
@pytest.mark.parametrize("fn", [from_input, from_padding, from_positions])
def test_masks_from_anywhere(fn: Callable[..., Tensor], compiler: Callable[..., Any]) -> None:
    """A graph's input, or built in the graph from one."""
    mask = torch.rand(2, 1, 6, 6) > 0.3
    mask[..., 0] = True
    outcome = compare_with_eager(fn, compiler(fn), (randn(2, 3, 6, 8), mask))
    assert kernels_of(outcome.report) == ["reference"]
    assert outcome.kernel_calls == 1


@pytest.mark.parametrize("fn", [from_input, from_padding, from_positions])
def test_one_graph_for_all_lengths(fn: Callable[..., Tensor]) -> None:
    compiled, graphs = compile_quick(fn), []
    for length in (6, 9, 64, 128):
        x, mask = randn(2, 3, length, 8), torch.rand(2, 1, length, length) > 0.3
        mask[..., 0] = True
        torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.mark_dynamic(mask, [2, 3])
        with torch.no_grad():
            out, outcome = run_poisoned(compiled, (x, mask))
            torch.testing.assert_close(out, fn(x, mask), **TOLERANCE)
        assert outcome.kernel_calls == 1
        graphs.append(len(outcome.report.graphs))
    assert graphs == [1, 0, 0, 0]


def two_layers(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The second layer has other sizes of heads and values, and the same mask."""
    x = attend(x, x, x, mask)
    return attend(x, y, y[..., :4], mask)


@QUICK_KINDS_AND_INDUCTOR
def test_layers_that_share_a_mask(compiler: Callable[..., Any], boolean: bool) -> None:
    mask = mask_of(2, 1, 6, 6, boolean=boolean)
    inputs = (randn(2, 4, 6, 8), randn(2, 4, 6, 8), mask)
    outcome = compare_with_eager(two_layers, compiler(two_layers), inputs)
    assert kernels_of(outcome.report) == ["reference"] * 2


def test_a_mask_that_is_written_to_afterwards() -> None:
    """Each layer sees what the mask was when it ran."""

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        first = attend(x, x, x, mask)
        mask[..., 2:] = float("-inf")
        return first + 2 * attend(x, x, x, mask)

    outcome = compare_with_eager(fn, compile_quick(fn), (randn(2, 4, 6, 8), randn(6, 6)))
    assert kernels_of(outcome.report) == ["reference"] * 2


# --- Checkpoints and autocast -------------------------------------------------------------------


class Blocks(nn.Module):
    """Attention layers that get the mask as an operand, each in a checkpoint of its own."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.checkpointed = checkpointed

    def block(self, index: int, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv[index](x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + attend(q, k, v, mask).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for index in range(2):
            if self.checkpointed:
                x = checkpoint(self.block, index, x, mask, use_reentrant=False)
            else:
                x = self.block(index, x, mask)
        return x


@QUICK_KINDS_AND_INDUCTOR
def test_checkpointed_blocks_with_a_mask(compiler: Callable[..., Any], boolean: bool) -> None:
    """The mask is an operand of the checkpoint's sub-graph, and has its gradient through it."""
    model = Blocks(checkpointed=True)
    mask = mask_of(2, 1, 6, 6, boolean=boolean)
    inputs = (randn(2, 6, 16), mask)
    outcome = compare_with_eager(model, compiler(model), inputs, [*model.parameters()])
    assert kernels_of(outcome.report) == ["reference"] * 2


@pytest.mark.parametrize("kind", ["bool", "float32", "bfloat16"])
def test_masks_under_autocast(kind: str) -> None:
    """The error stays eager's. The mask is cast as PyTorch casts it; beside a query that is in
    bfloat16 already, a float32 one is a fallback by name."""
    mask = torch.where(torch.rand(2, 1, 6, 6) > 0.3, 0.0, -1e4) + randn(2, 1, 6, 6)
    masks = {"bool": mask > -1e3, "float32": mask, "bfloat16": mask.bfloat16()}
    model = Blocks(checkpointed=False)
    exact, x = copy.deepcopy(model).double(), randn(2, 6, 16)
    given = masks[kind]

    def step(run: Any, module: nn.Module, x: Tensor, mask: Tensor) -> list[Tensor]:
        out = run(x, mask)
        return [out.detach(), *torch.autograd.grad(out.sum(), [*module.parameters()])]

    truth = step(exact, exact, x.double(), given if kind == "bool" else given.double())
    with poisoned(), torch.autocast("cpu", torch.bfloat16):
        eager = step(model, model, x, given)
        ours, report = run_reported(step, compile_quick(model), model, x, given)
    assert kernels_of(report) == [None if kind == "float32" else "reference"] * 2
    if kind == "float32":
        assert "beside a bfloat16 query" in report.sites[0].reason_texts[0]
    for got, theirs, true in zip(ours, eager, truth, strict=True):
        assert got.dtype == theirs.dtype
        assert relative_error(got, true) <= 1.2 * relative_error(theirs, true) + 2.0**-9


def test_a_float32_mask_beside_a_float32_query_under_autocast() -> None:
    """Both are cast; the mask's gradient comes back in its own dtype."""

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, k, v, mask).float()

    inputs = (*(randn(2, 4, 6, 8) for _ in range(3)), randn(2, 1, 6, 6))
    tolerance = {"rtol": 2e-2, "atol": 2e-2}
    for compare in (compare_with_eager, compare_forward):
        torch._dynamo.reset()
        with mock.patch.object(reference, "forward", wraps=reference.forward) as kernel:
            compare(fn, compile_quick(fn), inputs, tolerance=tolerance)
        ((_, given, *_),) = [call.args for call in kernel.call_args_list]
        assert {given.q.dtype, given.bias.dtype} == {torch.bfloat16}


# --- nn.MultiheadAttention ------------------------------------------------------------------------


def hidden_or_float(hidden: Tensor, kind: str) -> Tensor:
    """True in a bool mask of this module is hidden, -inf in a float one."""
    return hidden if kind == "bool" else randn(*hidden.shape).masked_fill(hidden, float("-inf"))


# PyTorch warns of masks of two dtypes, and so breaks the graph in code that Dynamo skips.
MODULE_MASKS = [(None, "bool"), (None, "float"), ("bool", None), ("bool", "bool"), ("float", None)]
MODULE_MASKS += [("float", "float"), ("each head", None), ("each head", "float")]


@pytest.mark.parametrize(("attention", "padding"), MODULE_MASKS)
def test_the_masks_of_pytorch_s_module(attention: str | None, padding: str | None) -> None:
    """Alone and both, as in eager; also rows of the lowest number, which are the values' mean and
    reach the kernel as such."""
    module = nn.MultiheadAttention(16, 2, batch_first=True)
    masks: dict[str, Tensor] = {}
    if padding is not None:
        hidden = torch.zeros(3, 6, dtype=torch.bool)
        hidden[1, 4:] = True
        masks["key_padding_mask"] = hidden_or_float(hidden, padding)
    if attention is not None:
        hidden = (torch.rand(6, 6, 6) if attention == "each head" else torch.rand(6, 6)) > 0.6
        hidden[..., 0] = False
        masks["attn_mask"] = hidden_or_float(hidden, attention)

    def fn(x: Tensor) -> Tensor:
        return module(x, x, x, need_weights=False, **masks)[0]

    x = randn(3, 6, 16)
    outcome = compare_with_eager(fn, compile_quick(fn), [x], [*module.parameters()])
    assert kernels_of(outcome.report) == ["reference"]
    if attention not in ("float", "each head"):
        return
    masks["attn_mask"][..., 1, :] = torch.finfo(torch.float32).min
    torch._dynamo.reset()
    with mock.patch.object(reference, "forward", wraps=reference.forward) as kernel:
        compare_forward(fn, compile_quick(fn), [x])
    ((_, given, *_),) = [call.args for call in kernel.call_args_list]
    assert given.q[:, :, 1].eq(0).all()
    assert given.bias.amax(-1)[..., 1].eq(0).all()
