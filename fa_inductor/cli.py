"""`fa-inductor` and `python -m fa_inductor`: explain a model, show reports, check a machine."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from . import __version__, reporting
from .errors import FaInductorError, OptionError
from .reporting.data import merged, read
from .warming import commands

_form = click.option(
    "--format",
    "form",
    type=click.Choice(reporting.FORMATS),
    default="rich",
    show_default=True,
    help="How to show the report.",
)
_output = click.option(
    "--output", type=click.Path(path_type=Path), help="Write it to this file, not to the terminal."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fa-inductor")
def main() -> None:
    """Attention in compiled PyTorch graphs: what runs where, and why."""


@main.command()
@click.argument("make")
@click.option("--target", help="Plan for this GPU (sm_90a, sm_100a, ...), present or not.")
@click.option("--kernels", default="fa4,cudnn", show_default=True, help="Kernels, by preference.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write JSON here.")
@_form
@_output
def explain(
    make: str,
    target: str | None,
    kernels: str,
    json_file: Path | None,
    form: str,
    output: Path | None,
) -> None:
    """Report every attention site of MAKE, a `package.module:function` that returns
    (fn, args, kwargs)."""
    from .explaining import explain as explain_function

    try:
        fn, args, kwargs = _load(make)()
        options = {"fa.kernels": _names(kernels)}
        report = explain_function(fn, options, target)(*args, **kwargs)
    except FaInductorError as error:
        raise click.ClickException(str(error)) from error
    _show(report.to_json(), form, output)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(report.dumps() + "\n", encoding="utf-8")


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@_form
@_output
def report(files: tuple[Path, ...], form: str, output: Path | None) -> None:
    """Show reports that were written as JSON, several as one: `fa-inductor report a.json
    --format markdown`."""
    try:
        data = [read(file) for file in files]
    except FaInductorError as error:
        raise click.ClickException(str(error)) from error
    whole = data[0] if len(data) == 1 else merged(("", each) for each in data)
    _show(whole, form, output)


def _show(data: Mapping[str, Any], form: str, output: Path | None) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(reporting.render(data, form), encoding="utf-8")
    elif form == "rich":
        from rich.console import Console

        from .reporting.table import table

        Console().print(table(data))
    else:
        click.echo(reporting.render(data, form), nl=False)


@main.command()
@click.argument("functions", nargs=-1)
@click.option("--lengths", help="Sequence lengths, separated by commas.")
@click.option("--ways", help="eager, compiled, dynamic, reduce-overhead, cuda graph, ...")
@click.option("--data", default="normal", show_default=True, help="Kinds of data, or all.")
@click.option("--backend", default="fa_inductor", show_default=True, help="Of torch.compile.")
@click.option("--not-causal", is_flag=True, help="FUNCTIONS compute attention without a mask.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for JSON, PNG, scripts.")
@click.option("--jobs", default=1, show_default=True, help="Processes at a time, on one GPU.")
@click.option("--model", help="package.module:make, as for explain: name its first bad attention.")
@click.option("--kernels", default="fa4,cudnn", show_default=True, help="For --model.")
@click.option("--self-test", is_flag=True, help="Find faults that are known to be there.")
def probe(
    functions: tuple[str, ...],
    lengths: str | None,
    ways: str | None,
    data: str,
    backend: str,
    not_causal: bool,
    output: Path | None,
    jobs: int,
    model: str | None,
    kernels: str,
    self_test: bool,
) -> None:
    """Run attention over lengths and ways and judge every cell: FUNCTIONS are kernels ("fa4",
    "core") or `package.module:function` of (q, k, v). Exit status 1 if a cell is bad."""
    from .probing import console

    try:
        if self_test:
            sys.exit(console.run_self_test())
        if model is not None:
            sys.exit(console.run_bisect(_load(model)(), _names(kernels)))
        subjects = [_load(name) if ":" in name else name for name in functions]
        cells = (lengths, ways, data)
        how = (backend, not not_causal, output, jobs)
        sys.exit(console.run(subjects, cells, *how))
    except FaInductorError as error:
        raise click.ClickException(str(error)) from error


@main.command()
def doctor() -> None:
    """Versions, the GPU, and what each kernel can run here."""
    from rich.console import Console

    from .doctor import diagnosis

    Console().print(diagnosis())


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(","))


def _load(name: str) -> Callable[[], Any]:
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise OptionError(f"{name!r}: expected package.module:function.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        raise OptionError(f"{name!r}: there is no module {missing.name!r}.") from missing
    try:
        return getattr(module, attribute)
    except AttributeError as missing:
        raise OptionError(f"{name!r}: {module_name} has no {attribute!r}.") from missing


main.add_command(commands.warm_command(_load))
main.add_command(commands.cache)
main.add_command(commands.bundle)
