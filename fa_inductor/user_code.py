"""The user's own code: a frame of it, the text of a line, the function that is around a line."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class StackFrame:
    """One frame of the user's stack: `file:line`, and the function that the line is in."""

    source: str
    function: str

    def to_json(self) -> dict[str, str]:
        """Both, with the function as `qualified_function` has it."""
        return {
            "source": self.source,
            "function": qualified_function(self.source, self.function),
        }


def source_line(source: str) -> str:
    """The text of the user's line at `file:line`, or an empty string."""
    path, _, line = source.rpartition(":")
    return linecache.getline(path, int(line)).strip() if line.isdigit() else ""


def qualified_function(source: str, name: str) -> str:
    """`Attention.forward` for the `forward` around `file:line`; `name` where the text is unknown.

    Dynamo tells no more than a function's bare name, and a file may hold many a `forward`.
    """
    path, _, line = source.rpartition(":")
    if not line.isdigit():
        return name
    around = [
        (first, qualified)
        for first, last, qualified in _functions("".join(linecache.getlines(path)))
        if first <= int(line) <= last and qualified.rpartition(".")[2] == name
    ]
    return max(around)[1] if around else name


@functools.lru_cache(maxsize=32)
def _functions(text: str) -> tuple[tuple[int, int, str], ...]:
    """First line, decorators included, last line and qualified name of each function."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):  # a notebook's cell with magics, bytes
        return ()
    return tuple(_functions_in(module, ""))


def _functions_in(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{prefix}{child.name}."
            if not isinstance(child, ast.ClassDef):
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                yield first, child.end_lineno or child.lineno, inner[:-1]
        yield from _functions_in(child, inner)
