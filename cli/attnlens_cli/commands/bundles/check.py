"""`attnlens check DIR`."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import parity_tokens_option
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.frame.stopping import stopped_by_signals
from attnlens_cli.show.checks.faithfulness import show_faithfulness
from attnlens_cli.show.checks.further import show_further
from attnlens_cli.show.checks.parity import parity_table, raise_failures
from attnlens_cli.show.checks.runtimes import raise_runtime_failures, runtimes_as_json, show_runtimes
from attnlens_cli.show.progress import shown_stages

if TYPE_CHECKING:
    from attnlens_export.check import CheckSummary
    from attnlens_export.faithfulness.result import FaithfulnessResult
    from attnlens_export.progress import Progress

EPILOG = """\b
Example:
  attnlens check bundles/minilm
  attnlens check bundles/minilm --source sentence-transformers/all-MiniLM-L6-v2
  attnlens check bundles/minilm --runtime openvino --runtime tract
  attnlens check bundles/minilm --faithfulness --texts sentences.txt"""

_parity = in_section("Parity")
_runtimes = in_section("Other runtimes")
_faithfulness = in_section("Faithfulness")


@click.command(cls=SectionCommand, epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_parity(
    "--source",
    help="Compare with this checkpoint, a directory or hub id, instead of the bundle's own weights.",
)
@_parity("--revision", help="Branch, tag or commit of a --source on the hub.")
@_runtimes(
    "--runtime",
    "runtimes",
    multiple=True,
    metavar="NAME",
    help="Run the same inputs in this runtime too; may be repeated; `all`: in every one that is installed.",
)
@_runtimes(
    "--node-modules",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where onnxruntime-node and onnxruntime-web are.  [default: where Node.js would look]",
)
@_runtimes(
    "--answer-timeout",
    type=click.FloatRange(0, min_open=True),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="How long a runtime may take to open a graph, and to run it once.",
)
@parity_tokens_option
@_faithfulness(
    "--faithfulness",
    is_flag=True,
    help="Measure how well each method of explaining ranks tokens, and write that into the bundle.",
)
@_faithfulness(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="For --faithfulness: one text per line.  [default: 30 English sentences]",
)
@click.option("--json", "as_json", is_flag=True, help="Print every measurement as JSON.")
def check(
    directory: Path,
    source: str | None,
    revision: str | None,
    runtimes: tuple[str, ...],
    node_modules: Path | None,
    answer_timeout: float,
    parity_tokens: int | None,
    faithfulness: bool,
    texts: Path | None,
    as_json: bool,
) -> None:
    """Check a bundle: the hash of every file, the graphs, then parity with PyTorch.

    Without --source the PyTorch encoder gets the weights inside the bundle; with it, the checkpoint's, which
    must also be equal to those inside, bit for bit.

    With --runtime the graphs must pass in other runtimes too, each in a process of its own. A runtime that is
    not installed is an error if it was named; with `all` it is only reported.

    With --faithfulness the ranking of tokens by each method of `attnlens explain` is compared with what
    leaving out each token changes. The figures go into the report and the manifest of the bundle, and every
    explanation repeats them.
    """
    from attnlens.bundle import BundleError  # noqa: PLC0415 - heavy
    from attnlens_export import ExportError  # noqa: PLC0415 - heavy
    from attnlens_export.check import check_bundle  # noqa: PLC0415 - heavy
    from attnlens_export.runtimes.measure import RuntimeOptions  # noqa: PLC0415 - heavy
    from attnlens_model import ModelError  # noqa: PLC0415 - heavy
    from attnlens_runtimes import NotInstalledError, UnknownRuntimeError  # noqa: PLC0415 - heavy

    if revision is not None and source is None:
        raise click.UsageError("--revision needs --source")
    if texts is not None and not faithfulness:
        raise click.UsageError("--texts needs --faithfulness")
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
            measured = None
            if faithfulness and summary.verdict.passed:
                measured = _measure_faithfulness(directory, texts, progress)
    except UnknownRuntimeError as error:
        raise click.UsageError(str(error)) from error
    except (BundleError, ExportError, ModelError, NotInstalledError) as error:
        raise click.ClickException(str(error)) from error
    _show(summary, measured, as_json=as_json)
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


def _measure_faithfulness(directory: Path, texts: Path | None, progress: "Progress") -> "FaithfulnessResult":
    from attnlens_export.faithfulness.measure import measure_faithfulness  # noqa: PLC0415 - heavy
    from attnlens_export.faithfulness.result import record  # noqa: PLC0415 - heavy

    measured = measure_faithfulness(directory, texts, partial(progress, "Faithfulness"))
    record(directory, measured)
    return measured


def _show(summary: "CheckSummary", measured: "FaithfulnessResult | None", *, as_json: bool) -> None:
    if as_json:
        figures = {"faithfulness": measured.as_json()} if measured else {}
        click.echo(json.dumps(_as_json(summary) | figures, indent=2))
        return
    _show_tables(summary)
    if measured:
        show_faithfulness(measured)


def _show_tables(summary: "CheckSummary") -> None:
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
