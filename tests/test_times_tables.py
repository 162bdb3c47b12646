"""The tables of measured times: read from their files, part of the key, and whole as shipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from attention_specs import BLACKWELL, KINDS, spec, target

import fa_inductor
from fa_inductor import fingerprint, kernels, times
from fa_inductor.config import Config
from fa_inductor.select import choose
from fa_inductor.target import NAMED_TARGETS
from fa_inductor.times import CORE


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package's files, from which tables and key are read."""
    copy = tmp_path / "fa_inductor"
    original = Path(fa_inductor.__file__).parent
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(times.resources, "files", lambda package: copy)
    monkeypatch.setattr(fingerprint, "__file__", str(copy / "fingerprint.py"))
    for cached in (times._table, fingerprint.sources):
        cached.cache_clear()
    yield copy
    monkeypatch.undo()
    for cached in (times._table, fingerprint.sources):
        cached.cache_clear()


def _write(path: Path, *rows: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"machine": {}, "rows": rows}))
    times._table.cache_clear()
    fingerprint.sources.cache_clear()


def test_a_table_s_file_is_read_and_is_part_of_the_key(package: Path) -> None:
    """A graph compiled by other times must not be found in a cache."""
    sizes = {"batch": 2, "heads_q": 8, "heads_kv": 8, "sq": 128, "sk": 128, "d": 64, "dv": 64}
    keys = [fingerprint.fingerprint(Config())]
    for kernel, other in (("fa4", "cudnn"), ("cudnn", "fa4")):
        microseconds = {kernel: 1.0, other: 2.0}
        measured = {"passes": "fwd", "kind": "plain", **sizes, "microseconds": microseconds}
        _write(package / "data" / f"times_{BLACKWELL}.json", measured)
        assert choose(spec(), Config(), target(BLACKWELL)).kernel == kernel
        keys.append(fingerprint.fingerprint(Config()))
    assert len(set(keys)) == 3


SHIPPED = sorted((Path(times.__file__).parent / "data").glob("times_*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_table_can_be_read(path: Path) -> None:
    """Of a GPU that can be named, of known kernels, and for both directions of each kind."""
    assert SHIPPED
    arch = path.stem.removeprefix("times_")
    assert arch in NAMED_TARGETS
    rows = times._table(arch)
    assert {(each.passes, each.kind) for each in rows} == {
        (passes, kind) for passes in ("fwd", "bwd") for kind in KINDS
    }
    for each in rows:
        assert each.heads_q % each.heads_kv == 0
        assert set(each.microseconds) <= {*kernels.BUILT_IN, CORE}
        assert all(time > 0 for time in each.microseconds.values())
    assert len({(*vars(each).values(),)[:-1] for each in rows}) == len(rows)
