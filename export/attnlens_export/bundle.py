"""From a checkpoint, or a configuration alone, to a complete bundle directory.

    load -> trace -> write graphs and files -> lint -> parity -> manifest -> move into place

All of it happens in a hidden directory beside the target, which only a finished bundle replaces: an
export that is interrupted leaves the target as it was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import onnx

from attnlens.bundle import write_manifest
from attnlens.v1.manifest_pb2 import Manifest
from attnlens.v1.quantization_pb2 import Quantization
from attnlens_export.decisions import describe_decisions, describe_losses
from attnlens_export.errors import GraphError, ParityError, SourceError
from attnlens_export.fp16.convert import to_half
from attnlens_export.fp16.measure import measure_half
from attnlens_export.graph.lint import check_graph
from attnlens_export.graph.names import ATTENTIONS_PATH, DATA_PATH, EMBEDDINGS_PATH, GRAPH_PURPOSES
from attnlens_export.graph.read import check_valid, read_structure
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import (
    MAX_EMBEDDED_BYTES,
    Place,
    verify_places,
    write_data,
    write_embedded,
    write_reduced,
    write_referring,
)
from attnlens_export.int8.quantize import Int8Options, measure_int8, write_int8
from attnlens_export.int8.result import Gate
from attnlens_export.manifest import HALF_PATH, INT8_PATH, describe_bundle, graph_purposes, precision_of
from attnlens_export.parity.grid import Case, default_grid
from attnlens_export.parity.measure import measure_parity
from attnlens_export.parity.result import ParityResult
from attnlens_export.published.heads import Head, find_head
from attnlens_export.published.pooling import read_pooling, write_pooling
from attnlens_export.published.prompts import read_prompts, write_prompts
from attnlens_export.published.side_files import (
    copy_described,
    read_license,
    read_max_tokens,
    write_config,
    write_tokenizer,
)
from attnlens_export.report import write_report
from attnlens_export.staging import staged
from attnlens_export.tokenizer.pairs import takes_pairs
from attnlens_model import Checkpoint, Encoder, EncoderConfig, load_checkpoint, new_encoder

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and of how many."""


Precision = Literal["fp32", "fp16", "int8"]


def no_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class ExportOptions:
    """What may be chosen about an export.

    Attributes:
        name: the model's name; None: the last part of the hub id or of the directory.
        revision: branch, tag or commit on the hub.
        seed: for the weights of a fresh encoder.
        pooling: one of `pooling.POOLINGS` instead of what the checkpoint says; its Dense modules stay.
        normalize: whether embeddings are scaled to length 1 at the end, instead of what the checkpoint says.
        skipped_modules: the kinds of the checkpoint's modules to leave out.
        without_head: whether a classifier, a reranker, a sparse or late-interaction retriever is exported:
            its encoder alone, whose embeddings are then those of a checkpoint without modules.
        prompts: prompts by name, besides those of the checkpoint or instead of them.
        default_prompt: the name of the default prompt, instead of the checkpoint's; empty: none.
        tokenizer: a `tokenizer.json` instead of the checkpoint's.
        force: whether a bundle that is in the way is replaced.
        keep_failed: whether a bundle that fails parity is written all the same, marked as failed.
        parity_tokens: the longest input that is compared; None: what memory allows, see `default_grid`.
        grid: the parity cases; None: `default_grid`.
        tracer: what makes the graph of an encoder; None: `trace`.
        max_embedded_bytes: weights that are larger in sum go to a file of their own.
        precision: `fp16` or `int8` adds a graph of the embeddings in it.
        gate: what the embeddings of a graph in int8 must keep.
        calibration: texts for int8, one per line, besides those of this package; None: only those.
    """

    name: str | None = None
    revision: str | None = None
    seed: int = 0
    pooling: str | None = None
    normalize: bool | None = None
    skipped_modules: Sequence[str] = ()
    without_head: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    tokenizer: Path | None = None
    force: bool = False
    keep_failed: bool = False
    parity_tokens: int | None = None
    grid: Sequence[Case] | None = None
    tracer: Callable[[Encoder, EncoderConfig], TracedGraph] | None = None
    max_embedded_bytes: int = MAX_EMBEDDED_BYTES
    precision: Precision = "fp32"
    gate: Gate = field(default_factory=Gate)
    calibration: Path | None = None


@dataclass(frozen=True)
class BundleSummary:
    """A bundle that was written.

    Attributes:
        directory: where it is.
        manifest: its manifest.
        parity: every measurement.
        unused_tensors: the checkpoint's tensors that are no part of the encoder.
        built_tokenizer: what `tokenizer.json` was built from; empty where it was not built.
        decisions: lines on how it embeds, its prompts and its longest input, and whose choice that was.
        warnings: lines on what of the checkpoint it lacks and somebody might count on.
    """

    directory: Path
    manifest: Manifest
    parity: ParityResult
    unused_tensors: tuple[str, ...]
    built_tokenizer: str
    decisions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Model:
    encoder: Encoder
    config: EncoderConfig
    directory: Path | None
    source: str
    name: str
    unused_tensors: tuple[str, ...] = ()
    commit: str = ""
    head: Head | None = None
    warnings: tuple[str, ...] = ()

    @property
    def embedder(self) -> Path | None:
        """Where it says how to embed, if it does."""
        return None if self.head else self.directory


def export_bundle(
    source: str | Path | EncoderConfig,
    output: Path,
    options: ExportOptions | None = None,
    progress: Progress = no_progress,
) -> BundleSummary:
    """Export a checkpoint, or a fresh encoder from a configuration, as a bundle.

    Args:
        source: a checkpoint's directory, a hub id, or a configuration.
        output: the directory to make.
        options: see `ExportOptions`.
        progress: called before each step. What it raises ends the export and leaves nothing behind.

    Raises:
        ModelError: the checkpoint can't be loaded.
        SourceError: its tokenizer, pooling or name can't become a bundle, it is a classifier or the like (not
            with `without_head`), or a fresh encoder is too large.
        OutputError: `output` exists, or can't be written.
        GraphError: the encoder can't be brought into a portable graph.
        LintError: a graph is not portable.
        ParityError: a graph does not compute what the encoder computes (not with `keep_failed`).
        AccuracyError: no graph in int8 passes the gate.
    """
    options = options or ExportOptions()
    with staged(output, force=options.force) as staging:
        progress("Loading the weights", 0, 1)
        model = _load(source, options)
        manifest, parity, built_tokenizer = _build(staging, model, options, progress)
    is_chosen = options.pooling is not None or options.normalize is not None
    decisions = describe_decisions(
        manifest, model.directory, is_chosen=is_chosen, has_head=model.head is not None
    )
    return BundleSummary(
        output, manifest, parity, model.unused_tensors, built_tokenizer, decisions, model.warnings
    )


def check_graphs(directory: Path, config: EncoderConfig) -> None:
    """Check the graphs of a bundle with ONNX's own checker and with ours.

    Raises:
        GraphError: ONNX refuses one.
        LintError: one is not what a bundle promises.
    """
    for path, purpose in graph_purposes(directory).items():
        try:
            check_valid(directory / path)
        except onnx.checker.ValidationError as error:
            raise GraphError(f"{directory / path} is not valid ONNX: {error}") from error
        structure = read_structure(directory / path)
        where = (directory / path).parent
        check_graph(structure, path, config, purpose, precision=precision_of(path), directory=where)


def _load(source: str | Path | EncoderConfig, options: ExportOptions) -> _Model:
    if isinstance(source, EncoderConfig):
        name = options.name or f"{source.family}-{source.num_layers}x{source.hidden_size}"
        model = _Model(_fresh(source, options.seed), source, None, f"config+seed:{options.seed}", name)
    else:
        checkpoint = load_checkpoint(source, options.revision)
        model = _of_checkpoint(checkpoint, options)
    # Control characters, and the halves of characters that stand for bytes of a path that are not UTF-8.
    for text in (model.name, model.source):
        if not text.isprintable():
            raise SourceError(f"{text!r} can't be printed: choose another --name and directory of the SOURCE")
    return model


def _of_checkpoint(checkpoint: Checkpoint, options: ExportOptions) -> _Model:
    directory = checkpoint.directory
    head = find_head(directory, checkpoint.unused_tensors)
    if head and not options.without_head:
        raise SourceError(
            f"{head.describe()}. A bundle holds the encoder alone, and nobody trained its token vectors to "
            "be pooled: export an embedding model, or add --without-head for the token vectors and attention "
            "weights of this encoder"
        )
    warnings = list(describe_losses(directory, has_own_code=checkpoint.has_own_code))
    if head:
        warnings.insert(0, f"{head.describe()}. That is left out; nobody trained it to give embeddings")
    return _Model(
        checkpoint.encoder,
        checkpoint.config,
        directory,
        checkpoint.source,
        options.name or checkpoint.source.rpartition("/")[2],
        checkpoint.unused_tensors,
        checkpoint.commit,
        head,
        tuple(warnings),
    )


def _fresh(config: EncoderConfig, seed: int) -> Encoder:
    try:
        return new_encoder(config, seed)
    except (RuntimeError, MemoryError) as error:
        raise SourceError(f"no memory for an encoder of this size: {config}") from error


def _build(
    directory: Path, model: _Model, options: ExportOptions, progress: Progress
) -> tuple[Manifest, ParityResult, str]:
    config = model.config
    pooling = read_pooling(
        model.embedder, config.hidden_size, options.pooling, options.normalize, options.skipped_modules
    )
    prompts = read_prompts(model.directory, options.prompts, options.default_prompt)
    max_tokens = read_max_tokens(model.directory, config)
    embeddings, places = _write_graphs(directory, model, options, progress)
    has_external_data = (directory / DATA_PATH).is_file()
    progress("Writing the tokenizer and configuration", 0, 1)
    copy_described(directory, model.directory, is_embedder=model.head is None)
    write_config(directory, model.directory, config, external_data=has_external_data)
    built_tokenizer = write_tokenizer(directory, model.directory, options.tokenizer, config, max_tokens)
    write_pooling(directory, model.embedder, config.hidden_size, pooling, max_tokens)
    write_prompts(directory, prompts)
    quantization = Quantization()
    if options.precision == "int8":
        chosen = Int8Options(options.gate, options.calibration, options.max_embedded_bytes)
        quantization = write_int8(directory, config, embeddings, places, chosen, progress)
    check_graphs(directory, config)
    cases = options.grid or default_grid(config, options.parity_tokens)

    def case_progress(done: int, total: int, case: str) -> None:
        progress(f"Parity {case}", done, total)

    parity = measure_parity(
        model.encoder,
        config,
        directory,
        list(GRAPH_PURPOSES),
        cases,
        reference_name=model.source,
        progress=case_progress,
    )
    if options.precision == "fp16":
        half = measure_half(model.encoder, config, directory, cases, progress=case_progress)
        parity = replace(parity, half=half)
    if options.precision == "int8":
        int8 = measure_int8(directory, config, options.gate, quantization.kinds)
        int8.write_to(quantization)
        parity = replace(parity, int8=int8)
    if not parity.passed and not options.keep_failed:
        raise ParityError(describe_failure(parity))
    write_report(directory / "parity", parity, model.name)
    progress("Hashing the files", 0, 1)
    manifest = describe_bundle(directory, config)
    for graph in manifest.graphs:
        if graph.path == INT8_PATH:
            graph.quantization.CopyFrom(quantization)
    manifest.model_name, manifest.source, manifest.source_revision = model.name, model.source, model.commit
    manifest.weights_license = read_license(model.directory)
    manifest.pooling.CopyFrom(read_pooling(directory, config.hidden_size))
    manifest.prompts.update(prompts.texts)
    manifest.default_prompt_name = prompts.default_name
    manifest.max_tokens = max_tokens
    manifest.text_pairs = takes_pairs(directory, config)
    manifest.parity.CopyFrom(parity.to_message())
    write_manifest(directory, manifest)
    return manifest, parity, built_tokenizer


def _write_graphs(
    directory: Path, model: _Model, options: ExportOptions, progress: Progress
) -> tuple[TracedGraph, dict[str, Place]]:
    """Trace and write both graphs; return that of the embeddings and where their weights are."""
    progress("Tracing the encoder", 0, 1)
    attentions = (options.tracer or trace)(model.encoder, model.config)
    embeddings = embeddings_graph(attentions)
    weights = attentions.weights
    progress("Writing the graphs", 0, 1)
    (directory / "onnx").mkdir()
    has_external_data = sum(array.nbytes for array in weights.values()) > options.max_embedded_bytes
    if has_external_data:
        places = write_data(directory / DATA_PATH, weights)
        write_referring(directory / EMBEDDINGS_PATH, embeddings.proto, weights, places)
    else:
        places = write_embedded(directory / EMBEDDINGS_PATH, embeddings.proto, weights)
    write_referring(directory / ATTENTIONS_PATH, attentions.proto, weights, places)
    verify_places(directory / "onnx", weights, places)
    if options.precision == "fp16":
        _write_half(directory / HALF_PATH, embeddings, options.max_embedded_bytes)
    return embeddings, places


def _write_half(path: Path, embeddings: TracedGraph, max_bytes: int) -> None:
    """Write the graph in fp16, which is always a single file.

    Raises:
        GraphError: it would be too large for one, or a weight is beyond the range of fp16.
    """
    half = to_half(embeddings)
    write_reduced(path, half.proto, half.weights, precision="fp16", max_bytes=max_bytes)


def describe_failure(parity: ParityResult) -> str:
    """Return one line with the worst place and the number of others."""
    failures = parity.failures()
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return f"parity failed: {failures[0]}{more}"
