"""`attnlens check`: verify the files of a bundle and its parity with PyTorch."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from attnlens_cli.commands.options import (
    bundle_argument,
    measurements_json_option,
    parity_tokens_option,
    without_comparison_option,
)
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.frame.signals import stopped_by_signals
from attnlens_cli.show.bundle import (
    engines_as_json,
    raise_differences,
    raise_engine_failure,
    raise_parity_failure,
    raise_publisher_failure,
    raise_runtime_failure,
    runtimes_as_json,
    show_engines,
    show_faithfulness,
    show_publisher,
    show_runtimes,
    show_stated_engines,
    show_verdict,
)
from attnlens_cli.show.progress import shown_stages

if TYPE_CHECKING:
    from attnlens.openvino import OpenvinoPrecision
    from attnlens.v1.manifest_pb2 import Manifest
    from attnlens_export.check import CheckSummary
    from attnlens_export.engines.measure import Engine, EngineSummary
    from attnlens_export.faithfulness.measure import FaithfulnessResult
    from attnlens_export.judge.result import PublisherResult
    from attnlens_export.progress import Progress
    from attnlens_export.runtimes import RuntimeOptions
    from attnlens_publisher.reference import Arrays, Probe

EPILOG = """\b
Example:
  attnlens check bundles/minilm
  attnlens check bundles/minilm --source sentence-transformers/all-MiniLM-L6-v2
  attnlens check bundles/minilm --runtime openvino --runtime tract
  attnlens check bundles/minilm --engine openvino
  attnlens check bundles/minilm --faithfulness --texts sentences.txt"""

_ONNXRUNTIME, _OPENVINO, _CPU = "onnxruntime", "openvino", "CPU"

_parity = in_section("Parity")
_engine = in_section("Engine")
_runtimes = in_section("Other runtimes")
_faithfulness = in_section("Faithfulness")


@click.command(cls=Command, epilog=EPILOG)
@bundle_argument
@_parity(
    "--source",
    help="Checkpoint to compare with, a directory or hub id: its weights, the results of its publisher's "
    "pipeline, and what the manifest states.  [default: the weights in the bundle]",
)
@_parity("--revision", help="Branch, tag or commit of --source on the hub.")
@without_comparison_option
@_engine(
    "--engine",
    type=click.Choice([_ONNXRUNTIME, _OPENVINO]),
    default=_ONNXRUNTIME,
    show_default=True,
    help="Engine of `serve`. With openvino, measure the bundle in OpenVINO and record the result in it.",
)
@_engine(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(["fp32", "bf16", "int8"]),
    help="Precision of embeddings or logits for --engine openvino; may be repeated.  [default: all that the "
    "bundle and the processor support]",
)
@_engine(
    "--device",
    metavar="NAME",
    help="OpenVINO device for --engine openvino.  [default: CPU; other devices are untested]",
)
@_runtimes(
    "--runtime",
    "runtimes",
    multiple=True,
    metavar="NAME",
    help="Also compare in this runtime; may be repeated. `all` selects all installed runtimes.",
)
@_runtimes(
    "--node-modules",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with onnxruntime-node and onnxruntime-web.  [default: the search path of Node.js]",
)
@_runtimes(
    "--answer-timeout",
    type=click.FloatRange(0, min_open=True),
    default=300,
    show_default=True,
    metavar="SECONDS",
    help="Maximum time for a runtime or an engine to open a graph, and for each run.",
)
@parity_tokens_option
@_faithfulness(
    "--faithfulness",
    is_flag=True,
    help="Measure how well explanation methods rank tokens, with deletion curves, and record the result in "
    "the bundle.",
)
@_faithfulness(
    "--texts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with one text per line for --faithfulness.  [default: 30 English sentences]",
)
@_faithfulness(
    "--contribution-norm",
    is_flag=True,
    help="Include the method contribution_norm in --faithfulness. It takes one run per embedding component "
    "and text: minutes for a model with 384 components, hours for a large model.",
)
@measurements_json_option
def check(
    directory: Path,
    engine: str,
    precisions: "tuple[OpenvinoPrecision, ...]",
    device: str | None,
    runtimes: tuple[str, ...],
    node_modules: Path | None,
    answer_timeout: float,
    as_json: bool,
    **requested: Any,  # noqa: ANN401 - fields of _Request
) -> None:
    """Check a bundle: the hash of every file, the graphs, then parity with PyTorch.

    PyTorch runs with the weights in the bundle, or with those of --source, which must be equal to them bit
    for bit.

    With --source, the served bundle is also compared with the publisher's own pipeline, as by an export:
    token ids, hidden states, embeddings with every prompt, or logits, scores and labels. If
    sentence-transformers saved the checkpoint, it computes them, otherwise transformers. Maximum length,
    license and embedding ranges in the manifest must be those of the checkpoint, and with --faithfulness, the
    rank correlations, too. Versions other than those of the export are listed.

    --engine openvino also compares the graphs as `attnlens serve --engine openvino` runs them, in each
    precision. The result is recorded in the bundle's report and manifest, and a server refuses to start with
    a failed precision.

    --runtime also compares the graphs in other runtimes, each in its own process. A named runtime must be
    installed; with `all`, missing runtimes are only reported.

    --faithfulness compares the ranking of tokens by each method of `attnlens explain` with the effect of
    leaving out each token. The result is recorded in the bundle's report and manifest, and every explanation
    includes it. With --source, it is not recorded if it differs from the manifest.
    """
    from attnlens_export.runtimes import RuntimeOptions

    options = RuntimeOptions(runtimes, node_modules, answer_timeout) if runtimes else None
    request = _Request(directory, options, **requested)
    request.check_usage()
    if engine != _OPENVINO and (precisions or device):
        raise click.UsageError("--precision and --device need --engine openvino")
    with _reported_errors():
        selected = _find_engine(precisions, device, answer_timeout) if engine == _OPENVINO else None
        measured = _measure(request, selected)
    _show(measured, as_json=as_json)
    _raise_failures(measured, directory)


@contextmanager
def _reported_errors() -> Iterator[None]:
    """Convert failures of bundles, checkpoints and runtimes to ClickException."""
    from attnlens.bundle import BundleError
    from attnlens_export import ExportError
    from attnlens_model import ModelError
    from attnlens_runtimes import NotInstalledError, UnknownRuntimeError

    try:
        yield
    except UnknownRuntimeError as error:
        raise click.UsageError(str(error)) from error
    except (BundleError, ExportError, ModelError, NotInstalledError) as error:
        raise click.ClickException(str(error)) from error


@dataclass(frozen=True)
class _Request:
    """The requested checks except those of an engine. Most fields are options of the command."""

    directory: Path
    runtimes: "RuntimeOptions | None"
    source: str | None
    revision: str | None
    without_comparison: bool
    parity_tokens: int | None
    faithfulness: bool
    texts: Path | None
    contribution_norm: bool

    def check_usage(self) -> None:
        """Raise UsageError for an option without the option that it depends on."""
        if self.revision is not None and self.source is None:
            raise click.UsageError("--revision needs --source")
        if self.texts is not None and not self.faithfulness:
            raise click.UsageError("--texts needs --faithfulness")
        if self.contribution_norm and not self.faithfulness:
            raise click.UsageError("--contribution-norm needs --faithfulness")


@dataclass(frozen=True)
class _Measured:
    """Results. Optional measurements are None unless they were requested and parity passed.

    `differences` are the fields of the manifest that differ from the checkpoint and from new measurements.
    `is_recorded` means that faithfulness is now in the bundle.
    """

    summary: "CheckSummary"
    publisher: "PublisherResult | None"
    engines: "EngineSummary | None"
    faithfulness: "FaithfulnessResult | None"
    differences: tuple[str, ...]
    is_recorded: bool


def _find_engine(
    precisions: "tuple[OpenvinoPrecision, ...]", device: str | None, timeout_s: float
) -> "Engine":
    from attnlens_export.engines.measure import CPU, EngineOptions, find_engine

    return find_engine(EngineOptions(precisions, device or CPU, timeout_s))


def _measure(request: _Request, engine: "Engine | None") -> _Measured:
    from attnlens_export.check import check_bundle
    from attnlens_export.restated import compare_pipeline

    with stopped_by_signals(), shown_stages(in_lines=True) as progress:
        summary = check_bundle(
            request.directory,
            request.source,
            revision=request.revision,
            parity_tokens=request.parity_tokens,
            runtimes=request.runtimes,
            progress=progress,
        )
        publisher = engines = faithfulness = None
        differences, different = list(summary.differences), list[str]()
        if request.source and not request.without_comparison and summary.verdict.passed:
            publisher = _compare_with_publisher(request, request.source, summary, progress)
            differences += compare_pipeline(summary.manifest.publisher, publisher)
        if engine and summary.verdict.passed:
            engines = _measure_engine(request, engine, progress)
        if request.faithfulness and summary.verdict.passed:
            faithfulness, different = _measure_faithfulness(request, progress)
            differences += different
    is_recorded = faithfulness is not None and not different
    return _Measured(summary, publisher, engines, faithfulness, tuple(differences), is_recorded)


def _compare_with_publisher(
    request: _Request, source: str, summary: "CheckSummary", progress: "Progress"
) -> "PublisherResult":
    from attnlens_export.judge.compare import Rounding
    from attnlens_export.judge.question import compare_with_publisher, question_about
    from attnlens_export.judge.result import PublisherResult
    from attnlens_server.errors import StartupError

    stage = partial(progress, "Publisher's results")
    try:
        with question_about(request.directory, summary.manifest, source, request.revision) as question:
            if isinstance(question, str):
                return PublisherResult(not_compared=(question,))
            with ServedBundle(request.directory, summary.manifest) as served:
                return compare_with_publisher(question, served, Rounding.measured(summary.verdict), stage)
    except StartupError as error:
        raise click.ClickException(f"the bundle can't be served for the comparison: {error}") from error


def _measure_engine(request: _Request, engine: "Engine", progress: "Progress") -> "EngineSummary":
    from attnlens_export.engines.measure import measure_engine, record

    measured = measure_engine(
        request.directory, engine, parity_tokens=request.parity_tokens, progress=progress
    )
    record(request.directory, measured.results)
    return measured


def _measure_faithfulness(request: _Request, progress: "Progress") -> "tuple[FaithfulnessResult, list[str]]":
    """Measure and record faithfulness; with --source, only if it does not differ from the manifest."""
    from attnlens.bundle import read_manifest
    from attnlens_export.faithfulness.measure import measure_faithfulness, record
    from attnlens_export.restated import compare_faithfulness

    measured = measure_faithfulness(
        request.directory,
        request.texts,
        partial(progress, "Faithfulness"),
        with_norm=request.contribution_norm,
    )
    directory, differences = request.directory, list[str]()
    if request.source:
        differences += compare_faithfulness(directory, read_manifest(directory), measured)
    if not differences:
        record(directory, measured)
    return measured, differences


def _show(measured: _Measured, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_as_json(measured), indent=2))
        return
    _show_tables(measured.summary)
    if measured.publisher:
        show_publisher(measured.publisher)
    for line in measured.summary.other_versions:
        click.echo(f"another version: {line}")
    if measured.engines:
        show_engines(measured.engines)
    else:
        show_stated_engines(measured.summary.manifest)
    if measured.faithfulness:
        show_faithfulness(measured.faithfulness, is_recorded=measured.is_recorded)
    for line in measured.differences:
        click.echo(f"the manifest differs: {line}")


def _as_json(measured: _Measured) -> dict[str, Any]:
    summary = measured.summary
    manifest = summary.manifest
    content = {"model": manifest.model_name, "max_tokens": manifest.max_tokens}
    content |= summary.verdict.to_json() | runtimes_as_json(summary)
    content |= {"differences": list(measured.differences), "other_versions": list(summary.other_versions)}
    if measured.publisher:
        content["publisher"] = measured.publisher.to_json()
    if measured.engines:
        content |= engines_as_json(measured.engines)
    return content | ({"faithfulness": measured.faithfulness.to_json()} if measured.faithfulness else {})


def _show_tables(summary: "CheckSummary") -> None:
    manifest, verdict = summary.manifest, summary.verdict
    show_verdict(verdict, f"{manifest.model_name} against {verdict.parity.reference}")
    click.echo(f"{len(manifest.files)} files match the hashes in the manifest; the graphs are portable")
    if summary.not_stated:
        click.echo(f"not compared, because the manifest lacks it: {', '.join(summary.not_stated)}")
    if summary.runtimes or summary.missing:
        show_runtimes(summary)


def _raise_failures(measured: _Measured, directory: Path) -> None:
    """Raise ClickException with the first failure, if there is one."""
    summary = measured.summary
    raise_parity_failure(summary.verdict)
    raise_runtime_failure(summary)
    raise_differences(measured.differences)
    if measured.publisher:
        raise_publisher_failure(measured.publisher)
    if measured.engines:
        raise_engine_failure(measured.engines)
    if not summary.manifest.parity.passed:
        raise click.ClickException(
            "this bundle failed parity when it was exported, so servers reject it: "
            f"see {directory}/parity/report.md"
        )


class ServedBundle:
    """Runs a bundle in this process with the handlers of a server, without the network.

    Implements `attnlens_export.judge.compare.Subject`.

    Args:
        directory: The bundle.
        manifest: Its manifest.

    Raises:
        StartupError: The bundle cannot be served.
    """

    def __init__(self, directory: Path, manifest: "Manifest") -> None:
        from attnlens.chat_template import ChatTemplate
        from attnlens.similarity import Similarity
        from attnlens_export.judge.compare import Facts
        from attnlens_server import local
        from attnlens_server.text.tokenizer import TextEncoder

        is_classifier = manifest.HasField("classifier")
        self.facts = Facts(
            dict(manifest.prompts),
            manifest.default_prompt_name,
            tuple(manifest.classifier.labels) if is_classifier else None,
            manifest.supports_text_pairs,
            manifest.architecture.type_vocab_size > 0,
            Similarity(manifest.similarity or Similarity.COSINE),
        )
        # Texts beyond the limit are only tokenized.
        template = ChatTemplate.read(manifest.chat_template) if manifest.HasField("chat_template") else None
        self._text_encoder = TextEncoder(directory / "tokenizer.json", manifest.max_tokens, template)
        self._model = local(directory, precision="fp32")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model.close()

    def tokenize(self, probe: "Probe") -> "Arrays":
        """Return `ids` and `types`, (T,), of a text or pair with its prompt, truncated."""
        import numpy as np

        [encoded] = self._text_encoder.encode([_texts(probe)], prompt=self.facts.prompt(probe.arguments))
        types = encoded.token_type_ids
        return {
            "ids": encoded.input_ids,
            "types": np.zeros(len(encoded.input_ids), np.int64) if types is None else types,
        }

    def run(self, probes: "Sequence[Probe]") -> "Iterator[Arrays]":
        """Yield `hidden` (T, D) and `result`: the embedding (E,), or the logits (C,) with `scores` (C,)."""
        for probe in probes:
            texts = _texts(probe)
            inputs: Any = [texts if len(texts) > 1 else texts[0]]
            options: Any = {"truncate": True, **probe.arguments}
            [encoded] = self._model.encode(inputs, **options)
            assert encoded.last_hidden_state is not None  # noqa: S101 - requested by default
            if self.facts.labels is None:
                [embedding] = self._model.embed(inputs, **options)
                yield {"hidden": encoded.last_hidden_state, "result": embedding}
            else:
                result = self._model.classify(inputs, **options)
                yield {
                    "hidden": encoded.last_hidden_state,
                    "result": result.logits[0],
                    "scores": result.scores[0],
                }


def _texts(probe: "Probe") -> tuple[str, ...]:
    return (probe.text,) if isinstance(probe.text, str) else tuple(probe.text)
