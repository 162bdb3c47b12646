"""Every row of the support table bites, with the value, the limit and its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from attention_specs import AMPERE, BLACKWELL, GEFORCE, HOPPER, bshd, spec, target
from torch import Tensor

from fa_inductor.support import ROWS, Row, reasons_against, rows_of

TRAINING: dict[str, Any] = {"needs_grad": True}


@dataclass(frozen=True)
class Break:
    """A spec or target that one row of the table must refuse.

    value: how the reason begins. wanted: the feature of the row.
    """

    kernel: str
    wanted: str
    value: str
    arch: str = HOPPER
    change: dict[str, Any] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kernel} {self.wanted}: {self.value} on {self.arch}"


BREAKS = [
    Break("fa4", "device", "device cpu", arch="cpu"),
    Break("fa4", "version", "flash-attn-4 4.0.0b12", libraries={"flash-attn-4": "4.0.0b12"}),
    Break("fa4", "version", "flash-attn-4 is not installed", libraries={"flash-attn-4": ""}),
    Break("fa4", "arch", "sm_75", arch="sm_75"),
    Break("fa4", "backward", "sm_80", arch=AMPERE, change=TRAINING),
    Break("fa4", "dtype", "dtype float32", change={"dtype": torch.float32}),
    Break("fa4", "dtype", "dtype float64", change={"dtype": torch.float64}),
    Break("fa4", "head_dim", "head_dim 33", change={"d": 33}),
    Break("fa4", "head_dim", "head_dim 264", change={"d": 264}),
    Break("fa4", "head_dim", "head_dim (q·k 64, v 256)", change={"d": 64, "dv": 256}),
    Break("fa4", "head_dim", "head_dim (q·k 64, v 128)", change={"d": 64, "dv": 128, **TRAINING}),
    Break("fa4", "head_dim", "head_dim 104", change={"d": 104, **TRAINING}),
    Break("fa4", "head_dim", "head_dim 72", BLACKWELL, {"d": 72, **TRAINING}),
    Break("fa4", "head_dim", "head_dim 72", GEFORCE, {"d": 72, **TRAINING}),
    Break("fa4", "head_dim", "head_dim 160", BLACKWELL, {"d": 160}),
    Break("fa4", "head_dim", "head_dim (q·k 256, v 128)", BLACKWELL, {"d": 256, "dv": 128}),
    Break("fa4", "head_dim", "head_dim 256", GEFORCE, {"d": 256}),
    Break("fa4", "head_dim", "head_dim 136", AMPERE, {"d": 136}),
    Break(
        "fa4",
        "GQA head_dim",
        "8 query heads on 2 with head_dim (q·k 192, v 128)",
        change={"d": 192, "dv": 128, "hkv": 2, **TRAINING},
    ),
    Break(
        "fa4",
        "layout",
        "head_dim 256 with inputs that are not contiguous (B, S, H, D)",
        BLACKWELL,
        {"d": 256, "change": torch.Tensor.contiguous},
    ),
    Break(
        "fa4",
        "deterministic",
        "a deterministic backward",
        GEFORCE,
        {"deterministic": True, **TRAINING},
    ),
    Break(
        "fa4", "mask", "attn_mask bool (2, 1, 8, 8)", change={"mask": "attn_mask bool (2, 1, 8, 8)"}
    ),
    Break("fa4", "dropout", "dropout_p=0.1 > 0", change={"dropout_p": 0.1}),
    Break(
        "fa4",
        "causal",
        "is_causal with Sq 100 and Sk 128",
        change={"sq": 100, "causal": "top_left"},
    ),
    Break("fa4", "scale", "scale -0.25", change={"scale": -0.25}),
    Break("fa4", "scale", "scale 0.0", change={"scale": 0.0}),
    Break("fa4", "scale", "scale nan", change={"scale": float("nan")}),
    Break(
        "fa4",
        "sdpa_kernel",
        "sdpa_kernel(MATH)",
        change={"sdp_backends": ("MATH",)},
    ),
    Break(
        "fa4",
        "sdpa_kernel",
        "sdpa_kernel(CUDNN_ATTENTION, FLASH_ATTENTION)",
        change={"sdp_backends": ("CUDNN_ATTENTION", "FLASH_ATTENTION")},
    ),
    Break("fa4", "sdpa_kernel", "sdpa_kernel(nothing)", change={"sdp_backends": ()}),
    Break("cudnn", "kernel", "kernel cudnn"),
    Break(
        "reference", "mask", "attn_mask float32 (8, 8)", "cpu", {"mask": "attn_mask float32 (8, 8)"}
    ),
    Break("reference", "dropout", "dropout_p=1.0 > 0", "cpu", {"dropout_p": 1.0}),
    Break("reference", "dtype", "dtype float8_e4m3fn", "cpu", {"dtype": torch.float8_e4m3fn}),
    Break(
        "reference",
        "sdpa_kernel",
        "sdpa_kernel(FLASH_ATTENTION)",
        "cpu",
        {"sdp_backends": ("FLASH_ATTENTION",)},
    ),
]


def objecting(case: Break) -> list[tuple[Row, str]]:
    """The rows that refuse the case, with their reasons."""
    found = [
        (row, row.reason(spec(**case.change), target(case.arch, **case.libraries)))
        for row in rows_of(case.kernel)
    ]
    return [(row, reason) for row, reason in found if reason is not None]


@pytest.mark.parametrize("case", BREAKS, ids=str)
def test_a_row_bites(case: Break) -> None:
    """The reason names the value, the limit and its source, and is the table's only answer."""
    reasons = [
        f"{case.value} ({row.limit}; {row.source})"
        for row, _ in objecting(case)
        if row.feature == case.wanted
    ]
    assert reasons
    against = reasons_against(case.kernel, spec(**case.change), target(case.arch, **case.libraries))
    assert set(reasons) & set(against)
    assert {row.feature for row, _ in objecting(case)} == {case.wanted}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.kernel} {row.feature}: {row.limit}")
def test_every_row_is_shown_to_bite(row: Row) -> None:
    """A new row of the table needs a case above."""
    assert any(row is found for case in BREAKS for found, _ in objecting(case))
    assert row.limit
    assert row.source


@pytest.mark.parametrize("training", [False, True], ids=["fwd", "fwd+bwd"])
@pytest.mark.parametrize("arch", [HOPPER, "sm_103a", BLACKWELL, GEFORCE, AMPERE])
def test_a_plain_attention_has_nothing_against_it(arch: str, training: bool) -> None:
    """Every named GPU takes head_dim 64 and 128, except the backward on sm_80."""
    for d, causal in ((64, "none"), (128, "top_left"), (128, "bottom_right")):
        problem = spec(d, hkv=2, causal=causal, needs_grad=training)
        against = reasons_against("fa4", problem, target(arch))
        assert bool(against) == (training and arch == AMPERE)
    assert reasons_against("reference", spec(33, 7, dtype=torch.float64), target("cpu")) == []


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


def slice_of_longer_sequences(tensor: Tensor) -> Tensor:
    """Contiguous (S, H, D) of every batch element, but with a gap between them."""
    b, h, s, d = tensor.shape
    return bshd(b, h, 2 * s, d, tensor.dtype)[:, :, :s]


def test_head_dim_256_on_blackwell_needs_a_contiguous_batch_too() -> None:
    """Its kernels are wrong for any layout but contiguous (B, S, H, D) (ST-01)."""
    sliced = spec(256, change=slice_of_longer_sequences)
    against = reasons_against("fa4", sliced, target(BLACKWELL))
    assert [reason.partition(" with")[0] for reason in against] == ["head_dim 256"]
