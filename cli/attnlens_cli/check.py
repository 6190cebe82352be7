"""`attnlens check DIR`, and how parity is shown."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnlens_cli.quantization_table import show_precisions
from attnlens_cli.runtime_table import raise_runtime_failures, runtimes_as_json, show_runtimes
from attnlens_cli.stopping import stopped_by_signals

if TYPE_CHECKING:
    from rich.table import Table

    from attnlens.v1.manifest_pb2 import ParityFigure
    from attnlens_export.progress import Progress
    from attnlens_export.verdict import Verdict

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
    verdict = summary.verdict
    if as_json:
        manifest = summary.manifest
        content = {"model_name": manifest.model_name, "max_tokens": manifest.max_tokens}
        content |= report_content(verdict)
        click.echo(json.dumps(content | runtimes_as_json(summary), indent=2))
    else:
        title = f"{summary.manifest.model_name} against {verdict.parity.reference_name}"
        Console().print(parity_table(verdict, title))
        show_precisions(verdict)
        click.echo(
            f"{len(summary.manifest.files)} files have the hashes of the manifest; the graphs are portable"
        )
        if summary.not_stated:
            click.echo(f"not compared, as the manifest does not state it: {', '.join(summary.not_stated)}")
        if summary.runtimes or summary.missing:
            show_runtimes(summary)
    raise_failures(verdict)
    raise_runtime_failures(summary)
    if not summary.manifest.parity.passed:
        raise click.ClickException(
            f"the export of this bundle failed parity, a server refuses it: see {directory}/parity/report.md"
        )


def raise_failures(verdict: "Verdict") -> None:
    """Raise ClickException with the worst failure if a gate did not hold."""
    if not verdict.passed:
        raise click.ClickException(verdict.describe_failure())


def parity_table(verdict: "Verdict", title: str) -> "Table":
    """Show the worst errors of each output of each graph."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.markup import escape  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    from attnlens_export.parity.result import summarize  # noqa: PLC0415 - heavy

    parity = verdict.parity
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
    for result in verdict.precisions:
        for figure in result.figures():
            table.add_row(figure.graph.rpartition("/")[2])
            table.add_row(f"  {figure.output}", *_cells(figure), _verdict(passed=result.passed))
    table.caption, table.caption_justify = parity.describe_lengths(), "left"
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
    """Yield a callback that draws a bar on a terminal's stderr, else prints a line for each stage."""
    from rich.console import Console  # noqa: PLC0415 - heavy
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - heavy

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<42}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        shown = ""

        def show(stage: str, detail: str, done: int, total: int) -> None:
            nonlocal shown
            bar.update(task, description=f"{stage} {detail}", completed=done, total=total)
            if not console.is_terminal and stage != shown:
                shown = stage
                click.echo(f"{stage} on {total} input shapes" if detail else stage, err=True)

        yield show
