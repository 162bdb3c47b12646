"""FA4's compile caches on disk, with a stand-in for FA4 and for what it compiles."""

from __future__ import annotations

import enum
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa_inductor import jit_monitor, object_cache
from fa_inductor.errors import JitError, OptionError
from fa_inductor.kernels import fa4_objects
from fa_inductor.object_store import Store


class Kernel:
    """What `cute.compile` returns, and what an object file is loaded as."""

    def __init__(self, text: str) -> None:
        self.text = text

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_text(f"{function_name} {self.text}")


class Cache:
    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __getitem__(self, key: Any) -> Any:
        return self.cache[key]

    def __setitem__(self, key: Any, kernel: Any) -> None:
        self.cache[key] = kernel


class Fa4:
    """A process with FA4 in it: `entry` is written as FA4's functions are."""

    def __init__(self, store: Store | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []

        def compile_kernel(text: str) -> Kernel:
            self.compiled.append(text)
            return Kernel(text)

        def entry(head_dim: int, causal: bool) -> str:
            compile_key = (head_dim, causal, torch.bfloat16)
            if compile_key not in entry.compile_cache:  # type: ignore[attr-defined]
                made = self.interface.cute.compile(f"{head_dim} {causal}")
                entry.compile_cache[compile_key] = made  # type: ignore[attr-defined]
            return entry.compile_cache[compile_key].text  # type: ignore[attr-defined, no-any-return]

        entry.compile_cache = Cache()  # type: ignore[attr-defined]
        module = SimpleNamespace(compile=compile_kernel, other="cute.other")
        self.interface = SimpleNamespace(_flash_attn_fwd=entry, cute=module)
        monkeypatch.setattr(fa4_objects, "environment", lambda interface: {})
        monkeypatch.setattr(fa4_objects.object_cache, "store", lambda kernel, environment: store)
        monkeypatch.setattr(fa4_objects, "load", lambda path: Kernel(path.read_text()[5:]))
        fa4_objects.install(self.interface)
        self.run = entry


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    before = jit_monitor.on_jit()
    yield
    jit_monitor.on_jit(before)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, {})


def counts(since: jit_monitor.Stats) -> tuple[int, int, int]:
    now = jit_monitor.stats()
    return now.compiles - since.compiles, now.loads - since.loads, now.hits - since.hits


def test_a_kernel_is_compiled_once_for_all_processes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = jit_monitor.stats()
    first = Fa4(store, monkeypatch)
    assert [first.run(64, True), first.run(64, True), first.run(64, False)] == [
        *("64 True", "64 True", "64 False")
    ]
    assert (first.compiled, counts(before)) == (["64 True", "64 False"], (2, 0, 1))
    second = Fa4(store, monkeypatch)
    assert [second.run(64, True), second.run(64, False)] == ["64 True", "64 False"]
    assert (second.compiled, counts(before)) == ([], (2, 2, 1))


def test_without_a_store_fa4_compiles_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    fa4 = Fa4(None, monkeypatch)
    assert fa4.run(64, True) == fa4.run(64, True) == "64 True"
    assert fa4.compiled == ["64 True"]


def test_installing_twice_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fa4 = Fa4(store, monkeypatch)
    cache, cute = fa4.run.compile_cache, fa4.interface.cute  # type: ignore[attr-defined]
    fa4_objects.install(fa4.interface)
    assert fa4.run.compile_cache is cache  # type: ignore[attr-defined]
    assert fa4.interface.cute is cute
    assert cute.other == "cute.other"


def test_threads_that_want_one_kernel_compile_it_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = [Fa4(store, monkeypatch) for _ in range(4)]
    threads = [threading.Thread(target=each.run, args=(64, True)) for each in processes]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sum(len(each.compiled) for each in processes) == 1


def test_an_error_while_compiling_frees_the_lock(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, whole = Fa4(store, monkeypatch), Fa4(store, monkeypatch)

    def fail(text: str) -> Kernel:
        raise RuntimeError("ptxas")

    broken.interface.cute._module.compile = fail
    with pytest.raises(RuntimeError, match="ptxas"):
        broken.run(64, True)
    thread = threading.Thread(target=whole.run, args=(64, True), daemon=True)
    thread.start()
    thread.join(10)
    assert whole.compiled == ["64 True"]


def test_on_jit_error_says_what_is_new_and_compiles_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed = Fa4(store, monkeypatch)
    warmed.run(64, True)
    warmed.run(128, False)
    fa4 = Fa4(store, monkeypatch)
    jit_monitor.on_jit("error")
    assert fa4.run(64, True) == "64 True"
    with pytest.raises(JitError, match=r"flash_attn_fwd: new is head_dim 96 \(known: 64\)\. Warm"):
        fa4.run(96, True)
    assert fa4.compiled == []
    with jit_monitor.allowed():
        fa4.run(96, True)
    assert fa4.compiled == ["96 True"]


def test_on_jit_warn_logs_each_kernel(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fa4 = Fa4(store, monkeypatch)
    jit_monitor.on_jit("warn")
    logged: list[str] = []
    monkeypatch.setattr(
        jit_monitor.log, "warning", lambda message, *args: logged.append(message % args)
    )
    fa4.run(64, True)
    fa4.run(64, True)
    (line,) = logged
    assert "first of its kind; head_dim=64, causal=True, torch.bfloat16=torch.bfloat16" in line


def test_on_jit_takes_three_words() -> None:
    with pytest.raises(OptionError, match="Did you mean 'error'"):
        jit_monitor.on_jit("errors")


def test_another_gpu_has_a_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cutlass = SimpleNamespace(CUDA_VERSION=SimpleNamespace(major=13))
    monkeypatch.setitem(sys.modules, "cutlass", cutlass)
    interface = SimpleNamespace(_get_device_arch=lambda: 100, __file__=__file__)
    names = []
    for arch, sms in (("sm_100a", "148"), ("sm_100a", "132"), ("sm_103a", "148")):
        monkeypatch.setenv("CUTE_DSL_ARCH", arch)
        monkeypatch.setenv("FLASH_ATTENTION_NUM_SMS", sms)
        environment = fa4_objects.environment(interface)
        names.append(object_cache.store("fa4", environment).folder.name)
        assert names[-1].startswith(f"fa4-{arch}-{sms}sms-cuda13-")
    assert len(set(names)) == 3


class Colour(enum.Enum):
    RED = 1


def test_a_key_is_the_same_text_everywhere() -> None:
    key = (64, 0.5, None, "a", torch.float16, Path, (True, Colour.RED))
    text = "(64, 0.5, None, 'a', torch.float16, pathlib.Path, (True, Colour.RED))"
    assert (fa4_objects.canonical(key) or "").replace("pathlib._local", "pathlib") == text
    assert fa4_objects.canonical((1, object())) is None


def test_a_key_that_has_no_text_is_not_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fa4 = Fa4(store, monkeypatch)
    fa4.run(object(), True)  # type: ignore[arg-type]
    assert list(store.entries()) == []


def test_every_compile_key_of_the_installed_fa4_has_names() -> None:
    """Else `on_jit` could not say what is new."""
    interface = pytest.importorskip("flash_attn.cute.interface")
    for name, count in (("_flash_attn_fwd", 64), ("_bwd_preprocess", 18)):
        names = fa4_objects.key_names(getattr(interface, name), count)
        assert len(names) == count
        assert "head_dim" in names, name
