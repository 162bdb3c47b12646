"""Kernels that are watched: what they make is looked at, for one site.

That a kernel is watched stands in its name, as in "fa4@finite,warn@layers.0.attn (model.py:40)",
so that a cached graph watches what it was compiled to watch, whichever op it calls.
"""

from __future__ import annotations

from dataclasses import dataclass

_SEPARATOR = "@"


@dataclass(frozen=True)
class Watch:
    """How a site is watched.

    guard: "finite" or "oracle". action: "warn" or "error". every: which call of the site the
    oracle looks at, 1 for each. site: how people call it.
    """

    guard: str
    action: str
    every: int
    site: str


def site_name(name: str, source: str) -> str:
    """A site of this name (its module, or what kind it is), which is at `source`."""
    return f"{name} ({source})"


def split_site(site: str) -> tuple[str, str]:
    """What `site_name` has put together."""
    name, _, source = site.removesuffix(")").partition(" (")
    return name, source


def watched_name(kernel: str, watch: Watch) -> str:
    """The name of `kernel` under `watch`."""
    how = f"{watch.guard},{watch.action},{watch.every}"
    return _SEPARATOR.join((kernel, how, watch.site))


def plain_name(name: str) -> str:
    """The name of the kernel itself."""
    return name.partition(_SEPARATOR)[0]


def watch_of(name: str) -> Watch | None:
    """How the kernel of this name is watched; None if it is not."""
    if _SEPARATOR not in name:
        return None
    _, how, site = name.split(_SEPARATOR, 2)
    guard, action, every = how.split(",")
    return Watch(guard, action, int(every), site)
