"""Inductor's and AOTAutograd's caches across processes: the same is found, a change is not.

Processes share a fresh cache directory and see a copy of the package, of which a source file
can then be changed. `cache_child.py` is what each of them runs.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cache_child import Answer, Request
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.utils import fresh_cache

import fa_inductor
from fa_inductor import backend, inductor_compat, patterns
from fa_inductor.config import Config
from fa_inductor.errors import FallbackError
from fa_inductor.fingerprint import fingerprint
from helpers import compile_reference, run_reported

ROUTES = ("backend", "register")


@dataclass(frozen=True)
class _Machine:
    """A package copy and empty caches, shared by the processes started on it."""

    packages: Path
    cache: Path
    scratch: Path

    def run(self, *requests: Request) -> list[Answer]:
        """Start a process, have it compile every request in turn."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.packages),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache),
            "TMPDIR": str(self.scratch),
        }
        child = Path(__file__).with_name("cache_child.py")
        process = subprocess.run(
            [sys.executable, str(child), json.dumps([asdict(request) for request in requests])],
            env=environment,
            cwd=self.scratch,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        answers = [Answer(**fields) for fields in json.loads(process.stdout)]
        for answer in answers:
            assert answer.package.startswith(str(self.packages))
            assert answer.equals_eager
        return answers


@pytest.fixture
def machine(tmp_path: Path) -> _Machine:
    made = _Machine(*(tmp_path / name for name in ("packages", "cache", "scratch")))
    for folder in (made.packages, made.cache, made.scratch):
        folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "patterns")
    package = made.packages / "fa_inductor"
    shutil.copytree(Path(fa_inductor.__file__).parent, package, ignore=ignored)
    # As in a checkout, the patterns are a folder of their own: no glob over the package finds them.
    shutil.copytree(Path(patterns.__file__).parent, tmp_path / "patterns", ignore=ignored)
    (package / "patterns").symlink_to(tmp_path / "patterns")
    return made


def _change_one_byte(path: Path) -> None:
    """Change the first letter of the module's docstring, and so nothing that it does."""
    text = path.read_text()
    start = text.index('"""') + 3
    path.write_text(text[:start] + "#" + text[start + 1 :])


def _assert_missed(answers: list[Answer]) -> None:
    for answer in answers:
        assert (answer.fxgraph_hits, answer.aot_autograd_hits) == (0, 0)
        assert answer.fxgraph_misses
        assert (answer.passes, answer.launches) == (1, 1)


def test_second_process_hits_and_a_change_misses(machine: _Machine) -> None:
    """CA-01: routes keep apart; kernels and pattern sources are part of the key. What a process
    reports does not depend on who compiled."""
    asked = [Request(route, train=train) for route in ROUTES for train in (False, True)]
    first = machine.run(*asked)
    assert not first[0].imported_before  # the backend's name was enough to find the package
    _assert_missed(first)

    other_kernels = [replace(asked[i], kernels=("reference", "fa4")) for i in (0, 2)]
    answers = machine.run(*asked, *other_kernels)
    for request, answer in zip(asked, answers, strict=False):
        # A training step has a graph for each direction, found together.
        assert (answer.fxgraph_hits, answer.fxgraph_misses) == (2 if request.train else 1, 0)
        assert (answer.aot_autograd_hits, answer.aot_autograd_misses) == (1, 0)
        assert answer.passes == 1  # a cached graph is reported and guarded like a fresh one
        assert answer.launches == 1  # the op was registered before the graph was loaded
    for cold, warm in zip(first, answers, strict=False):
        assert warm.report == cold.report
        assert [site["kernel"] for site in warm.report["sites"]] == ["reference"]
    _assert_missed(answers[len(asked) :])

    _change_one_byte(machine.packages / "fa_inductor" / "patterns" / "sdpa.py")
    _assert_missed(machine.run(asked[0], asked[2]))


# --- What the key holds ---------------------------------------------------------------------------


def test_key_follows_what_could_change_the_result() -> None:
    """CA-01: kernels in their order, SDP flags, deterministic mode."""
    keys = [fingerprint(Config()), fingerprint(Config(kernels=("cudnn", "fa4")))]
    keys.append(fingerprint(Config(kernels=("fa4",))))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        keys.append(fingerprint(Config()))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        keys.append(fingerprint(Config()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(set(keys)) == len(keys)
    assert fingerprint(Config()) == keys[0]


def test_key_follows_every_source(machine: _Machine) -> None:
    """CA-01: sources of ops, table, kernels and patterns alike, read where they are installed."""
    modules = ["ops.py", "support.py", "kernels/fa4.py", "patterns/family.py", "patterns/sdpa.py"]
    program = """
import pathlib, sys
from fa_inductor import fingerprint
from fa_inductor.config import Config
for module in [None, *sys.argv[1:]]:
    if module is not None:
        path = pathlib.Path(fingerprint.__file__).parent / module
        path.write_bytes(path.read_bytes() + b"#")
    fingerprint.sources.cache_clear()
    print(fingerprint.fingerprint(Config()))
"""
    process = subprocess.run(
        [sys.executable, "-c", program, *modules],
        env={**os.environ, "PYTHONPATH": str(machine.packages)},
        cwd=machine.scratch,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(set(process.stdout.split())) == 1 + len(modules)


def test_installed_passes_pickle_with_their_key() -> None:
    """CA-01: Inductor pickles passes into its keys and sends them to compile workers."""
    from torch._inductor import config as inductor

    carrier = backend._with_cache_key({}, "key")["joint_custom_pre_pass"]
    assert pickle.loads(pickle.dumps(carrier)).uuid() == carrier.uuid()
    with fa_inductor.enabled(kernels=("reference",)):
        if inductor_compat.pre_grad_takes_list():
            (installed,) = inductor_compat.custom_passes(inductor.pre_grad_custom_pass)
        else:
            installed = inductor.joint_custom_pre_pass
        loaded = pickle.loads(pickle.dumps(installed))
        assert loaded.uuid() == installed.uuid()
        assert loaded.uuid() is not None


def test_a_users_pass_without_a_key_still_switches_caching_off() -> None:
    """A pass that cannot be keyed must not be cached under ours."""
    assert inductor_compat.cache_key_pass("key", lambda graph: None).uuid() is None


# --- What can be cached ---------------------------------------------------------------------------


def _module_with_masks(q: torch.Tensor) -> torch.Tensor:
    x = q.transpose(1, 2).flatten(2)
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    return _MODULE(x, x, x, key_padding_mask=padding, need_weights=False)[0]


_MODULE = torch.nn.MultiheadAttention(16, 2, batch_first=True).requires_grad_(False)
_REWRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda q: F.scaled_dot_product_attention(q, q, q),
    "bool mask": lambda q: F.scaled_dot_product_attention(q, q, q, q[0, 0, :, :4] > 0),
    "float mask": lambda q: F.scaled_dot_product_attention(q, q, q, q[..., :4]),
    "dropout": lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
    "broadcast": lambda q: F.scaled_dot_product_attention(q, q[:1], q[:1]),
    "nn.MultiheadAttention": _module_with_masks,
}


@pytest.mark.parametrize(
    ("name", "dynamic"), [("plain", False), *((name, True) for name in _REWRITTEN)]
)
def test_what_the_pass_writes_can_be_cached(name: str, dynamic: bool) -> None:
    """AOTAutograd does not cache calls of methods of tensors that Dynamo has not described."""
    fn = _REWRITTEN[name]
    counters = torch._dynamo.utils.counters["aot_autograd"]
    with fresh_cache():
        for hit in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            q = torch.randn(2, 2, 4, 8)
            _, report = run_reported(compile_reference(fn, dynamic=dynamic), q)
            assert {site.kernel for site in report.sites} == {"reference"}
            assert counters["autograd_cache_bypass"] == 0
            assert counters["autograd_cache_hit"] == hit


# --- Promises that must also hold when the pass does not run --------------------------------------


def _fallback_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """A mask of another dtype than the query, which no kernel takes."""
    return torch.randn(1, 2, 4, 8, dtype=torch.bfloat16), torch.randn(4, 4)


def _attend_with_mask(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, mask)


def test_error_policy_holds_on_a_warm_cache() -> None:
    """A graph with a fallback, cached under another policy, still raises under "error"."""
    q, mask = _fallback_inputs()
    with fresh_cache():
        with fa_inductor.enabled(kernels=("reference",), on_fallback="ignore"):
            torch.compile(_attend_with_mask)(q, mask)
        torch._dynamo.reset()
        with (
            fa_inductor.enabled(kernels=("reference",), on_fallback="error"),
            pytest.raises(BackendCompilerFailed, match="attn_mask") as failed,
        ):
            torch.compile(_attend_with_mask)(q, mask)
    assert isinstance(failed.value.inner_exception, FallbackError)


def test_report_names_the_sites_on_a_warm_cache() -> None:
    """A cache hit must not look like a model without attention: coverage would read 100%."""
    q, mask = _fallback_inputs()
    with fresh_cache(), fa_inductor.enabled(kernels=("reference",), on_fallback="ignore"):
        _, cold = run_reported(torch.compile(_attend_with_mask), q, mask)
        torch._dynamo.reset()
        _, warm = run_reported(torch.compile(_attend_with_mask), q, mask)
    assert len(cold.sites) == 1
    assert warm.sites == cold.sites
