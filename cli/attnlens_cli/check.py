"""`attnlens check DIR`, and how parity is shown."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnlens_cli.quantization_table import show_quantization
from attnlens_cli.runtime_table import raise_runtime_failures, runtimes_as_json, show_runtimes
from attnlens_cli.stopping import stopped_by_signals

if TYPE_CHECKING:
    from rich.table import Table

    from attnlens.v1.manifest_pb2 import ParityFigure
    from attnlens_export.bundle import Progress
    from attnlens_export.parity.result import ParityResult

EPILOG = """\b
Example:
  attnlens check bundles/minilm
  attnlens check bundles/minilm --source sentence-transformers/all-MiniLM-L6-v2
  attnlens check bundles/minilm --runtime all
  attnlens check bundles/minilm --runtime openvino --runtime onnxruntime-web"""

parity_tokens_option = click.option(
    "--parity-tokens",
    type=click.IntRange(min=1),
    help="Longest input to compare.  [default: what 1 GiB of attention maps allows]",
)


@click.command(epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--source",
    help="Compare with this checkpoint, a directory or hub id, instead of the bundle's own weights.",
)
@click.option("--revision", help="Branch, tag or commit of a --source on the hub.")
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    metavar="NAME",
    help="Run the same inputs in this runtime too; may be repeated; `all`: in every one that is installed.",
)
@click.option(
    "--node-modules",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where onnxruntime-node and onnxruntime-web are.  [default: where Node.js would look]",
)
@click.option(
    "--answer-timeout",
    type=click.FloatRange(0, min_open=True),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long a runtime may take to open a graph, and to run it once.",
)
@parity_tokens_option
@click.option("--json", "as_json", is_flag=True, help="Print every measurement as JSON.")
def check(
    directory: Path,
    source: str | None,
    revision: str | None,
    runtimes: tuple[str, ...],
    node_modules: Path | None,
    answer_timeout: float,
    parity_tokens: int | None,
    as_json: bool,
) -> None:
    """Check a bundle: the hash of every file, the graphs, then parity with PyTorch.

    Without --source the PyTorch encoder gets the weights inside the bundle; with it, the checkpoint's, which
    must also be equal to those inside, bit for bit.

    With --runtime the graphs must pass in other runtimes too, each in a process of its own. One that is not
    installed is an error if it was named, and a remark with `all`.
    """
    from rich.console import Console  # noqa: PLC0415 - heavy

    from attnlens.bundle import BundleError  # noqa: PLC0415 - heavy
    from attnlens_export import ExportError  # noqa: PLC0415 - heavy
    from attnlens_export.check import check_bundle  # noqa: PLC0415 - heavy
    from attnlens_export.parity.runtimes import RuntimeOptions  # noqa: PLC0415 - heavy
    from attnlens_export.report import report_content  # noqa: PLC0415 - heavy
    from attnlens_model import ModelError  # noqa: PLC0415 - heavy
    from attnlens_runtimes import NotInstalledError, UnknownRuntimeError  # noqa: PLC0415 - heavy

    if revision is not None and source is None:
        raise click.UsageError("--revision needs --source")
    options = RuntimeOptions(runtimes, node_modules, answer_timeout) if runtimes else None
    try:
        with stopped_by_signals(), progress_bar() as progress:
            summary = check_bundle(
                directory,
                source,
                revision=revision,
                parity_tokens=parity_tokens,
                runtimes=options,
                progress=progress,
            )
    except UnknownRuntimeError as error:
        raise click.UsageError(str(error)) from error
    except (BundleError, ExportError, ModelError, NotInstalledError) as error:
        raise click.ClickException(str(error)) from error
    parity = summary.parity
    if as_json:
        manifest = summary.manifest
        content = {"model_name": manifest.model_name, "max_tokens": manifest.max_tokens}
        content |= report_content(parity)
        click.echo(json.dumps(content | runtimes_as_json(summary), indent=2))
    else:
        Console().print(
            parity_table(parity, f"{summary.manifest.model_name} against {parity.reference_name}")
        )
        show_quantization(summary.manifest, parity)
        click.echo(
            f"{len(summary.manifest.files)} files have the hashes of the manifest; the graphs are portable"
        )
        if summary.runtimes or summary.missing:
            show_runtimes(summary)
    raise_failures(parity)
    raise_runtime_failures(summary)
    if not summary.manifest.parity.passed:
        raise click.ClickException(
            f"the export of this bundle failed parity, a server refuses it: see {directory}/parity/report.md"
        )


def raise_failures(parity: "ParityResult") -> None:
    """Raise ClickException with the worst failure if parity failed."""
    from attnlens_export.bundle import describe_failure  # noqa: PLC0415 - heavy

    if not parity.passed:
        raise click.ClickException(describe_failure(parity))


def parity_table(parity: "ParityResult", title: str) -> "Table":
    """Show the worst errors of each output of each graph."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.markup import escape  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens_export.parity.result import summarize  # noqa: PLC0415 - heavy

    table = Table(
        title=f"{escape(title)}, {len(parity.cases)} input shapes",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("output of graph", no_wrap=True)
    for heading in ("vs\ntorch", "vs\nfloat64", "torch vs\nfloat64", "p99", "1 -\ncosine", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    last_graph = ""
    for (graph, output), group in parity.by_output().items():
        if graph != last_graph:
            table.add_row(graph.rpartition("/")[2])  # the table fits 80 columns
            last_graph = graph
        figure = summarize(group)
        table.add_row(
            f"  {output}",
            *_cells(figure),
            _verdict(passed=all(each.passed for each in group)),
        )
    if parity.half is not None:
        figure = parity.half.figure()
        table.add_row(figure.graph.rpartition("/")[2])
        table.add_row(f"  {figure.output}", *_cells(figure), _verdict(passed=not parity.half.failures()))
    table.caption, table.caption_justify = parity.describe_lengths(), "left"
    if parity.half is not None:
        table.caption += f"\n{parity.half.describe()}"
    left_out = parity.left_out()
    if left_out:
        table.caption += (
            f"\nnot compared, too large: {', '.join(f'{graph} at {case}' for graph, case in left_out)}"
        )
    return table


def _cells(figure: "ParityFigure") -> list[str]:
    errors = (
        figure.max_abs_error,
        figure.max_abs_error_float64,
        figure.torch_abs_error_float64,
        figure.p99_abs_error,
    )
    return [*(f"{error:.1e}" for error in errors), f"{1 - figure.min_cosine:.0e}"]


def _verdict(*, passed: bool) -> str:
    return "[green]passed[/]" if passed else "[red]FAILED[/]"


@contextmanager
def progress_bar() -> Iterator["Progress"]:
    """Yield a callback that draws a bar on a terminal's stderr, else prints a line for each kind of step."""
    from rich.console import Console  # noqa: PLC0415 - heavy
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - heavy

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<42}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        shown = ""

        def show(stage: str, done: int, total: int) -> None:
            nonlocal shown
            bar.update(task, description=stage, completed=done, total=total)
            # "Parity 2x7 right": what is done, then the input shape that it is done on; or else a whole name.
            kind = stage if stage.startswith("Int8 ") else stage.partition(" ")[0]
            if not console.is_terminal and kind != shown:
                shown = kind
                is_whole = total == 1 or kind == stage
                click.echo(stage if is_whole else f"{kind} on {total} input shapes", err=True)

        yield show
