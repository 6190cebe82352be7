"""`attnlens profile DIR`: which part of the graph takes the time, by length."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.config_option import GRAPH_PRECISIONS, config_option
from attnlens_cli.files.new_file import checked_path, replacing
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.frame.stopping import stopped_by_signals
from attnlens_cli.show.progress import shown_stages

if TYPE_CHECKING:
    from attnlens_analysis.profile import Profile
    from attnlens_server.config import Precision

EPILOG = """\b
Example:
  attnlens profile bundles/minilm
  attnlens profile bundles/minilm --lengths 16..512 --html profile.html
  attnlens profile bundles/minilm --lengths 100,200,400 --json | jq '.lengths[].shares'"""

_MB = 1e6
_HEADINGS = {"projections": "projec-\ntions", "feed-forward": "feed-\nforward"}

_measure = in_section("What to measure")
_file = in_section("What to write")


@click.command(cls=SectionCommand, epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_measure(
    "--lengths",
    default="16..4096",
    show_default=True,
    help="In tokens: a list such as 16,100,500, or a range that doubles. What the model or this machine's "
    "memory does not take is left out.",
)
@config_option(
    "precision", "Which of the bundle's graphs for embeddings.", GRAPH_PRECISIONS, section="What to measure"
)
@_measure("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Of ONNX Runtime.")
@_file("--json", "as_json", is_flag=True, help="Print every measurement as JSON.")
@_file("--html", metavar="FILE", help="Write a page with a chart (.html).")
@_file("--svg", metavar="FILE", help="Write the chart alone (.svg).")
def profile(
    directory: Path,
    lengths: str,
    threads: int,
    as_json: bool,
    html: str | None,
    svg: str | None,
    **options: Any,  # noqa: ANN401 - a field of ServerConfig
) -> None:
    """Show what share of the time each part of the bundle's graph takes, by the length of a text.

    The graph for embeddings runs on the CPU under ONNX Runtime's profiler, one text at a time, with any
    mechanism of attention. Measure on an idle machine: if the runs of a length disagree, a warning says so.
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
        asked = parse_lengths(lengths)
        bundle = open_bundle(directory, precision)
        usable, messages = chosen_lengths(bundle, asked)
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
        _show(measured)


def _write(measured: "Profile", paths: dict[str, Path]) -> None:
    from attnlens_analysis.profile import as_page, chart

    for suffix, render in ((".html", as_page), (".svg", chart)):
        if suffix in paths:
            with replacing(paths[suffix]) as file:
                file.write(render(measured).encode())
            click.echo(f"{paths[suffix]}: {measured.model_name}", err=True)


def _as_json(measured: "Profile", messages: list[str]) -> dict[str, Any]:
    """Return the measurements as JSON values."""
    return {
        "model": measured.model_name,
        "precision": measured.precision,
        "mechanisms": list(measured.mechanisms),
        "threads": measured.threads,
        "left_out": messages,
        "attention_overtakes_at": measured.overtakes_at,
        "lengths": [
            dataclasses.asdict(each) | {"shares": each.shares, "attention_share": each.attention_share}
            for each in measured.lengths
        ],
    }


def _show(measured: "Profile") -> None:
    from rich.table import Table

    from attnlens_analysis.profile import ATTENTION, HOW, PARTS, describe, overtaking
    from attnlens_cli.show.console import make_console

    console = make_console()
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in (
        "tokens",
        "ms",
        *(_HEADINGS.get(part, part) for part in PARTS),
        "atten-\ntion",
        "memory\nMB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in measured.lengths:
        shares = [f"{100 * share:.1f}" for share in (*each.shares.values(), each.attention_share)]
        table.add_row(f"{each.length:,}", f"{each.total_ms:,.1f}", *shares, f"{each.peak_bytes / _MB:,.1f}")
    console.print(f"{describe(measured)}; shares of the time in %", soft_wrap=True)
    console.print(table)
    console.print(f"attention: {', '.join(ATTENTION)}. {overtaking(measured)}")
    console.print(HOW)
