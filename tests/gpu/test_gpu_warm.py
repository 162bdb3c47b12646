"""Kernels that were compiled elsewhere run here: no JIT compile in a fresh process.

`FA_INDUCTOR_WARMED` names a cache directory that was filled on another machine, by

    FA_INDUCTOR_CACHE_DIR=<it> PYTHONPATH=tests/gpu fa-inductor warm fa_inductor.demo:make \
        warm_models:llama warm_models:swept warm_models:masked warm_models:variable \
        --target sm_90a --kernels fa4

Without it, it is filled here, by processes that see no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fa_inductor.target import Target

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    named = os.environ.get("FA_INDUCTOR_WARMED")
    if named:
        return Path(named).resolve()
    root = tmp_path_factory.mktemp("warmed")
    target = Target.of_device(torch.device("cuda")).arch
    names = ("llama", "swept", "masked", "variable")
    models = (f"warm_models:{name}" for name in names)
    command = ["warm", "fa_inductor.demo:make", *models, "--target", target, "--kernels", "fa4"]
    _run(["-m", "fa_inductor", *command], root, CUDA_VISIBLE_DEVICES="")
    return root


def _run(arguments: list[str], root: Path, **variables: str) -> str:
    path = os.pathsep.join((str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "FA_INDUCTOR_CACHE_DIR": str(root)}
    environment["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "0"
    ran = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**environment, **variables},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def _child(what: str, root: Path, **variables: str) -> dict[str, Any]:
    said = _run([str(HERE / "warm_child.py"), what], root, **variables)
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result


def test_a_training_step_compiles_nothing_and_is_right(warmed: Path) -> None:
    said = _child("step", warmed)
    print("a training step of the demo and of Llama:", said)
    assert said["compiles"] == 0
    assert said["loads"] >= 4
    assert said["plan_builds"] == 0
    for ours, eager in said["errors"].values():  # in bfloat16, against float32
        assert ours < 1.5 * eager, said["errors"]


def test_masks_and_variable_lengths_compile_nothing_and_are_right(warmed: Path) -> None:
    said = _child("variants", warmed)
    print("masks as text and variable lengths:", said)
    assert (said["compiles"], said["plan_builds"]) == (0, 0)
    assert said["loads"] >= 8
    assert max(said["errors"].values()) < 0.02, said["errors"]


def test_the_first_attention_is_quick(warmed: Path, tmp_path: Path) -> None:
    warm, cold = _child("first", warmed), _child("first", tmp_path, FA_INDUCTOR_CACHE="0")
    print(f"first attention, forward and backward: warm {warm['seconds']:.3f} s, cold "
          f"{cold['seconds']:.2f} s ({cold['compiles']} compiled)")  # fmt: skip
    assert (warm["compiles"], cold["compiles"]) == (0, warm["loads"])
    assert warm["seconds"] <= 0.2


def test_any_length_is_warm(warmed: Path) -> None:
    said = _child("sweep", warmed)
    print("lengths 1 to 8192:", said)
    assert (said["compiles"], said["plan_builds"]) == (0, 0)


def test_cudnn_builds_a_plan_for_each_length_once(tmp_path: Path) -> None:
    """In one process; the next reads them, and computes with what it has read."""
    first, second = (_child("plans", tmp_path) for _ in range(2))
    print("cuDNN at three lengths:", first, "and again:", second)
    assert (first["plan_builds"], first["plan_loads"]) == (first["calls"], 0)
    assert (second["plan_builds"], second["plan_loads"]) == (0, second["calls"])
    for said in (first, second):
        assert max(said["errors"].values()) < 0.02, said["errors"]


def test_an_object_of_another_gpu_is_not_even_looked_at(warmed: Path, tmp_path: Path) -> None:
    """... though it lies in the same directory."""
    for store in warmed.glob("fa4-*"):
        other = tmp_path / store.name.replace("132sms", "148sms").replace("sm_90a", "sm_100a")
        other.symlink_to(store)
    assert _child("first", tmp_path)["loads"] == 0
