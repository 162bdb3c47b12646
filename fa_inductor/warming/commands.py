"""`fa-inductor warm`, `cache` and `bundle`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .. import object_cache
from ..errors import FaInductorError
from ..target import Target


def warm_command(load: Callable[[str], Callable[[], Any]]) -> click.Command:
    """load: finds the function called `package.module:function`."""

    @click.command("warm")
    @click.argument("what", nargs=-1, required=True)
    @click.option("--target", "targets", required=True, help="sm_90a,sm_100a: present or not.")
    @click.option("--jobs", type=int, help="Processes at a time.  [default: number of CPUs]")
    @click.option("--kernels", default="fa4,cudnn", show_default=True, help="As in explain.")
    def warm(what: tuple[str, ...], targets: str, jobs: int | None, kernels: str) -> None:
        """Compile every kernel that WHAT needs, for all lengths, without a GPU.

        Each WHAT is a `package.module:function` that returns (fn, args, kwargs), traced on fake CPU
        tensors, or a file of JSON lines: specs, or what FA_INDUCTOR_RECORD=file has recorded.
        """
        from rich.console import Console
        from rich.progress import Progress

        from .warm import collected, warm_jobs

        options = {"fa.kernels": tuple(name.strip() for name in kernels.split(","))}
        try:
            names = [Target.of_name(name.strip()).arch for name in targets.split(",")]
            wanted: dict[str, list[Any]] = {name: [] for name in names}
            for each in what:
                source = each if Path(each).exists() else load(each)
                for name in names:
                    wanted[name] += collected(source, name, options)
            with Progress(transient=True) as shown:
                tasks = {name: shown.add_task(name, total=len(wanted[name])) for name in names}
                summary = warm_jobs(wanted, jobs, lambda name, _: shown.advance(tasks[name]))
        except FaInductorError as error:
            raise click.ClickException(str(error)) from error
        Console().print(summary)
        if summary.failed:
            raise click.exceptions.Exit(1)

    return warm


@click.group()
def cache() -> None:
    """The compiled kernels that are kept."""


@cache.command("list")
@click.option("-v", "--verbose", is_flag=True, help="Each kernel, with its key.")
def list_(verbose: bool) -> None:
    """What is kept, for which GPUs and versions."""
    click.echo(f"{object_cache.root()}")
    for store in object_cache.stores():
        entries = list(store.entries())
        size = sum(entry.size for entry in entries)
        known = {k: v for k, v in store.environment.items() if "sources" not in k}
        versions = ", ".join(f"{name} {value}" for name, value in known.items())
        click.echo(f"{store.folder.name}: {len(entries)} kernels, {size / 2**20:.1f} MiB")
        click.echo(f"  {versions}")
        for entry in entries if verbose else ():
            fields = ", ".join(f"{name}={value}" for name, value in entry.fields.items())
            click.echo(f"  {entry.name} {entry.seconds:.1f} s, {entry.size} bytes: {fields}")


@cache.command()
@click.option("--max-mib", type=float, help="Keep at most so much, what was used last.")
@click.option("--max-days", type=float, help="Keep what was used in so many days.")
def prune(max_mib: float | None, max_days: float | None) -> None:
    """Remove old kernels, and damaged ones that were put aside."""
    removed = object_cache.prune(None if max_mib is None else int(max_mib * 2**20), max_days)
    click.echo(f"removed {removed.objects} kernels, {removed.bytes / 2**20:.1f} MiB")


@cache.command()
def verify() -> None:
    """Look at every kernel, and put damaged ones aside."""
    started = time.perf_counter()
    intact, damaged = object_cache.verify()
    for entry in damaged:
        click.echo(f"damaged: {entry.path}")
    seconds = time.perf_counter() - started
    click.echo(f"{len(intact)} intact, {len(damaged)} damaged, {seconds:.1f} s")
    if damaged:
        raise click.exceptions.Exit(1)


@click.group()
def bundle() -> None:
    """All that a cold start would compile, in one file."""


@bundle.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--target", help="Only kernels for this GPU.")
def save(file: Path, target: str | None) -> None:
    """Write FILE."""
    from . import bundle as bundles

    _echo(lambda: bundles.save(file, target))


@bundle.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--any-target", is_flag=True, help="Do not compare it with the GPU that is here.")
def load(file: Path, any_target: bool) -> None:
    """Unpack FILE into the cache; refused where it was made for another GPU or other versions."""
    import torch

    from . import bundle as bundles

    def run() -> Any:
        if any_target or not torch.cuda.is_available():
            return bundles.load(file)
        from ..kernels import fa4, fa4_objects

        return bundles.load(file, fa4_objects.environment(fa4._interface()))

    _echo(run)


def _echo(run: Callable[[], Any]) -> None:
    try:
        click.echo(str(run()))
    except FaInductorError as error:
        raise click.ClickException(str(error)) from error
