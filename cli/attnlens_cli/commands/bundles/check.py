"""`attnlens check DIR`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import parity_tokens_option
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.frame.stopping import stopped_by_signals
from attnlens_cli.show.checks.engines import (
    engines_as_json,
    raise_engine_failures,
    show_engines,
    show_stated,
)
from attnlens_cli.show.checks.faithfulness import show_faithfulness
from attnlens_cli.show.checks.further import show_further
from attnlens_cli.show.checks.parity import parity_table, raise_failures
from attnlens_cli.show.checks.publisher import raise_publisher_failures, show_publisher
from attnlens_cli.show.checks.runtimes import raise_runtime_failures, runtimes_as_json, show_runtimes
from attnlens_cli.show.progress import shown_stages

if TYPE_CHECKING:
    from attnlens.openvino_settings import OpenvinoPrecision
    from attnlens_export.check import CheckSummary
    from attnlens_export.engines.measure import Engine, EngineSummary
    from attnlens_export.faithfulness.measure import FaithfulnessResult
    from attnlens_export.progress import Progress
    from attnlens_export.publisher import PublisherResult
    from attnlens_export.runtimes import RuntimeOptions

EPILOG = """\b
Example:
  attnlens check bundles/minilm
  attnlens check bundles/minilm --source sentence-transformers/all-MiniLM-L6-v2
  attnlens check bundles/minilm --source sentence-transformers/all-MiniLM-L6-v2 --against transformers
  attnlens check bundles/minilm --runtime openvino --runtime tract
  attnlens check bundles/minilm --engine openvino
  attnlens check bundles/minilm --faithfulness --texts sentences.txt"""

_ONNXRUNTIME, _OPENVINO, _CPU = "onnxruntime", "openvino", "CPU"
_TRANSFORMERS = "transformers"

_parity = in_section("Parity")
_engine = in_section("Engine")
_runtimes = in_section("Other runtimes")
_faithfulness = in_section("Faithfulness")


@click.command(cls=SectionCommand, epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_parity(
    "--source",
    help="Compare with this checkpoint, a directory or hub id, instead of the bundle's own weights.",
)
@_parity("--revision", help="Branch, tag or commit of a --source on the hub.")
@_parity(
    "--against",
    type=click.Choice([_TRANSFORMERS]),
    help="Also compare token ids, hidden states and embeddings of texts with the publisher's "
    "implementation of --source: sentence-transformers if it has a modules.json, otherwise transformers.",
)
@_engine(
    "--engine",
    type=click.Choice([_ONNXRUNTIME, _OPENVINO]),
    default=_ONNXRUNTIME,
    show_default=True,
    help="Measure the bundle in this engine of `serve` too, and write that into the bundle.",
)
@_engine(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(["fp32", "bf16", "int8"]),
    help="For --engine openvino: embeddings in this precision; may be repeated.  [default: each that the "
    "bundle and the processor have]",
)
@_engine(
    "--device",
    metavar="NAME",
    help="For --engine openvino: where it runs, by its own name.  [default: CPU; others are untested]",
)
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
    help="How long a runtime or an engine may take to open a graph, and to run it once.",
)
@parity_tokens_option
@_faithfulness(
    "--faithfulness",
    is_flag=True,
    help="Measure how well explanation methods rank tokens, with deletion curves, and write that into the "
    "bundle.",
)
@_faithfulness(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="For --faithfulness: one text per line.  [default: 30 English sentences]",
)
@_faithfulness(
    "--contribution-norm",
    is_flag=True,
    help="For --faithfulness: measure this method too, which takes a run per embedding component and text: "
    "minutes for a model with 384 components, hours for a large one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every measurement as JSON.")
def check(
    directory: Path,
    engine: str,
    precisions: "tuple[OpenvinoPrecision, ...]",
    device: str | None,
    runtimes: tuple[str, ...],
    node_modules: Path | None,
    answer_timeout: float,
    as_json: bool,
    **wanted_options: Any,  # noqa: ANN401 - fields of _Wanted
) -> None:
    """Check a bundle: the hash of every file, the graphs, then parity with PyTorch.

    Without --source the PyTorch encoder gets the weights inside the bundle; with it, the checkpoint's, which
    must also be equal to those inside, bit for bit.

    With --against transformers the bundle is served in this process and compared with the publisher's own
    implementation from text to embedding, prompts, lower-casing and truncation included. This detects a
    configuration that the export misread, which parity cannot.

    With --engine openvino the graphs must also pass as `attnlens serve --engine openvino` runs them, in each
    precision. The figures go into the report and the manifest of the bundle, and a server refuses to start
    with what did not pass.

    With --runtime the graphs must pass in other runtimes too, each in a process of its own. A runtime that is
    not installed is an error if it was named; with `all` it is only reported.

    With --faithfulness the ranking of tokens by each method of `attnlens explain` is compared with what
    leaving out each token changes. The figures go into the report and the manifest of the bundle, and every
    explanation repeats them.
    """
    from attnlens_export.runtimes import RuntimeOptions  # noqa: PLC0415 - heavy

    options = RuntimeOptions(runtimes, node_modules, answer_timeout) if runtimes else None
    wanted = _Wanted(directory, options, **wanted_options)
    wanted.check_usage()
    if engine != _OPENVINO and (precisions or device):
        raise click.UsageError("--precision and --device need --engine openvino")
    with _reported_errors():
        found = _find_engine(precisions, device, answer_timeout) if engine == _OPENVINO else None
        measured = _measure(wanted, found)
    _show(measured, as_json=as_json)
    _raise_failures(measured, directory)


@contextmanager
def _reported_errors() -> Iterator[None]:
    """Raise ClickException for what can go wrong with a bundle, a checkpoint or a runtime."""
    from attnlens.bundle import BundleError  # noqa: PLC0415 - heavy
    from attnlens_export import ExportError  # noqa: PLC0415 - heavy
    from attnlens_model import ModelError  # noqa: PLC0415 - heavy
    from attnlens_runtimes import NotInstalledError, UnknownRuntimeError  # noqa: PLC0415 - heavy

    try:
        yield
    except UnknownRuntimeError as error:
        raise click.UsageError(str(error)) from error
    except (BundleError, ExportError, ModelError, NotInstalledError) as error:
        raise click.ClickException(str(error)) from error


@dataclass(frozen=True)
class _Wanted:
    """What is to be checked, besides an engine. Most fields are options of the command."""

    directory: Path
    runtimes: "RuntimeOptions | None"
    source: str | None
    revision: str | None
    against: str | None
    parity_tokens: int | None
    faithfulness: bool
    texts: Path | None
    contribution_norm: bool

    def check_usage(self) -> None:
        """Raise UsageError for an option without the one that it needs."""
        if self.revision is not None and self.source is None:
            raise click.UsageError("--revision needs --source")
        if self.against and self.source is None:
            raise click.UsageError(
                "--against needs --source: the publisher's implementation loads the checkpoint"
            )
        if self.texts is not None and not self.faithfulness:
            raise click.UsageError("--texts needs --faithfulness")
        if self.contribution_norm and not self.faithfulness:
            raise click.UsageError("--contribution-norm needs --faithfulness")


@dataclass(frozen=True)
class _Measured:
    """What was found; optional measurements only if they were requested and parity passed."""

    summary: "CheckSummary"
    publisher: "PublisherResult | None"
    engines: "EngineSummary | None"
    faithfulness: "FaithfulnessResult | None"


def _find_engine(
    precisions: "tuple[OpenvinoPrecision, ...]", device: str | None, timeout_s: float
) -> "Engine":
    from attnlens_export.engines.measure import CPU, EngineOptions, find_engine  # noqa: PLC0415 - heavy

    return find_engine(EngineOptions(precisions, device or CPU, timeout_s))


def _measure(wanted: _Wanted, engine: "Engine | None") -> _Measured:
    from attnlens_export.check import check_bundle  # noqa: PLC0415 - heavy

    with stopped_by_signals(), shown_stages(in_lines=True) as progress:
        summary = check_bundle(
            wanted.directory,
            wanted.source,
            revision=wanted.revision,
            parity_tokens=wanted.parity_tokens,
            runtimes=wanted.runtimes,
            progress=progress,
        )
        publisher = engines = faithfulness = None
        if wanted.against and summary.verdict.passed:
            publisher = _compare_with_publisher(wanted, summary, progress)
        if engine and summary.verdict.passed:
            engines = _measure_engine(wanted, engine, progress)
        if wanted.faithfulness and summary.verdict.passed:
            faithfulness = _measure_faithfulness(wanted, progress)
    return _Measured(summary, publisher, engines, faithfulness)


def _compare_with_publisher(
    wanted: _Wanted, summary: "CheckSummary", progress: "Progress"
) -> "PublisherResult":
    from attnlens_cli.sources.served_bundle import ServedBundle  # noqa: PLC0415 - heavy
    from attnlens_export.publisher import (  # noqa: PLC0415 - heavy
        MAX_TOKENS,
        compare_with_publisher,
        hidden_states_limit,
    )
    from attnlens_server.errors import StartupError  # noqa: PLC0415 - heavy

    assert wanted.source is not None  # noqa: S101 - `check` requires it
    try:
        with ServedBundle(wanted.directory, MAX_TOKENS) as served:
            return compare_with_publisher(
                served,
                wanted.source,
                hidden_states_limit(summary.verdict.parity),
                partial(progress, "Against the publisher"),
                revision=wanted.revision,
                pooling=summary.manifest.pooling,
            )
    except StartupError as error:
        raise click.ClickException(f"--against serves the bundle, which failed: {error}") from error


def _measure_engine(wanted: _Wanted, engine: "Engine", progress: "Progress") -> "EngineSummary":
    from attnlens_export.engines.measure import measure_engine, record  # noqa: PLC0415 - heavy

    measured = measure_engine(wanted.directory, engine, parity_tokens=wanted.parity_tokens, progress=progress)
    record(wanted.directory, measured.results)
    return measured


def _measure_faithfulness(wanted: _Wanted, progress: "Progress") -> "FaithfulnessResult":
    from attnlens_export.faithfulness.measure import (  # noqa: PLC0415 - heavy
        measure_faithfulness,
        record,
    )

    measured = measure_faithfulness(
        wanted.directory,
        wanted.texts,
        partial(progress, "Faithfulness"),
        with_norm=wanted.contribution_norm,
    )
    record(wanted.directory, measured)
    return measured


def _show(measured: _Measured, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_as_json(measured), indent=2))
        return
    _show_tables(measured.summary)
    if measured.publisher:
        show_publisher(measured.publisher)
    if measured.engines:
        show_engines(measured.engines)
    else:
        show_stated(measured.summary.manifest)
    if measured.faithfulness:
        show_faithfulness(measured.faithfulness)


def _as_json(measured: _Measured) -> dict[str, Any]:
    summary = measured.summary
    manifest = summary.manifest
    content = {"model": manifest.model_name, "max_tokens": manifest.max_tokens}
    content |= summary.verdict.to_json() | runtimes_as_json(summary)
    if measured.publisher:
        content["publisher"] = measured.publisher.as_json()
    if measured.engines:
        content |= engines_as_json(measured.engines)
    return content | ({"faithfulness": measured.faithfulness.to_json()} if measured.faithfulness else {})


def _show_tables(summary: "CheckSummary") -> None:
    from attnlens_cli.show.console import make_console  # noqa: PLC0415 - heavy

    manifest, verdict = summary.manifest, summary.verdict
    title = f"{manifest.model_name} against {verdict.parity.reference_name}"
    make_console(markup=True).print(parity_table(verdict, title))
    show_further(verdict)
    click.echo(f"{len(manifest.files)} files have the hashes of the manifest; the graphs are portable")
    if summary.not_stated:
        click.echo(f"not compared, as the manifest does not state it: {', '.join(summary.not_stated)}")
    if summary.runtimes or summary.missing:
        show_runtimes(summary)


def _raise_failures(measured: _Measured, directory: Path) -> None:
    """Raise ClickException with the first failure, if there is one."""
    summary = measured.summary
    raise_failures(summary.verdict)
    raise_runtime_failures(summary)
    if measured.publisher:
        raise_publisher_failures(measured.publisher)
    if measured.engines:
        raise_engine_failures(measured.engines)
    if not summary.manifest.parity.passed:
        raise click.ClickException(
            f"the export of this bundle failed parity, a server refuses it: see {directory}/parity/report.md"
        )
