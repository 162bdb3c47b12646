"""What is made of a report: schema, findings, Markdown, SARIF, HTML, JUnit properties, baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import reported_data
from explained_model import Model, make_mask, make_x
from markdown_it import MarkdownIt
from report_readers import Page, check_report, check_sarif

import fa_inductor
from fa_inductor.errors import OptionError
from fa_inductor.reporting import FORMATS, render
from fa_inductor.reporting.data import merged, read
from fa_inductor.reporting.findings import findings
from fa_inductor.reporting.junit import properties
from fa_inductor.reporting.markdown import markdown
from fa_inductor.reporting.page import page
from fa_inductor.reporting.rules import RULES
from fa_inductor.reporting.sarif import sarif

ROOT = Path("/home/user/project")


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """The report of a real model: fallback, graph break, symbolic sizes."""
    x = make_x()
    fa_inductor.explain(Model(), options={"fa.kernels": ("reference",)})(x, make_mask())
    explain = fa_inductor.explain(Model(), options={"fa.kernels": ("fa4", "reference")})
    return explain(x, make_mask()).to_json()


@pytest.fixture
def data() -> dict[str, Any]:
    return reported_data.report(ROOT)


# --- JSON -----------------------------------------------------------------------------------------


def test_reports_are_of_their_schema(real: dict[str, Any], data: dict[str, Any]) -> None:
    check_report(real)
    check_report(data)
    check_report(merged([("a.py::test", real), ("", data)]))


@pytest.mark.parametrize("part", ["sites", "graphs", "graph_breaks", "not_finite"])
def test_the_schema_refuses_what_is_missing_or_unknown(part: str, data: dict[str, Any]) -> None:
    for key in (*data[part][0], "unknown"):
        spoilt = json.loads(json.dumps(data))
        spoilt[part][0][key] = spoilt[part][0].pop(key) if key != "unknown" else 1
        if key != "unknown":
            del spoilt[part][0][key]
        with pytest.raises(jsonschema.ValidationError):
            check_report(spoilt)


def test_a_report_is_read_back(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "report.json"
    path.write_text(render(data, "json", ROOT))
    assert read(path) == data
    path.write_text(json.dumps({**data, "schema_version": 1}))
    with pytest.raises(OptionError, match=r"schema_version 1.*reads 2"):
        read(path)
    for text in ("[]", "{", "{}"):
        path.write_text(text)
        with pytest.raises(OptionError, match=r"report\.json"):
            read(path)


def test_merged_reports_name_their_test_and_count_anew(data: dict[str, Any]) -> None:
    covered = {**data, "sites": data["sites"][2:]}
    both = merged([("one", data), ("two", covered)])
    assert [site["test"] for site in both["sites"]] == ["one", "one", "one", "two"]
    assert both["coverage"] == 0.5
    assert "test" not in data["sites"][0]  # what was given is as it was


def test_an_unknown_format_is_an_error_that_helps(data: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="Did you mean 'markdown'"):
        render(data, "markdwon", ROOT)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_names_sites_kernels_and_breaks(form: str, real: dict[str, Any]) -> None:
    text = render(real, form, Path(__file__).parent)
    for word in ("explained_model.py", "GB0025", "attn_mask float32"):
        assert word in text.replace("\\_", "_").replace("&#95;", "_"), word


# --- SARIF ----------------------------------------------------------------------------------------


def _sarif(data: dict[str, Any], known: set[str] | None = None) -> dict[str, Any]:
    """The only run of the log, which is valid."""
    log = json.loads(sarif(data, ROOT, known))
    check_sarif(log)
    (run,) = log["runs"]
    return run


def test_sarif_is_of_the_public_schema(real: dict[str, Any], data: dict[str, Any]) -> None:
    _sarif(real)
    _sarif(data, set())
    spoilt = json.loads(sarif(data, ROOT))
    spoilt["runs"][0]["results"][0]["level"] = "loud"
    with pytest.raises(jsonschema.ValidationError):
        check_sarif(spoilt)


def test_sarif_has_rules_with_help_and_results_at_the_users_lines(data: dict[str, Any]) -> None:
    run = _sarif(data)
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.id for rule in RULES]
    assert all(rule["help"]["text"] for rule in rules)
    places = {}
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert physical["artifactLocation"]["uriBaseId"] == "SRCROOT"
        line = physical["region"]["startLine"]
        places[result["ruleId"]] = (physical["artifactLocation"]["uri"], line)
    assert places == {
        # Not where the library breaks the graph, but where the user calls it.
        "graph-break": ("models/my%20model.py", 12),
        "fallback": ("models/attention.py", 7),
        "copy": ("models/attention.py", 7),
        "recompile": ("models/model.py", 3),
        "nan": ("models/model.py", 3),
    }


def test_sarif_joins_layers_that_are_alike(data: dict[str, Any]) -> None:
    run = _sarif(data)
    (fallback,) = (result for result in run["results"] if result["ruleId"] == "fallback")
    assert "(in layers.0, layers.1)" in fallback["message"]["text"]
    prints = [result["partialFingerprints"]["faInductor/v1"] for result in run["results"]]
    assert len(set(prints)) == len(prints)


def test_sarif_has_the_stack_innermost_first(data: dict[str, Any]) -> None:
    (broken,) = (r for r in _sarif(data)["results"] if r["ruleId"] == "graph-break")
    frames = [f["location"]["message"]["text"] for f in broken["stacks"][0]["frames"]]
    assert frames == ["call", "forward"]
    assert "site-packages/library/f.py:20" in broken["message"]["text"]


def test_sarif_places_a_librarys_site_at_the_users_line(data: dict[str, Any]) -> None:
    """... and where no line is the user's, it names no machine's folders."""
    library = "/opt/python/site-packages/library/a b.py:20"
    data["sites"][0]["source"] = library
    data["sites"][0]["stack"][1] = {"source": library, "function": "attend"}
    data["sites"][1].update(source=library, stack=[{"source": library, "function": "attend"}])
    places = [
        result["locations"][0]["physicalLocation"]
        for result in _sarif(data)["results"]
        if result["ruleId"] == "fallback"
    ]
    found = [(each["artifactLocation"], each["region"]["startLine"]) for each in places]
    assert found == [
        ({"uri": "models/model.py", "uriBaseId": "SRCROOT"}, 5),
        ({"uri": "library/a%20b.py", "uriBaseId": "PACKAGES"}, 20),
    ]
    assert "/opt" not in sarif(data, ROOT)


def test_sarif_says_what_is_new(data: dict[str, Any]) -> None:
    found = findings(data, ROOT)
    known = {each.key(ROOT) for each in found if each.rule in ("nan", "copy")}
    states = {r["ruleId"]: r["baselineState"] for r in _sarif(data, known)["results"]}
    old = {rule for rule, state in states.items() if state == "unchanged"}
    assert old == {"nan", "copy"}
    assert all("baselineState" not in result for result in _sarif(data)["results"])


# --- Markdown -------------------------------------------------------------------------------------


def test_markdown_is_tables_that_hold(data: dict[str, Any]) -> None:
    """What a report quotes may hold bars, HTML and markup: it shows as it is."""
    text = markdown(data, ROOT, new=())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows if "finding" in line} == {4}
    html = MarkdownIt("commonmark").enable("table").render(text)
    page = Page.of(html)
    assert page.counts["tr"] == 1 + len(RULES) + 1 + 2
    assert {len(row) for row in page.rows} == {3, 5}
    # A bar too many would end the cell, and the rest be dropped.
    assert f"mask ({reported_data.ODD})" in [row for row in page.rows if len(row) == 5][1][-1]
    assert "$" not in text.replace("\\$", "")
    assert page.counts["script"] == page.counts["a"] == page.counts["em"] == 0
    assert reported_data.ODD in page.text
    assert "2 sites" in page.text
    assert "models/my model.py:12" in page.text


def test_markdown_says_how_many_are_new(data: dict[str, Any]) -> None:
    keys = [each.key(ROOT) for each in findings(data, ROOT) if each.rule == "fallback"]
    text = markdown(data, ROOT, new=keys[:1])
    assert "| `fallback` | 2 | 1 |" in text
    assert "| `nan` | 1 | 0 |" in text
    assert "| `fallback` | 2 |\n" in markdown(data, ROOT)
    new = text.partition("### New\n")[2].partition("###")[0]
    assert new.count("- `fallback` at <code>models/attention.py:7</code> in <code>layers.0") == 1
    assert "layers.1" not in new
    assert "### New" not in markdown(data, ROOT, new=())


# --- HTML -----------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(data: dict[str, Any]) -> None:
    found = Page.of(page(data, ROOT, new=()))
    assert found.external == []
    assert found.counts["script"] == found.counts["link"] == found.counts["img"] == 0
    assert "url(" not in found.style
    assert "@import" not in found.style
    assert "prefers-color-scheme: dark" in found.style
    assert found.counts["title"] == 1


def test_the_page_shows_it_all(data: dict[str, Any]) -> None:
    found = Page.of(page(data, ROOT))
    assert len([row for row in found.rows if row[0].startswith("models/attention.py:7")]) == 2
    for text in (reported_data.ODD, "33%", "layers.0 … layers.1", "GB0025", "Do not call it."):
        assert text in found.text
    for text in ("models/my model.py:12", "output['x'] of Model", "size mismatch", "copied: k"):
        assert text in found.text
    assert " new" not in found.text
    assert "· 0 new" in Page.of(page(data, ROOT, new=())).text
    new = [each.key(ROOT) for each in findings(data, ROOT) if each.rule == "copy"]
    text = Page.of(page(data, ROOT, new=new)).text
    (section,) = text.partition("New findings")[2].split("Sites by kernel")[:1]
    assert "cudnn reads a copy of k" in section
    assert "fallback" not in section


def test_a_page_without_anything_is_a_page() -> None:
    found = Page.of(page(merged([]), ROOT))
    assert "0 attention site(s)" in found.text


# --- JUnit ----------------------------------------------------------------------------------------


def test_properties_are_text(data: dict[str, Any]) -> None:
    found = properties(data, ROOT)
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in found)
    named = dict(found)
    assert (named["fa.coverage"], named["fa.sites"]) == ("0.3333", "3")
    assert (named["fa.sites.fallback"], named["fa.sites.cudnn"]) == ("2", "1")
    assert named["fa.finding.nan"].startswith("models/model.py:3: output['x']")
    assert len([name for name, _ in found if name == "fa.finding.fallback"]) == 2
