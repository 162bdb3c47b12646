"""Every row of the support table bites, with the value, the limit and its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_specs import (
    AMPERE,
    BLACKWELL,
    BREAKS,
    GEFORCE,
    HOPPER,
    Break,
    bshd,
    planning,
    spec,
    target,
)
from torch import Tensor

from fa_inductor import doctor
from fa_inductor.support import ROWS, Row, reasons_against, rows_of


def objecting(case: Break) -> list[tuple[Row, str]]:
    """The rows that refuse the case, with their reasons."""
    problem, on = spec(**case.change), target(case.arch, **case.libraries)
    found = [(row, row.reason(problem, on)) for row in rows_of(case.kernel)]
    return [(row, reason) for row, reason in found if reason is not None]


@pytest.mark.parametrize("case", BREAKS, ids=str)
def test_a_row_bites(case: Break) -> None:
    """The reason names the value, the limit and its source, and is the table's only answer."""
    ((row, _),) = objecting(case)
    assert row.feature == case.wanted
    against = reasons_against(case.kernel, spec(**case.change), target(case.arch, **case.libraries))
    assert against == [f"{case.value} ({row.limit}; {row.source})"]


@pytest.fixture(scope="module")
def refused() -> list[Row]:
    return [row for case in BREAKS for row, _ in objecting(case)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kernel} {row.feature}: {row.limit}")
def test_every_row_is_shown_to_bite(row: Row, refused: list[Row]) -> None:
    """A new row of the table needs a case in `BREAKS`."""
    assert any(row is found for found in refused)
    assert row.limit
    assert row.source


@pytest.mark.parametrize("training", [False, True], ids=["fwd", "fwd+bwd"])
@pytest.mark.parametrize("arch", [HOPPER, "sm_103a", BLACKWELL, GEFORCE, AMPERE])
def test_a_plain_attention_has_nothing_against_it(arch: str, training: bool) -> None:
    """Every named GPU takes head_dim 64 and 128, except FA4's backward on sm_80."""
    for d, causal in ((64, "none"), (128, "top_left"), (128, "bottom_right")):
        problem = spec(d, hkv=2, causal=causal, needs_grad=training)
        against = reasons_against("fa4", problem, target(arch))
        assert bool(against) == (training and arch == AMPERE)
        assert reasons_against("cudnn", problem, target(arch)) == []
    assert reasons_against("reference", spec(33, 7, dtype=torch.float64), target("cpu")) == []


def test_doctor_tells_what_runs_and_which_rows_hold() -> None:
    """Nothing stands against a plain attention on Hopper; other GPUs' rows are not shown."""
    for kernel in ("fa4", "cudnn"):
        assert doctor.obstacles(kernel, target(HOPPER)) == []
        rows = doctor.rows_that_hold(kernel, target(HOPPER))
        assert rows == [row for row in rows_of(kernel) if 9 in (row.families or (9,))]
    (obstacle,) = doctor.obstacles("cudnn", target(HOPPER, cudnn="9.12.0"))
    assert obstacle.startswith("cuDNN 9.12.0 (cuDNN 9.13 or newer; ")
    assert "cudnn" in doctor.installed_libraries()


# --- What cuDNN takes -----------------------------------------------------------------------------

CUDNN_TAKES: dict[str, dict[str, Any]] = {
    "GQA": {"hkv": 2},
    "one key head": {"hkv": 1},
    "float16": {"dtype": torch.float16},
    "bool mask": {"bias": (2, 1, 128, 128)},
    "mask of the query's dtype": {"bias": (1, 8, 128, 128), "bias_dtype": torch.bfloat16},
    "padding mask": {"bias": (2, 1, 1, 128)},
    "mask and its gradient": {
        "bias": (1, 1, 128, 128),
        "bias_dtype": torch.bfloat16,
        "bias_needs_grad": True,
    },
    "mask, causal and more queries": {
        "sq": 256,
        "causal": "top_left",
        "bias": (2, 8, 256, 128),
    },
    "mask and bottom-right of equal lengths": {
        "causal": "bottom_right",
        "bias": (2, 8, 128, 128),
    },
    "dropout": {"dropout_p": 0.9},
    "dropout, mask, causal and GQA": {
        "hkv": 2,
        "dropout_p": 0.1,
        "causal": "top_left",
        "bias": (2, 1, 1, 128),
    },
    "causal, more queries": {"sq": 256, "causal": "top_left"},
    "causal, more keys": {"sq": 96, "causal": "top_left"},
    "bottom-right, more keys": {"sq": 96, "causal": "bottom_right"},
    "window": {"window": (16, 16)},
    "window of bottom-right": {"window": (16, None), "causal": "bottom_right"},
    "sink": {"has_sink": True},
    "lengths": {"has_seqlens": True},
    "any scale": {"scale": -0.25},
    "pinned": {"sdp_backends": ("CUDNN_ATTENTION", "MATH")},
    "odd keys": {"sk": 100},
    "half a tile, causal": {"sq": 64, "causal": "top_left"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("training", [False, True], ids=["fwd", "fwd+bwd"])
@pytest.mark.parametrize("change", CUDNN_TAKES.values(), ids=CUDNN_TAKES.keys())
def test_cudnn_takes_it_on_hopper(change: dict[str, Any], training: bool) -> None:
    """Nothing of the tested version speaks against it."""
    assert reasons_against("cudnn", spec(**change, needs_grad=training), target(HOPPER)) == []


# The first version that is right again, or the pass or GPU that never was wrong.
CUDNN_AGAIN: list[tuple[str, str, dict[str, Any]]] = [
    (HOPPER, "9.13.0", {}),
    (HOPPER, "9.14.1", {"window": (16, 16)}),
    (HOPPER, "9.13.0", {"window": (16, 16)}),
    (HOPPER, "9.14.0", {"window": (16, None), "causal": "bottom_right"}),
    (HOPPER, "9.15.1", {"sk": 100, "needs_grad": True}),
    (HOPPER, "9.15.0", {"sk": 100}),
    (HOPPER, "9.26.0", {"sq": 64, "needs_grad": True}),
    (HOPPER, "9.19.0", {"sq": 64}),
    (BLACKWELL, "9.19.0", {"sq": 64, "needs_grad": True}),
    (HOPPER, "9.27.0", {"sq": 1, "needs_grad": True}),
    (HOPPER, "9.24.1", {"sq": 1, "needs_grad": True}),
    (HOPPER, "9.25.0", {"sq": 1}),
    (BLACKWELL, "9.25.1", {"sq": 1}),
    (BLACKWELL, "9.18.0", {"deterministic": True, "needs_grad": True}),
    (BLACKWELL, "9.17.0", {"deterministic": True}),
    (HOPPER, "9.17.0", {"deterministic": True, "needs_grad": True}),
]


@pytest.mark.parametrize(("arch", "version", "change"), CUDNN_AGAIN, ids=str)
def test_a_version_row_ends(arch: str, version: str, change: dict[str, Any]) -> None:
    assert reasons_against("cudnn", spec(**change), target(arch, cudnn=version)) == []


# --- Head dims ------------------------------------------------------------------------------------

# (arch, D, Dv, taken in the forward, taken in the backward), Hq == Hkv.
HEAD_DIMS = [
    (HOPPER, 8, 8, True, False),
    (HOPPER, 24, 24, True, True),
    (HOPPER, 96, 96, True, True),
    (HOPPER, 112, 112, True, False),
    (HOPPER, 192, 128, True, True),
    (HOPPER, 128, 64, True, True),
    (HOPPER, 128, 96, True, False),
    (HOPPER, 64, 128, True, False),
    (HOPPER, 256, 256, True, True),
    (HOPPER, 100, 100, False, False),
    (HOPPER, 512, 512, False, False),
    (HOPPER, 576, 512, False, False),
    (BLACKWELL, 96, 96, True, True),
    (BLACKWELL, 192, 128, True, True),
    (BLACKWELL, 192, 192, False, False),
    (BLACKWELL, 256, 256, True, True),
    (GEFORCE, 128, 128, True, True),
    (GEFORCE, 192, 128, False, False),
    (AMPERE, 128, 128, True, False),
    (AMPERE, 192, 192, False, False),
]


@pytest.mark.parametrize(
    ("arch", "d", "dv", "forward", "backward"),
    HEAD_DIMS,
    ids=[f"{arch} ({d}, {dv})" for arch, d, dv, _, _ in HEAD_DIMS],
)
def test_head_dims(arch: str, d: int, dv: int, forward: bool, backward: bool) -> None:
    """What only the forward takes is not chosen when a gradient is needed (HD-01, HD-02)."""
    for training, taken in ((False, forward), (True, backward)):
        problem = spec(d, dv, needs_grad=training)
        against = reasons_against("fa4", problem, target(arch))
        assert (against == []) == taken, against


# (D, Dv), taken on sm_90, taken on sm_10x, taken on sm_80 and sm_12x; in both directions.
CUDNN_HEAD_DIMS = [
    (8, 8, True, True, True),
    (64, 128, True, True, True),
    (104, 104, True, True, True),
    (128, 64, True, True, True),
    (192, 128, True, True, False),
    (128, 192, True, False, False),
    (192, 192, True, False, False),
    (256, 256, True, False, False),
    (64, 256, True, False, False),
    (4, 4, False, False, False),
    (64, 36, False, False, False),
    (100, 100, False, False, False),
    (264, 128, False, False, False),
    (576, 512, False, False, False),
]


@pytest.mark.parametrize(("d", "dv", "hopper", "blackwell", "others"), CUDNN_HEAD_DIMS)
def test_head_dims_of_cudnn(d: int, dv: int, hopper: bool, blackwell: bool, others: bool) -> None:
    taken = {HOPPER: hopper, BLACKWELL: blackwell, GEFORCE: others, AMPERE: others}
    for training in (False, True):
        problem = spec(d, dv, hkv=2, needs_grad=training)
        against = {arch: reasons_against("cudnn", problem, target(arch)) for arch in taken}
        assert {arch: reasons == [] for arch, reasons in against.items()} == taken, against


def slice_of_longer_sequences(tensor: Tensor) -> Tensor:
    """Contiguous (S, H, D) of every batch element, but with a gap between them."""
    b, h, s, d = tensor.shape
    return bshd(b, h, 2 * s, d, tensor.dtype)[:, :, :s]


def test_head_dim_256_on_blackwell_needs_a_contiguous_batch_too() -> None:
    """Its kernels are wrong for any layout but contiguous (B, S, H, D) (ST-01)."""
    sliced = spec(256, change=slice_of_longer_sequences)
    against = reasons_against("fa4", sliced, target(BLACKWELL))
    assert [reason.partition(" with")[0] for reason in against] == ["head_dim 256"]


# --- Lengths that are symbols ---------------------------------------------------------------------

LENGTHS = (100, 200, 192, 320, 77, 64)  # 192, 320 and 64 leave half a tile of 128


def kernels_for_lengths(
    kernels: tuple[str, ...],
    training: bool,
    causal: bool = False,
    version: str = "9.19.0",
    arch: str = HOPPER,
    lengths: Callable[[int], tuple[int, int]] = lambda length: (length, length),
) -> list[list[str | None]]:
    """The kernel planned in each new graph, for each of `LENGTHS`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    fn, planned = planning(attend, target(arch, cudnn=version), kernels)
    found = []
    for length in LENGTHS:
        sq, sk = lengths(length)
        inputs = [torch.randn(2, 2, s, 64, dtype=torch.bfloat16) for s in (sq, sk, sk)]
        for tensor in inputs:
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
            tensor.requires_grad_(training)
        before = len(planned)
        fn(*inputs)
        found.append([site.kernel for site in planned[before:]])
    return found


ONE_GRAPH: list[list[str | None]] = [[]] * (len(LENGTHS) - 1)


def test_half_filled_tiles_have_a_graph_of_their_own() -> None:
    """A guard on Sq % 128, where cuDNN before 9.26 is wrong for one of its values."""
    assert kernels_for_lengths(("cudnn",), True) == [["cudnn"], [], [None], [], [], []]


@pytest.mark.parametrize(
    "change",
    [
        {"training": False},
        {"training": True, "causal": True},
        {"training": True, "version": "9.26.0"},
    ],
    ids=["inference", "causal", "9.26"],
)
def test_nothing_is_guarded_where_no_tile_is_wrong(change: dict[str, Any]) -> None:
    assert kernels_for_lengths(("cudnn",), **change) == [["cudnn"], *ONE_GRAPH]


@pytest.mark.parametrize("training", [False, True], ids=["fwd", "fwd+bwd"])
def test_cudnn_s_guards_do_not_split_what_fa4_runs(training: bool) -> None:
    """Of the default kernels FA4 takes lengths that vary: cuDNN is not even asked."""
    assert kernels_for_lengths(("fa4", "cudnn"), training) == [["fa4"], *ONE_GRAPH]


def test_the_only_query_is_no_symbol() -> None:
    """Sq = 1 is a graph of its own for Dynamo, so rows about it need no guard."""
    kernels = kernels_for_lengths(
        ("cudnn",), False, arch=BLACKWELL, lengths=lambda length: (1 if length == 320 else 90, 40)
    )
    assert kernels == [["cudnn"], [], [], [None], [], []]
