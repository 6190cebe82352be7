"""`attnlens check DIR`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import parity_tokens_option
from attnlens_cli.frame.stopping import stopped_by_signals
from attnlens_cli.show.parity_table import parity_table, raise_failures
from attnlens_cli.show.precision_tables import show_further
from attnlens_cli.show.progress import shown_stages
from attnlens_cli.show.runtime_table import raise_runtime_failures, runtimes_as_json, show_runtimes

if TYPE_CHECKING:
    from attnlens_export.check import CheckSummary

EPILOG = """\b
Example:
  attnlens check bundles/minilm
  attnlens check bundles/minilm --source sentence-transformers/all-MiniLM-L6-v2
  attnlens check bundles/minilm --runtime all
  attnlens check bundles/minilm --runtime openvino --runtime onnxruntime-web"""


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

    With --runtime the graphs must pass in other runtimes too, each in a process of its own. A runtime that is
    not installed is an error if it was named; with `all` it is only reported.
    """
    from attnlens.bundle import BundleError  # noqa: PLC0415 - heavy
    from attnlens_export import ExportError  # noqa: PLC0415 - heavy
    from attnlens_export.check import check_bundle  # noqa: PLC0415 - heavy
    from attnlens_export.parity.runtimes import RuntimeOptions  # noqa: PLC0415 - heavy
    from attnlens_model import ModelError  # noqa: PLC0415 - heavy
    from attnlens_runtimes import NotInstalledError, UnknownRuntimeError  # noqa: PLC0415 - heavy

    if revision is not None and source is None:
        raise click.UsageError("--revision needs --source")
    options = RuntimeOptions(runtimes, node_modules, answer_timeout) if runtimes else None
    try:
        with stopped_by_signals(), shown_stages(in_lines=True) as progress:
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
    if as_json:
        click.echo(json.dumps(_as_json(summary), indent=2))
    else:
        _show(summary)
    raise_failures(summary.verdict)
    raise_runtime_failures(summary)
    if not summary.manifest.parity.passed:
        raise click.ClickException(
            f"the export of this bundle failed parity, a server refuses it: see {directory}/parity/report.md"
        )


def _as_json(summary: "CheckSummary") -> dict[str, Any]:
    from attnlens_export.report import report_content  # noqa: PLC0415 - heavy

    manifest = summary.manifest
    content = {"model_name": manifest.model_name, "max_tokens": manifest.max_tokens}
    return content | report_content(summary.verdict) | runtimes_as_json(summary)


def _show(summary: "CheckSummary") -> None:
    from rich.console import Console  # noqa: PLC0415 - heavy

    manifest, verdict = summary.manifest, summary.verdict
    title = f"{manifest.model_name} against {verdict.parity.reference_name}"
    Console().print(parity_table(verdict, title))
    show_further(verdict)
    click.echo(f"{len(manifest.files)} files have the hashes of the manifest; the graphs are portable")
    if summary.not_stated:
        click.echo(f"not compared, as the manifest does not state it: {', '.join(summary.not_stated)}")
    if summary.runtimes or summary.missing:
        show_runtimes(summary)
