"""The package from outside: what importing it costs, and which way its modules import."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fa_inductor
from fa_inductor import patterns

ALLOWED_SECONDS = 0.3
HEAVY = ("flash_attn", "cutlass", "cudnn", "quack", "triton", "torch._dynamo", "torch._inductor")

TRITON = ("kernels/scan.py",)  # Triton's decorators stand around functions, not inside them

# Modules in the order in which they may import each other: each only what stands before it.
# A package counts as one module here; inside it the order is its own.
ORDER = (
    ("errors", "config", "torch_compat", "graph_writes", "user_code", "watch", "exact"),
    (
        "dynamo_compat",
        "graph_breaks",
        "symbolic",
        "problem",
        "spec",
        "varlen_problem",
        "masked_problem",
        "mask_text",
        "numerics",
        "inductor_compat",
    ),
    ("target", "layout"),
    ("support_row",),
    ("support_fa4", "support_cudnn"),
    ("support", "call_cache", "jit_monitor", "object_store"),
    ("object_cache",),
    ("kernels",),
    ("op_schemas", "op_memory"),
    ("op_checks", "repairs"),
    ("op_calls",),
    ("op_autograd",),
    ("ops",),
    ("variant_calls", "varlen_checks", "masked_checks"),
    ("variant_ops", "varlen_calls", "masked_calls"),
    ("varlen_ops", "packed_ops", "masked_ops", "mask_blocks"),
    ("substitutes",),
    ("guards",),
    ("masks",),
    ("patterns",),
    ("times",),
    ("select",),
    ("scopes", "rewrite"),
    ("ranges", "reporting"),
    ("report",),
    ("compile_pass", "fingerprint"),
    ("explaining", "backend"),
    ("warming",),
    ("doctor", "matrix", "demo", "probing", "pytest_plugin"),
    ("cli",),
    ("__main__",),
)
INSIDE = {
    "warming": (
        ("__init__",),
        ("jobs", "targets", "no_gpu"),
        ("op_jobs", "compiling"),
        ("record", "compile_only"),
        ("tracing", "pytest_compile_only", "worker", "bundle"),
        ("warm",),
        ("commands",),
    ),
    "probing": (
        ("__init__",),
        ("poison", "oracle", "cells", "data"),
        ("subjects", "launches"),
        ("ways", "fa4_control"),
        ("controls",),
        ("judging",),
        ("results", "parallel"),
        ("probe", "bisect"),
        ("console",),
    ),
    "kernels": (
        ("spot_check", "scan"),
        ("looks", "replayed"),
        ("watched",),
        ("__init__",),
        ("reference", "variants", "fa4_launch", "fa4_objects", "cudnn_graph"),
        ("cudnn_plans",),
        ("fa4", "cudnn", "reference_varlen", "reference_masked"),
        ("fa4_varlen", "fa4_masked"),
    ),
    "masks": (
        ("__init__",),
        ("expressions",),
        ("spaces", "known_floats"),
        ("graphs",),
        ("graph_ops", "graph_views"),
        ("terms",),
    ),
    "reporting": (
        ("__init__",),
        ("paths", "rules", "data"),
        ("findings",),
        ("table", "markdown", "sarif", "page", "junit", "baseline"),
    ),
    "patterns": (
        ("family",),
        ("bias", "packed", "visible", "mha_examples", "eager_examples", "calls"),
        ("views", "writes"),
        ("products", "repeat_kv"),
        ("contiguous",),
        ("lineage",),
        ("score_steps",),
        ("scores", "operands"),
        ("masked",),
        ("assumed",),
        ("score_bias", "score_band"),
        ("sdpa", "mha", "op_call", "eager"),
        ("__init__",),
    ),
}

PACKAGE = Path(fa_inductor.__file__).parent
FOLDERS = {
    "": PACKAGE,
    "kernels": PACKAGE / "kernels",
    "masks": PACKAGE / "masks",
    "warming": PACKAGE / "warming",
    "probing": PACKAGE / "probing",
    "reporting": PACKAGE / "reporting",
    "patterns": Path(patterns.__file__).parent,
}
SOURCES = {
    f"{folder}/{path.name}".lstrip("/"): path
    for folder, where in FOLDERS.items()
    for path in sorted(where.glob("*.py"))
}


# --- What the import costs ------------------------------------------------------------------------

_PROGRAM = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import fa_inductor
seconds, after = time.perf_counter() - start, set(sys.modules)
print(json.dumps([seconds, sorted(after - before), torch.cuda.is_initialized()]))
"""


def _import_once() -> tuple[float, list[str], bool]:
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    seconds, modules, cuda_initialised = json.loads(process.stdout)
    return seconds, modules, cuda_initialised


def test_import_is_quick_and_brings_in_nothing_heavy() -> None:
    """Best of five: the machine may be busy, the import itself is either quick or not."""
    best = float("inf")
    for _ in range(5):
        seconds, modules, cuda_initialised = _import_once()
        heavy = [m for m in modules if any(m == h or m.startswith(h + ".") for h in HEAVY)]
        assert (heavy, cuda_initialised) == ([], False)
        best = min(best, seconds)
        if best < ALLOWED_SECONDS:
            return
    pytest.fail(
        f"import fa_inductor took {best:.2f} s over import torch, {ALLOWED_SECONDS} allowed"
    )


# --- Which way imports go -------------------------------------------------------------------------


def _module_level(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run with the module: not those inside functions, nor for type checkers."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting.extend(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))


def _imported(source: str) -> Iterator[tuple[str, ...]]:
    """Dotted paths inside fa_inductor that a source file imports, `()` for the package itself."""
    package = source.split("/")[:-1]
    for node in _module_level(ast.parse(SOURCES[source].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif node.level == 0:
            names = [(node.module or "").split(".")]
        else:
            base = ["fa_inductor", *package[: len(package) + 1 - node.level]]
            base += node.module.split(".") if node.module else []
            # `from . import x` names a module or something that the package itself defines.
            names = [[*base, alias.name] for alias in node.names]
        for name in names:
            if name[0] == "fa_inductor":
                yield tuple(name[1:])


def test_the_order_is_the_one_that_is_told() -> None:
    told = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    order = told[told.index("`errors,") + 1 : told.index("-> __main__`") + len("-> __main__")]
    groups = [[name.strip() for name in group.split(",")] for group in order.split("->")]
    assert groups == [list(group) for group in ORDER]


def _rank(order: tuple[tuple[str, ...], ...], name: str) -> int:
    """Position of a module, counting on within a group."""
    return [module for group in order for module in group].index(name)


def _top(source: str) -> str:
    return source.split("/")[0].removesuffix(".py")


def test_every_module_has_its_place() -> None:
    placed = [module for group in ORDER for module in group]
    assert len(placed) == len(set(placed))
    assert {_top(source) for source in SOURCES} - {"__init__"} == set(placed)
    for folder, order in INSIDE.items():
        inside = {s.split("/")[1].removesuffix(".py") for s in SOURCES if _top(s) == folder}
        assert inside == {module for group in order for module in group}


@pytest.mark.parametrize("source", [s for s in SOURCES if s != "__init__.py"])
def test_imports_go_one_way(source: str) -> None:
    for path in _imported(source):
        target = path[0] if path else ""
        if target not in {_top(s) for s in SOURCES}:
            continue  # a name that the package itself defines, such as __version__
        if target != _top(source):
            assert _rank(ORDER, target) < _rank(ORDER, _top(source)), ".".join(path)
        elif "/" in source and len(path) > 1:
            order = INSIDE[target]
            own = source.split("/")[1].removesuffix(".py")
            if path[1] in {module for group in order for module in group}:
                assert _rank(order, path[1]) < _rank(order, own), ".".join(path)


def test_the_order_test_sees_imports() -> None:
    """... so that it cannot pass by looking at nothing."""
    assert ("errors", "OptionError") in set(_imported("backend.py"))
    assert ("kernels",) in set(_imported("rewrite.py"))
    assert ("patterns", "family", "Scope") in set(_imported("scopes.py"))
    assert ("spec", "AttentionSpec") in set(_imported("patterns/sdpa.py"))
    assert ("target", "TESTED_LIBRARIES") in set(_imported("kernels/fa4.py"))


def test_what_is_written_in_triton_is_imported_inside_functions_only() -> None:
    importing = {
        source
        for source, path in SOURCES.items()
        for node in _module_level(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and "scan" in [alias.name for alias in node.names]
    }
    assert not importing


@pytest.mark.parametrize("source", [source for source in SOURCES if source not in TRITON])
def test_kernel_libraries_are_imported_inside_functions_only(source: str) -> None:
    for node in _module_level(ast.parse(SOURCES[source].read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & set(HEAVY)


# --- How a source file looks ----------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_is_at_most_350_lines(source: str) -> None:
    assert len(SOURCES[source].read_text().splitlines()) <= 350


@pytest.mark.parametrize("source", SOURCES)
def test_every_except_names_a_class_and_none_names_all(source: str) -> None:
    for node in ast.walk(ast.parse(SOURCES[source].read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}"
            assert ast.unparse(node.type) not in ("Exception", "BaseException"), node.lineno
