"""Compiled kernels on disk, with stand-ins for the objects: whole, checked, made once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fa_inductor import object_cache, object_store
from fa_inductor.object_store import QUARANTINE, Store

ENVIRONMENT = {"arch": "sm_90a", "sms": "132", "cuda": "13"}

_CHILD = """
import importlib.util, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("object_store", sys.argv[4])  # without PyTorch
sys.modules["object_store"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
Store = module.Store
folder, keys, pause = Path(sys.argv[1]), sys.argv[2].split(","), float(sys.argv[3])
store = Store(folder, {"arch": "sm_90a"})
def write(path):
    with open(path, "wb") as file:
        file.write(b"half")
        file.flush()
        time.sleep(pause)
        file.write(b" and half")
for key in keys:
    if store.find("fwd", key) is not None:
        continue
    with store.building("fwd", key) as made:
        if made is None:
            print("compiled", key, flush=True)
            store.add("fwd", key, {"key": key}, pause, write)
"""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", ENVIRONMENT)


def add(store: Store, key: str, data: bytes = b"object") -> Path:
    assert store.add("fwd", key, {"d": key}, 2.0, lambda path: path.write_bytes(data))
    found = store.find("fwd", key)
    assert found is not None
    return found


def child(folder: Path, keys: str, pause: float = 0.05) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, str(folder), keys, str(pause), object_store.__file__]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_an_object_is_found_by_its_whole_key_and_name(store: Store) -> None:
    assert store.find("fwd", "64") is None
    path = add(store, "64", b"sixty-four")
    assert path.read_bytes() == b"sixty-four"
    assert store.find("fwd", "128") is None
    assert store.find("bwd", "64") is None
    (entry,) = store.entries()
    assert (entry.name, entry.fields, entry.seconds, entry.size) == ("fwd", {"d": "64"}, 2.0, 10)


@pytest.mark.parametrize("damage", [b"", b"obj", b"objekt"])
def test_a_damaged_object_is_put_aside_and_made_anew(store: Store, damage: bytes) -> None:
    path = add(store, "64")
    path.write_bytes(damage)
    assert store.find("fwd", "64") is None
    assert [each.read_bytes() for each in (store.folder / QUARANTINE).iterdir()] == [damage]
    assert add(store, "64") == path


def test_a_damaged_description_is_no_object(store: Store) -> None:
    path = add(store, "64")
    path.with_suffix(".json").write_text('{"name": ')
    assert store.find("fwd", "64") is None
    add(store, "64")


def test_an_object_without_its_description_is_none(store: Store) -> None:
    """What is left when a process ends between the two."""
    add(store, "64").with_suffix(".json").unlink()
    assert store.find("fwd", "64") is None


def test_what_fails_while_it_is_written_leaves_nothing(store: Store) -> None:
    def full_disk(path: Path) -> None:
        path.write_bytes(b"ha")
        raise OSError("no space left on device")

    assert not store.add("fwd", "64", {}, 1.0, full_disk)
    assert store.find("fwd", "64") is None
    assert list((store.folder / "fwd").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user to lose the right to write")
def test_a_read_only_directory_serves_and_takes_nothing(store: Store, tmp_path: Path) -> None:
    add(store, "64")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    for path in store.folder.rglob("*.*"):
        path.chmod(0o444)
    program = (
        "import os, sys; from pathlib import Path; from fa_inductor.object_store import Store\n"
        "os.setuid(65534); store = Store(Path(sys.argv[1]), {})\n"
        "assert store.find('fwd', '64').read_bytes() == b'object'\n"
        "with store.building('fwd', '128') as made: assert made is None\n"
        "assert not store.add('fwd', '128', {}, 1.0, lambda path: path.write_bytes(b'x'))\n"
        "try: (store.folder / 'fwd' / 'x').touch()\n"
        "except PermissionError: print('read only')\n"
    )
    command = [sys.executable, "-c", program, str(store.folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout == "read only\n", ran.stderr


def test_eight_processes_make_each_object_once(store: Store) -> None:
    keys = "a,b,c,d,e"
    children = [child(store.folder, keys) for _ in range(8)]
    said = [line for each in children for line in each.communicate()[0].splitlines()]
    assert sorted(said) == [f"compiled {key}" for key in keys.split(",")]
    entries = list(store.entries())
    assert len(entries) == 5
    assert all(entry.is_intact for entry in entries)


def test_a_killed_process_leaves_no_lock_and_no_half(store: Store) -> None:
    killed = child(store.folder, "a,b", pause=30)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "compiled a\n"
    time.sleep(0.1)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert store.find("fwd", "a") is None
    resumed = child(store.folder, "a,b")
    assert resumed.communicate(timeout=20)[0] == "compiled a\ncompiled b\n"
    assert all(entry.is_intact for entry in store.entries())


# --- All stores -----------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(object_cache.DIRECTORY, str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.mark.parametrize(
    "other", [{"arch": "sm_100a"}, {"sms": "148"}, {"cuda": "12"}, {"flash-attn-4": "4.0.0"}]
)
def test_another_gpu_or_version_has_a_store_of_its_own(root: Path, other: dict[str, str]) -> None:
    stores = [object_cache.store("fa4", each) for each in (ENVIRONMENT, ENVIRONMENT | other)]
    add(stores[0], "64")
    assert stores[1].find("fwd", "64") is None
    assert stores[0].folder.name.startswith("fa4-sm_90a-132sms-cuda13-")
    assert [each.environment for each in object_cache.stores()] == [ENVIRONMENT]


def test_the_directory_is_inductors_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(object_cache.DIRECTORY, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/some/where")
    assert object_cache.root() == Path("/some/where/fa_inductor")


def test_prune_removes_by_age_then_the_longest_unused(root: Path) -> None:
    store = object_cache.store("fa4", ENVIRONMENT)
    for days, key in enumerate("dcba"):
        path = add(store, key, b"12345678")
        os.utime(path, (0, time.time() - days * 86400))
    assert object_cache.prune(max_days=2.5).objects == 1
    assert object_cache.prune(max_bytes=16) == object_cache.Removed(1, 8)
    assert sorted(entry.fields["d"] for entry in store.entries()) == ["c", "d"]
    half = store.folder / "fwd" / ".half.o"
    half.touch()
    assert object_cache.prune() == object_cache.Removed(0, 0)
    assert half.exists()
    os.utime(half, (0, time.time() - 7200))
    object_cache.prune()
    assert not half.exists()


def test_verify_puts_damaged_objects_aside(root: Path) -> None:
    store = object_cache.store("fa4", ENVIRONMENT)
    add(store, "good")
    bad = add(store, "bad")
    bad.write_bytes(b"objec")
    intact, damaged = object_cache.verify()
    assert [[e.fields["d"] for e in each] for each in (intact, damaged)] == [["good"], ["bad"]]
    assert not bad.exists()
