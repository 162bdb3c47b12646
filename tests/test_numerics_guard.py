"""`fa.guard`: what is not finite or not right is told, with the site that it comes from."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from layered_model import HEADS, LENGTH, WIDTH, Model, break_values_of_one_head
from torch import Tensor

import fa_inductor
from fa_inductor import numerics
from fa_inductor.errors import NumericsError, OptionError
from fa_inductor.kernels import reference
from fa_inductor.watch import Watch, plain_name, site_name, split_site, watch_of, watched_name
from helpers import compile_quick, compile_reference


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    numerics.forget()
    yield
    numerics.forget()


@pytest.fixture
def findings() -> Iterator[list[numerics.Finding]]:
    found: list[numerics.Finding] = []
    listen = found.append
    numerics.listeners.append(listen)
    yield found
    numerics.listeners.remove(listen)


def inputs() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH)


def test_names_the_layer_and_the_line(
    findings: list[numerics.Finding], caplog: pytest.LogCaptureFixture
) -> None:
    """NaN in one head of the second layer: told in the next step, the second layer first."""
    model = Model()
    compiled = compile_reference(model, **{"fa.guard": "finite"})
    compiled(inputs()).sum().backward()
    break_values_of_one_head(model.layers[1])
    with caplog.at_level(logging.WARNING, "fa_inductor"):
        compiled(inputs()).sum().backward()
        assert not findings  # nothing waits
        compiled(inputs())
        assert findings[0].names.site.startswith("layers.1 ")
        assert "layered_model.py:" in findings[0].names.site
        assert findings[0].text.endswith("on reference: the output is not finite (nan)")
        compiled(inputs()).sum().backward()  # each site is told once
    (line,) = [each.getMessage() for each in caplog.records if each.name == "fa_inductor"]
    assert findings[0].text in line
    assert "it is the first, 4 more followed: layers.2" in line


def test_under_checkpoints(findings: list[numerics.Finding]) -> None:
    """The recompute has the site's name as well."""
    model = Model(checkpointed=True)
    compiled = compile_quick(model, guard="finite")
    break_values_of_one_head(model.layers[1])
    compiled(inputs()).sum().backward()
    numerics.check()
    assert findings[0].names.site.startswith("layers.1 ")
    assert findings[0].names.direction == "forward"


def test_raises_where_asked_to_and_goes_on(findings: list[numerics.Finding]) -> None:
    model = Model()
    compiled = compile_quick(model, guard="finite", on_guard="error")
    good = model.layers[1].qkv.weight.detach().clone()
    break_values_of_one_head(model.layers[1])
    compiled(inputs())
    with pytest.raises(NumericsError, match=r"forward of attention layers\.1.*not finite"):
        compiled(inputs())
    with torch.no_grad():
        model.layers[1].qkv.weight.copy_(good)
    numerics.check()
    compiled(inputs()).sum().backward()
    compiled(inputs()).sum().backward()
    numerics.check()
    assert {finding.names.direction for finding in findings} == {"forward"}


def test_check_tells_at_once(findings: list[numerics.Finding]) -> None:
    model = Model()
    compiled = compile_quick(model, guard="finite")
    break_values_of_one_head(model.layers[0])
    compiled(inputs())
    numerics.check()
    assert [finding.names.site.split()[0] for finding in findings] == [
        "layers.0",
        "layers.1",
        "layers.2",
    ]


@pytest.mark.parametrize("place", [0, 1])
def test_scores_that_are_not_finite(findings: list[numerics.Finding], place: int) -> None:
    model = Model()
    compiled = compile_quick(model, guard="finite")
    with torch.no_grad():
        model.layers[2].qkv.bias[place * WIDTH] = math.inf
    compiled(inputs()).sum().backward()  # trained: the log-sum-exp is there
    numerics.check()
    assert "layers.2" in findings[0].names.site
    assert "the log-sum-exp is not finite (nan), so q or k is not" in findings[0].text


def test_gradients_that_are_not_finite(findings: list[numerics.Finding]) -> None:
    """A backward alone that fails: named by tensor, and no forward is."""
    right = reference.backward

    def wrong(*args: Any) -> None:
        right(*args)
        args[-1].k[0, 0, 3] = math.nan

    compiled = compile_quick(Model(), guard="finite")
    with mock.patch.object(reference, "backward", wrong):
        compiled(inputs()).sum().backward()
    numerics.check()
    assert findings[0].text.startswith("backward of attention layers.2")
    assert findings[0].text.endswith("on reference: the gradient of k is not finite (nan)")
    assert {finding.names.direction for finding in findings} == {"backward"}


def test_oracle_finds_what_is_finite_and_wrong(findings: list[numerics.Finding]) -> None:
    right = reference.forward

    def wrong(problem: Any, tensors: Any, out: Tensor, lse: Tensor) -> None:
        right(problem, tensors, out, lse)
        out[:, :, LENGTH // 2 :] *= 0.5

    compiled = compile_quick(Model(), guard="oracle", guard_every=2)
    compiled(inputs())
    with mock.patch.object(reference, "forward", wrong):
        compiled(inputs())  # the second call is not looked at
        numerics.check()
        assert not findings
        compiled(inputs())
    numerics.check()
    assert "the output is wrong by" in findings[0].text
    assert "of 2e-03 allowed" in findings[0].text


def test_oracle_compares_gradients(findings: list[numerics.Finding]) -> None:
    right = reference.backward

    def wrong(*args: Any) -> None:
        right(*args)
        args[-1].v.mul_(0.5)

    compiled = compile_quick(Model(), guard="oracle")
    compiled(inputs()).sum().backward()
    numerics.check()
    assert not findings
    compiled = compile_quick(Model(), guard="oracle", guard_every=1)
    with mock.patch.object(reference, "backward", wrong):
        compiled(inputs()).sum().backward()
    numerics.check()
    assert "the gradient of v is wrong by" in findings[0].text
    assert "gradient of q" not in findings[0].text


def test_does_not_change_what_is_computed() -> None:
    model, x = Model(), inputs()
    made = []
    for guard in ("off", "finite", "oracle"):
        torch._dynamo.reset()
        out = compile_quick(model, guard=guard)(x)
        model.zero_grad()
        out.sum().backward()
        made.append((out.detach().clone(), model.layers[0].qkv.weight.grad.clone()))
    for other in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], other, strict=True))


def test_every_variant_is_watched(findings: list[numerics.Finding]) -> None:
    """Inference, a mask that the kernel evaluates, packed tensors, and the op called by name."""

    def by_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        op = torch.ops.fa_inductor.attention
        return op(q, k, v, None, "none", "BSHD", False, "reference")[0]

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = torch.arange(LENGTH) < LENGTH - 3
        return F.scaled_dot_product_attention(q, k, v, attn_mask=kept.expand(2, 1, LENGTH, -1))

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = torch.stack((q, k, v), 2).permute(2, 0, 1, 3, 4).contiguous().unbind()
        return F.scaled_dot_product_attention(q, k, v)

    for attend in (by_name, masked, packed):
        for grad in (False, True):
            numerics.forget()
            findings.clear()
            torch._dynamo.reset()
            q, k, v = (torch.randn(2, HEADS, LENGTH, 8, requires_grad=grad) for _ in range(3))
            compiled = compile_quick(attend, guard="finite")
            with torch.no_grad():
                v[0, 1, 2] = math.nan
            out = compiled(q, k, v)
            numerics.check()
            assert "the output is not finite" in findings[0].text, attend.__name__
            assert f"{__file__}:" in findings[0].text
            if grad:
                out.sum().backward()
                numerics.check()
                assert findings[-1].names.direction == "backward"


def test_under_inference_mode_first(findings: list[numerics.Finding]) -> None:
    """The table that is made there serves training as well."""
    model = Model()
    compiled = compile_quick(model, guard="finite")
    with torch.inference_mode():
        compiled(inputs())
    compiled(inputs()).sum().backward()
    break_values_of_one_head(model.layers[1])
    compiled(inputs())
    numerics.check()
    assert findings


def test_too_many_are_refused() -> None:
    compiled = compile_quick(Model(), guard="finite")
    with (
        mock.patch.object(numerics, "ROWS", 2),
        pytest.raises(NumericsError, match="More than 2 attentions are watched"),
    ):
        compiled(inputs())


def test_registered_as_well(findings: list[numerics.Finding]) -> None:
    model = Model()
    with fa_inductor.enabled(kernels=("reference",), guard="finite"):
        compiled = torch.compile(model)
        compiled(inputs())
        break_values_of_one_head(model.layers[1])
        compiled(inputs())
        compiled(inputs())
    assert "layers.1" in findings[0].names.site


def test_what_happens_again_is_told_again_once_cleared(
    findings: list[numerics.Finding],
) -> None:
    model = Model()
    compiled = compile_quick(model, guard="finite")
    break_values_of_one_head(model.layers[1])
    for told in (2, 2):
        compiled(inputs())
        numerics.check()
        assert len(findings) == told
    numerics.clear()
    numerics.check()
    assert len(findings) == 2
    compiled(inputs())
    numerics.check()
    assert len(findings) == 4
    assert findings[2:] == findings[:2]


def test_all_devices_are_checked_before_it_raises(findings: list[numerics.Finding]) -> None:
    for name in ("cpu", "cpu:0"):
        table = numerics.table_of(torch.device(name))
        names = numerics.Names(name, "reference", "forward")
        table.row(name, names, [numerics.Number("{}")], "error").cells[0].fill_(math.nan)
        table.rows[0].finish()
    with pytest.raises(NumericsError, match=r"cpu (?s:.*) cpu:0 "):
        numerics.check()
    assert [finding.names.site for finding in findings] == ["cpu", "cpu:0"]


def test_names_of_sites() -> None:
    for source in ("model.py:40", "/a (copy)/model.py:40"):
        assert split_site(site_name("layers.0.attn", source)) == ("layers.0.attn", source)


def test_names_of_watched_kernels() -> None:
    watch = Watch("finite", "warn", 100, "layers.0 (a@b.py:3)")
    name = watched_name("fa4", watch)
    assert plain_name(name) == "fa4"
    assert watch_of(name) == watch
    assert watch_of("fa4") is None
    assert plain_name("fa4") == "fa4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fa.guard": "finit"}, "fa.guard='finit': expected one of .* Did you mean 'finite'"),
        ({"fa.on_guard": "raise"}, "fa.on_guard='raise': expected one of"),
        ({"fa.guard_every": 0}, "fa.guard_every=0: expected a number from 1 on"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fa_inductor.backend.split_options(options)


def test_the_scan_for_gpus() -> None:
    """In Triton's interpreter: magnitudes, NaN above infinity, and of an lse what is positive."""
    made = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "scan_child.py")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    found = dict(json.loads(line) for line in made.stdout.splitlines())
    assert found == {
        "numbers": ["7", "1.25", "3.5"],
        "NaN": ["nan", "inf", "0"],
        "bfloat16": ["nan", "0", "0"],
        "float16": ["inf", "5", "0"],
        "lse -inf": ["1", "0", "0"],
        "lse inf": ["1", "inf", "0"],
        "lse nan": ["1", "nan", "0"],
        "lse -3.0": ["1", "0", "0"],
        "lse 1.5": ["1", "1.5", "0"],
    }
