"""From a checkpoint, or a configuration alone, to a complete bundle directory.

    load -> trace -> write graphs and files -> lint -> parity -> manifest -> faithfulness -> move into place

All of it happens in a hidden directory beside the target, which only a finished bundle replaces: an
export that is interrupted leaves the target as it was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from attnlens.bundle import write_manifest
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_export.contents import check_graphs, measure_graphs
from attnlens_export.contributions.write import write_contributions
from attnlens_export.decisions import describe_decisions, describe_losses
from attnlens_export.errors import ParityError, SourceError
from attnlens_export.faithfulness.measure import measure_at_export
from attnlens_export.faithfulness.result import record
from attnlens_export.graph.names import ATTENTIONS_PATH, DATA_PATH, EMBEDDINGS_PATH
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import (
    MAX_EMBEDDED_BYTES,
    verify_places,
    write_data,
    write_embedded,
    write_referring,
)
from attnlens_export.manifest import Origin, describe_bundle
from attnlens_export.parity.grid import Case, default_grid
from attnlens_export.parity.measure import Subject
from attnlens_export.precision import Fp32Graph, Precision
from attnlens_export.progress import Progress, no_progress
from attnlens_export.published.choices import AttentionChoices, RandomBlocksChoice
from attnlens_export.published.heads import Head, find_head
from attnlens_export.published.pooling import (
    POOLINGS,
    check_pooling_known,
    read_pooling,
    write_pooling,
)
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
from attnlens_export.verdict import Verdict
from attnlens_model import (
    Checkpoint,
    Encoder,
    EncoderConfig,
    load_checkpoint,
    new_encoder,
)

_ADD_TOKENIZER = "To send texts, export it again with --tokenizer FILE"


@dataclass(frozen=True)
class ExportOptions:
    """What may be chosen about an export.

    Attributes:
        name: the model's name; None: the last part of the hub id or of the directory.
        revision: branch, tag or commit on the hub.
        adapter_task: Task whose adapters are merged into the weights, or "none". Required if the checkpoint
            has adapters for tasks.
        seed: for the weights of a fresh encoder.
        pooling: One of `pooling.POOLINGS` instead of what the checkpoint says, required if it says nothing;
            its Dense modules stay.
        normalize: whether embeddings are scaled to length 1 at the end, instead of what the checkpoint says.
        skipped_modules: the kinds of the checkpoint's modules to leave out.
        without_head: whether a classifier, a reranker, a sparse or late-interaction retriever is exported:
            its encoder alone, with the `pooling` that is chosen.
        global_tokens: how many global tokens each layer of the kind "longformer" has, instead of what the
            configuration says.
        random_blocks: of each layer of the kind "big_bird", instead of what the configuration says:
            "original", those that it was trained with, or "transformers": what transformers computes.
        prompts: prompts by name, besides those of the checkpoint or instead of them.
        default_prompt: the name of the default prompt, instead of the checkpoint's; empty: none.
        tokenizer: a `tokenizer.json` instead of the checkpoint's.
        force: whether a bundle that is in the way is replaced.
        keep_failed: whether a bundle that fails parity is written all the same, marked as failed.
        parity_tokens: the longest input that is compared; None: what memory allows, see `default_grid`.
        grid: the parity cases; None: `default_grid`.
        tracer: what makes the graph of an encoder; None: `trace`.
        max_embedded_bytes: weights that are larger in sum go to a file of their own.
        precisions: each adds a graph of the embeddings in it; see `PRECISIONS`.
        faithfulness: Whether to measure how well explanations rank tokens; see `measure_at_export`.
    """

    name: str | None = None
    revision: str | None = None
    adapter_task: str | None = None
    seed: int = 0
    pooling: str | None = None
    normalize: bool | None = None
    skipped_modules: Sequence[str] = ()
    without_head: bool = False
    global_tokens: int | None = None
    random_blocks: RandomBlocksChoice | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    tokenizer: Path | None = None
    force: bool = False
    keep_failed: bool = False
    parity_tokens: int | None = None
    grid: Sequence[Case] | None = None
    tracer: Callable[[Encoder, EncoderConfig], TracedGraph] | None = None
    max_embedded_bytes: int = MAX_EMBEDDED_BYTES
    precisions: Sequence[Precision] = ()
    faithfulness: bool = True


@dataclass(frozen=True)
class BundleSummary:
    """A bundle that was written.

    Attributes:
        directory: where it is.
        manifest: its manifest.
        verdict: every measurement.
        unused_tensors: the checkpoint's tensors that are no part of the encoder.
        built_tokenizer: what `tokenizer.json` was built from; empty where it was not built.
        decisions: lines on how it embeds, its prompts and its longest input, and whose choice that was.
        warnings: lines on what of the checkpoint it lacks and somebody might count on.
    """

    directory: Path
    manifest: Manifest
    verdict: Verdict
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
    adapter_task: str = ""

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
        model = _load(source, options, progress)
        built = _build(staging, model, options, progress)
    manifest = built.manifest
    is_chosen = options.pooling is not None or options.normalize is not None
    decisions = describe_decisions(
        manifest,
        model.directory,
        is_chosen=is_chosen,
        has_head=model.head is not None,
        adapter_task=model.adapter_task,
    )
    warnings = model.warnings
    if model.directory is not None and not (output / "tokenizer.json").is_file():
        warnings += (f"{model.source} has no tokenizer: the bundle takes token ids only. {_ADD_TOKENIZER}",)
    if built.no_contributions:
        warnings += (_describe_missing_contributions(model.config, built.no_contributions),)
    return BundleSummary(
        output, manifest, built.verdict, model.unused_tensors, built.tokenizer, decisions, warnings
    )


def _describe_missing_contributions(config: EncoderConfig, reason: str) -> str:
    """Return a warning: what does not work, what does instead, and the cause for developers."""
    kinds = ", ".join(dict.fromkeys(attention.kind for attention in config.layer_attentions))
    return (
        "this bundle can't explain embeddings by contributions, the default method of `attnlens explain`: "
        f"the exporter can't derive them for this encoder (attention: {kinds}). Use another method, such as "
        "--method leave_one_out. Cause, for the developer of the encoder: "
        f"{reason.removeprefix('no contributions: ')}; see docs/bundle.md, "
        '"A mechanism of your own"'
    )


def _load(source: str | Path | EncoderConfig, options: ExportOptions, progress: Progress) -> _Model:
    choices = AttentionChoices(options.global_tokens, options.random_blocks)

    def chosen(config: EncoderConfig) -> EncoderConfig:
        progress("Loading the weights", "", 0, 1)  # config.json was found and read
        return choices.applied(config)

    if isinstance(source, EncoderConfig):
        progress("Initializing the weights", "", 0, 1)
        source = choices.applied(source)
        name = options.name or f"{source.family}-{source.num_layers}x{source.hidden_size}"
        model = _Model(_fresh(source, options.seed), source, None, f"config+seed:{options.seed}", name)
    else:
        checkpoint = load_checkpoint(source, options.revision, chosen, adapter_task=options.adapter_task)
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
            "be pooled: export an embedding model, or add --without-head, with the --pooling of your choice, "
            "for the token vectors and attention weights of this encoder"
        )
    if head is None:
        check_pooling_known(directory, options.pooling)
    elif options.pooling is None:
        raise SourceError(
            f"{head.describe()}, so that it does not say how token vectors become an embedding: choose with "
            f"--pooling {'|'.join(POOLINGS)}; token vectors and attention do not depend on the choice"
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
        checkpoint.adapter_task,
    )


def _fresh(config: EncoderConfig, seed: int) -> Encoder:
    try:
        return new_encoder(config, seed)
    except (RuntimeError, MemoryError) as error:
        raise SourceError(f"no memory for an encoder of this size: {config}") from error


class _Built(NamedTuple):
    """What became of the parts of a bundle."""

    manifest: Manifest
    verdict: Verdict
    tokenizer: str
    """What it was built from."""
    no_contributions: str
    """Why there is no graph of contributions."""


def _build(directory: Path, model: _Model, options: ExportOptions, progress: Progress) -> _Built:
    config = model.config
    pooling = read_pooling(
        model.embedder, config.vector_size, options.pooling, options.normalize, options.skipped_modules
    )
    prompts = read_prompts(model.directory, options.prompts, options.default_prompt)
    max_tokens = read_max_tokens(model.directory, config)
    # Before tracing, which takes longer: these files may turn out to be broken.
    copy_described(directory, model.directory, is_embedder=model.head is None)
    built_tokenizer = write_tokenizer(directory, model.directory, options.tokenizer, config, max_tokens)
    fp32 = _write_graphs(directory, model, options, progress)
    missing = write_contributions(fp32, model.embedder, pooling)
    progress("Writing the configuration", "", 0, 1)
    has_data = (directory / DATA_PATH).is_file()
    write_config(directory, model.directory, config, external_data=has_data, adapter_task=model.adapter_task)
    write_pooling(directory, model.embedder, config.vector_size, pooling, max_tokens)
    write_prompts(directory, prompts)
    stated = {precision.path: precision.write(fp32, progress) for precision in options.precisions}
    check_graphs(directory, config)
    cases = options.grid or default_grid(config, options.parity_tokens)
    subject = Subject(directory, model.encoder, config, model.source, cases)
    beyond_grid = options.grid is None and options.parity_tokens is None
    verdict = measure_graphs(subject, stated, progress, beyond_grid=beyond_grid)
    if not verdict.passed and not options.keep_failed:
        raise ParityError(verdict.describe_failure())
    write_report(directory / "parity", verdict, model.name)
    progress("Hashing the files", "", 0, 1)
    origin = Origin(model.name, model.source, model.commit, read_license(model.directory))
    manifest = describe_bundle(directory, config, origin, verdict)
    write_manifest(directory, manifest)
    if options.faithfulness and verdict.passed:
        measured = measure_at_export(directory, partial(progress, "Faithfulness"))
        manifest = record(directory, measured) if measured else manifest
    return _Built(manifest, verdict, built_tokenizer, missing)


def _write_graphs(directory: Path, model: _Model, options: ExportOptions, progress: Progress) -> Fp32Graph:
    """Trace and write both graphs in fp32; return that of the embeddings."""
    progress("Tracing the encoder", "", 0, 1)
    attentions = (options.tracer or trace)(model.encoder, model.config)
    embeddings = embeddings_graph(attentions)
    weights = attentions.weights
    progress("Writing the graphs", "", 0, 1)
    (directory / "onnx").mkdir()
    max_bytes = options.max_embedded_bytes
    if sum(array.nbytes for array in weights.values()) > max_bytes:
        places = write_data(directory / DATA_PATH, weights)
        write_referring(directory / EMBEDDINGS_PATH, embeddings.proto, embeddings.weights, places)
    else:
        places = write_embedded(directory / EMBEDDINGS_PATH, embeddings.proto, embeddings.weights)
    write_referring(directory / ATTENTIONS_PATH, attentions.proto, weights, places)
    verify_places(directory / "onnx", weights, places)
    return Fp32Graph(directory, model.config, embeddings, places, max_bytes)
