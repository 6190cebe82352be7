"""`attnlens profile`: measure the time of each part of the graph by text length."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.config_option import GRAPH_PRECISIONS, config_option
from attnlens_cli.commands.options import bundle_argument, measurements_json_option
from attnlens_cli.files.output_file import checked_path, replacing
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.frame.signals import stopped_by_signals
from attnlens_cli.show.progress import shown_stages

if TYPE_CHECKING:
    from attnlens_analysis.profile import Profile
    from attnlens_server.config import Precision

EPILOG = """\b
Example:
  attnlens profile bundles/minilm
  attnlens profile bundles/minilm --lengths 16..512 --html profile.html
  attnlens profile bundles/minilm --lengths 100,200,400 --json | jq '.lengths[].shares'"""

_measure, _output = in_section("Measurement"), in_section("Output")


@click.command(cls=Command, epilog=EPILOG)
@bundle_argument
@_measure(
    "--lengths",
    default="16..4096",
    show_default=True,
    help="Lengths in tokens: a list such as 16,100,500, or a range in powers of two. Lengths that exceed the "
    "model's maximum or the memory are skipped.",
)
@config_option("precision", "Precision of the graph for embeddings.", GRAPH_PRECISIONS, section="Measurement")
@_measure(
    "--threads",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Number of threads of ONNX Runtime.",
)
@measurements_json_option
@_output("--html", metavar="FILE", help="Write a page with a chart (.html).")
@_output("--svg", metavar="FILE", help="Write only the chart (.svg).")
def profile(
    directory: Path,
    lengths: str,
    threads: int,
    as_json: bool,
    html: str | None,
    svg: str | None,
    **options: Any,  # noqa: ANN401 - a field of ServerConfig
) -> None:
    """Show the share of time of each part of the bundle's graph by text length.

    Runs the graph for embeddings on the CPU with ONNX Runtime's profiler, one text at a time, with any
    attention mechanism. Run nothing else on the machine at the same time. Prints a warning if repeated runs
    disagree.
    """
    paths = {
        suffix: checked_path(name, f"--{suffix[1:]}", (suffix,))
        for suffix, name in ((".html", html), (".svg", svg))
        if name
    }
    from attnlens_analysis.errors import LengthError
    from attnlens_analysis.profile import chosen_lengths, measure, parse_lengths, reliability
    from attnlens_server.bundle import open_bundle

    precision: Precision = options.get("precision", "fp32")
    try:
        requested = parse_lengths(lengths)
        bundle = open_bundle(directory, precision)
        usable, messages = chosen_lengths(bundle, requested)
    except LengthError as error:
        raise click.UsageError(str(error)) from error
    for message in messages:
        click.echo(message, err=True)
    with stopped_by_signals(), shown_stages() as progress:
        measured = measure(
            bundle,
            usable,
            threads=threads,
            progress=lambda done, total: progress("profiling", f"{usable[done]:,} tokens", done, total),
        )
    if warning := reliability(measured):
        click.echo(warning, err=True)
    _write(measured, paths)
    if as_json:
        click.echo(json.dumps(_as_json(measured, messages), indent=2))
    else:
        from attnlens_cli.show.studies import show_profile

        show_profile(measured)


def _write(measured: "Profile", paths: dict[str, Path]) -> None:
    from attnlens_analysis.profile import as_page, chart

    for suffix, render in ((".html", as_page), (".svg", chart)):
        if suffix in paths:
            with replacing(paths[suffix]) as file:
                file.write(render(measured).encode())
            click.echo(f"{paths[suffix]}: {measured.model_name}", err=True)


def _as_json(measured: "Profile", messages: list[str]) -> dict[str, Any]:
    return {
        "model": measured.model_name,
        "precision": measured.precision,
        "mechanisms": list(measured.mechanisms),
        "threads": measured.threads,
        "left_out": messages,
        "attention_overtakes_at": measured.overtakes_at,
        "lengths": [
            dataclasses.asdict(length) | {"shares": length.shares, "attention_share": length.attention_share}
            for length in measured.lengths
        ],
    }
