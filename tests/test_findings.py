"""What of a report is a finding, by what it is known again, and the baseline that holds it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import reported_data

import pytest_fa_inductor
from fa_inductor.errors import OptionError
from fa_inductor.reporting import baseline, paths
from fa_inductor.reporting.data import merged
from fa_inductor.reporting.findings import findings
from fa_inductor.reporting.rules import BY_ID

ROOT = Path("/home/user/project")


@pytest.fixture
def data() -> dict[str, Any]:
    return reported_data.report(ROOT)


def test_there_is_a_finding_of_each_kind(data: dict[str, Any]) -> None:
    found = findings(data, ROOT)
    counts = Counter(each.rule for each in found)
    assert counts == {"graph-break": 1, "fallback": 2, "copy": 1, "recompile": 1, "nan": 1}
    assert set(BY_ID) == set(counts) == set(pytest_fa_inductor.FAIL_ON)
    by_rule = {each.rule: each for each in found}
    assert "GB0025 Call to `f()`" in by_rule["graph-break"].message
    assert "left to Python" in by_rule["graph-break"].message
    assert "compiled again: size mismatch" in by_rule["recompile"].message
    assert by_rule["copy"].message.startswith("cudnn reads a copy of k: stride 33 elements")


def test_one_finding_for_many_tests(data: dict[str, Any]) -> None:
    found = findings(merged([("one", data), ("two", data)]), ROOT)
    assert len(found) == 6
    assert {each.tests for each in found} == {("one", "two")}


def test_a_graph_of_ours_after_one_of_anothers_is_no_recompile(data: dict[str, Any]) -> None:
    """Dynamo counts what another backend compiled, too: nothing of ours is done twice."""
    data["graphs"] = data["graphs"][1:]
    assert "recompile" not in {each.rule for each in findings(data, ROOT)}


def test_keys_last_when_lines_move_and_on_another_machine(data: dict[str, Any]) -> None:
    elsewhere = Path("/builds/42")
    text = json.dumps(data).replace(str(ROOT), str(elsewhere))
    moved = json.loads(text.replace(".py:", ".py:1"))
    moved = json.loads(json.dumps(moved).replace("/usr/lib/python3/", "/opt/venv/lib/"))
    keys = [each.key(ROOT) for each in findings(data, ROOT)]
    assert [each.key(elsewhere) for each in findings(moved, elsewhere)] == keys
    assert len(set(keys)) == len(keys)
    data["sites"][0]["code"] = "another_line()"
    assert [each.key(ROOT) for each in findings(data, ROOT)] != keys


def _keys(data: dict[str, Any], rule: str) -> list[str]:
    return [each.key(ROOT) for each in findings(data, ROOT) if each.rule == rule]


def test_a_line_that_reads_like_a_known_one_is_new(data: dict[str, Any]) -> None:
    """Keys hold no line numbers: a copied line, fault and all, would hide behind the first."""
    known = _keys(data, "fallback")
    again = reported_data.site(ROOT, "layers.0", source=f"{ROOT}/models/attention.py:19")
    data["sites"].append(again)
    (new,) = set(_keys(data, "fallback")) - set(known)
    (found,) = (each for each in findings(data, ROOT) if each.key(ROOT) == new)
    assert found.source == again["source"]
    data["sites"].append({**again})  # the same once more is one finding
    assert len(_keys(data, "fallback")) == len(known) + 1
    del data["sites"][3:]
    # The same in a run that meets the second alone: it is what was known.
    data["sites"] = [again]
    assert set(_keys(data, "fallback")) <= set(known)


def test_another_reason_or_caller_is_new(data: dict[str, Any]) -> None:
    """... as models share a line of attention; a size in the reason is nothing new."""
    (site,) = data["sites"] = [reported_data.site(ROOT, "a", reasons={"fa4": ["33 of 8"]})]
    known = _keys(data, "fallback")
    data["sites"] = [{**site, "reasons": {"fa4": ["35 of 8"]}}]
    assert _keys(data, "fallback") == known
    data["sites"] = [{**site, "reasons": {"fa4": ["dropout_p > 0"]}}]
    assert _keys(data, "fallback") != known
    inner = site["stack"][1]
    for outer in ("models/other.py:5", "Other.forward"), ("models/model.py:5", "Other.forward"):
        caller = {"source": f"{ROOT}/{outer[0]}", "function": outer[1]}
        data["sites"] = [{**site, "stack": [caller, inner]}]
        assert _keys(data, "fallback") != known
    torch = {"source": "/usr/lib/site-packages/torch/nn/functional.py:6", "function": "f"}
    data["sites"] = [{**site, "stack": [site["stack"][0], torch, inner]}]
    assert _keys(data, "fallback") == known


def test_another_guard_is_a_new_recompile(data: dict[str, Any]) -> None:
    known = _keys(data, "recompile")
    data["graphs"].append(reported_data.graph(ROOT, 2, "size mismatch"))
    assert _keys(data, "recompile") == known
    (found,) = (each for each in findings(data, ROOT) if each.rule == "recompile")
    assert found.message == "Model.forward was compiled again (2 times): size mismatch"
    data["graphs"].append(reported_data.graph(ROOT, 3, "grad mode"))
    assert len(_keys(data, "recompile")) == 2


def test_a_model_that_two_tests_share_is_compiled_again_in_the_second(data: dict[str, Any]) -> None:
    first, second = ({**data, "graphs": [graph]} for graph in data["graphs"])
    (found,) = (
        each
        for each in findings(merged([("b", first), ("a", second)]), ROOT)
        if each.rule == "recompile"
    )
    assert found.tests == ("a",)


def test_paths_are_portable() -> None:
    assert paths.shown(f"{ROOT}/a b/c.py:3", ROOT) == "a b/c.py:3"
    assert paths.shown("/usr/lib/c.py:3", ROOT) == "/usr/lib/c.py:3"
    inside = f"{ROOT}/.venv/lib/site-packages/lib/c.py"
    assert paths.inside(inside, ROOT) is None
    assert paths.portable(inside, ROOT) == "site-packages/lib/c.py"
    assert paths.shown("unknown", ROOT) == "unknown"


# --- Baseline -------------------------------------------------------------------------------------


def test_a_baseline_is_read_back(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "folder" / "baseline.json"
    found = findings(data, ROOT)
    baseline.write(path, found, ROOT)
    assert baseline.read(path) == {each.key(ROOT) for each in found}
    assert str(ROOT) not in path.read_text()
    first = path.read_text()
    baseline.write(path, reversed(found), ROOT)
    assert path.read_text() == first
    for text in ("[]", "{", '{"baseline_version": 7}', '{"baseline_version": 1}'):
        path.write_text(text)
        with pytest.raises(OptionError, match=r"baseline\.json"):
            baseline.read(path)
