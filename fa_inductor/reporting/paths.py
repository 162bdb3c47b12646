"""Where something is, in the words of whoever reads the report elsewhere."""

from __future__ import annotations

from pathlib import Path, PurePath


def split(source: str) -> tuple[str, int]:
    """The path and the line of `file:line`; line 0 where there is none."""
    path, _, line = source.rpartition(":")
    return (path, int(line)) if line.isdigit() and path else (source, 0)


def installed(path: str) -> str | None:
    """`path` relative to the folder that packages are installed into, None if it is in none."""
    parts = PurePath(path).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(folder) :])
    return None


def inside(path: str, root: Path) -> str | None:
    """`path` relative to `root`, with "/" between, or None if it is elsewhere.

    An environment inside the root is elsewhere: what is installed there is nobody's checkout.
    """
    if installed(path) is not None:
        return None
    try:
        return Path(path).resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        return None


def portable(path: str, root: Path) -> str:
    """`path` as it is on every machine: relative to the root or to where packages are installed."""
    package = installed(path)
    if package is not None:
        return f"site-packages/{package}"
    return inside(path, root) or PurePath(path).as_posix()


def shown(source: str, root: Path) -> str:
    """`file:line` with the path as `portable` has it."""
    path, line = split(source)
    return f"{portable(path, root)}:{line}" if line else source
