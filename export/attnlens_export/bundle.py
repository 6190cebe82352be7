"""Export of a checkpoint, or of a configuration with random weights, to a bundle.

    load -> trace -> write graphs and files -> lint -> parity -> comparison with the publisher's pipeline
    -> embedding ranges -> manifest -> faithfulness -> move into place

The bundle is written to a hidden directory next to the target and moved when it is complete. An interrupted
export does not change the target.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from attnlens.bundle import embedding_size, write_manifest
from attnlens.published import ON_REQUEST
from attnlens.short_repr import short_repr
from attnlens.v1.manifest_pb2 import Activation, Dense, Manifest, Pooling, PoolingDefaults
from attnlens_export.classification import logits_graph
from attnlens_export.contents import Verdict, check_graphs, measure_graphs
from attnlens_export.contributions.write import read_layer, write_contributions
from attnlens_export.embedding_ranges import measure_ranges
from attnlens_export.errors import DifferenceError, ParityError, SourceError
from attnlens_export.faithfulness.measure import measure_at_export, record
from attnlens_export.graph.names import ATTENTIONS_PATH, DATA_PATH, ENCODER_PATH, MODEL_PATH
from attnlens_export.graph.trace import TracedGraph, embeddings_graph, trace
from attnlens_export.graph.write import (
    MAX_EMBEDDED_BYTES,
    verify_places,
    write_data,
    write_embedded,
    write_referring,
)
from attnlens_export.int8.precision import Int8
from attnlens_export.int8.result import Gate
from attnlens_export.judge.compare import Rounding
from attnlens_export.judge.question import (
    CHOSEN,
    NEEDS_CODE,
    NO_TOKENIZER,
    Answer,
    Question,
    ask_publisher,
    check_described_size,
    check_memory,
    compare_with_publisher,
    libraries_of,
    runs_concurrently,
)
from attnlens_export.judge.reader import BundleReader
from attnlens_export.judge.result import PublisherResult
from attnlens_export.manifest import Origin, describe_bundle
from attnlens_export.parity.grid import Case, default_grid
from attnlens_export.parity.measure import Subject
from attnlens_export.parity.stored import References
from attnlens_export.precision import Fp32Graph, Precision, Stated
from attnlens_export.progress import Progress, beside, no_progress, no_stage_progress
from attnlens_export.published.chat_template import render_template
from attnlens_export.published.choices import AttentionChoices, RandomBlocksChoice
from attnlens_export.published.classifier import (
    LAYOUTS,
    find_classifier,
    is_derived,
    is_part,
    read_head,
    write_classifier_files,
    write_head,
)
from attnlens_export.published.classifier import Head as ClassificationHead
from attnlens_export.published.heads import Head, find_head, is_masked_language_model
from attnlens_export.published.modules import MODULES_FILE
from attnlens_export.published.pooling import (
    POOLINGS,
    check_pooling_known,
    read_pooling,
    write_pooling,
)
from attnlens_export.published.prompts import Prompts, read_prompts, write_prompts
from attnlens_export.published.settings import check_settings, lacks_template_setting
from attnlens_export.published.side_files import (
    TASK_KEY,
    TEMPLATE_KEY,
    copy_described,
    read_license,
    read_max_tokens,
    read_sentence_config,
    write_config,
)
from attnlens_export.report import write_report
from attnlens_export.results import describe_first
from attnlens_export.staging import staged
from attnlens_export.tokenizer.pairs import takes_pairs
from attnlens_export.tokenizer.write import write_tokenizer
from attnlens_model import (
    NO_TASK,
    Checkpoint,
    CodeHook,
    Encoder,
    EncoderConfig,
    ModuleEncoder,
    StagedCheckpoint,
    load_checkpoint,
    new_encoder,
    open_checkpoint,
    wrap_module,
)
from attnlens_model.checkpoint.published import is_published
from attnlens_publisher.process import start
from attnlens_publisher.tokenizer import Choice

_MAX_LABELS = 5
# Files of bge-m3 with heads for other kinds of retrieval.
_HEAD_FILES = ("colbert_linear.pt", "sparse_linear.pt")


@short_repr
@dataclass(frozen=True)
class ExportOptions:
    """Options of an export. They override the settings of the checkpoint.

    Attributes:
        name: Model name. If None, the last part of the hub id or directory.
        revision: Branch, tag or commit on the hub.
        adapter_task: Task whose adapters are merged into the weights, or "none". Required if the checkpoint
            has adapters for tasks.
        seed: Seed of randomly initialized weights.
        pooling: One of `pooling.POOLINGS`. Required if the checkpoint does not specify a pooling. Its Dense
            modules are kept.
        normalize: Whether embeddings are scaled to length 1.
        similarity: "cosine" to export a checkpoint whose embeddings are compared by another function. Clients
            then compare them by cosine.
        skipped_modules: Types of checkpoint modules to omit.
        without_head: Whether to export only the encoder of a classifier, a reranker, or a sparse or
            late-interaction retriever. Requires `pooling`.
        global_tokens: Number of global tokens of each "longformer" layer.
        random_blocks: Random blocks of each "big_bird" layer: "original" for those of the training, or
            "transformers" for those that transformers computes.
        prompts: Prompts by name, in addition to those of the checkpoint.
        default_prompt: Name of the default prompt. Empty for none.
        tokenizer: Path of a `tokenizer.json` to use instead of the checkpoint's tokenizer. "published" or
            "transformers" chooses the token ids if the checkpoint's `tokenizer.json` and transformers give
            different ones.
        force: Whether to replace an existing bundle.
        keep_failed: Whether to write a bundle that fails parity. It is marked as failed.
        parity_tokens: Maximum length of the grid. If None, the memory limits of `default_grid` apply.
        grid: Parity cases. If None, `default_grid`.
        tracer: Function that traces an encoder. If None, `trace`.
        max_embedded_bytes: Maximum size of all weights in a single ONNX file. Larger weights are stored in a
            separate file.
        precisions: Lower precisions. Each adds an embeddings graph, see `PRECISIONS`.
        faithfulness: Whether to measure how well explanations rank tokens, see `measure_at_export`.
        comparison: Whether to compare the results of a checkpoint with its publisher's pipeline. It needs
            sentence-transformers if the checkpoint was saved by it.
    """

    name: str | None = None
    revision: str | None = None
    adapter_task: str | None = None
    seed: int = 0
    pooling: str | None = None
    normalize: bool | None = None
    similarity: Literal["cosine"] | None = None
    skipped_modules: Sequence[str] = ()
    without_head: bool = False
    global_tokens: int | None = None
    random_blocks: RandomBlocksChoice | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    tokenizer: Path | Choice | None = None
    force: bool = False
    keep_failed: bool = False
    parity_tokens: int | None = None
    grid: Sequence[Case] | None = None
    tracer: Callable[[Encoder | ModuleEncoder, EncoderConfig], TracedGraph] | None = None
    max_embedded_bytes: int = MAX_EMBEDDED_BYTES
    precisions: Sequence[Precision] = ()
    faithfulness: bool = True
    comparison: bool = True


@short_repr
@dataclass(frozen=True)
class BundleSummary:
    """Result of an export.

    Attributes:
        directory: Bundle directory.
        manifest: Manifest of the bundle.
        verdict: All measurements.
        unused_tensors: Tensors of the checkpoint that do not belong to the encoder.
        decisions: Lines on tokenizer, pooling, prompts and maximum length, and who decided them.
        warnings: Lines on parts of the checkpoint that the bundle lacks.
    """

    directory: Path
    manifest: Manifest
    verdict: Verdict
    unused_tensors: tuple[str, ...]
    decisions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        counts = {name: len(getattr(self, name)) for name in ("unused_tensors", "decisions", "warnings")}
        parts = [f"{number} {name.replace('_', ' ')}" for name, number in counts.items()]
        return f"BundleSummary({str(self.directory)!r}, {self.verdict!r}, {', '.join(parts)})"


@dataclass(frozen=True)
class _Model:
    encoder: Encoder | ModuleEncoder
    config: EncoderConfig
    directory: Path | None
    source: str
    name: str
    unused_tensors: tuple[str, ...] = ()
    commit: str = ""
    head: Head | None = None
    warnings: tuple[str, ...] = ()
    adapter_task: str = ""
    classifier: ClassificationHead | None = None
    has_own_code: bool = False
    is_loaded: bool = True

    @property
    def embedder(self) -> Path | None:
        """Directory with the embedding settings. None for a model with a head, or without a checkpoint."""
        return None if self.head or self.classifier else self.directory


def export_bundle(
    source: str | Path | EncoderConfig,
    output: Path,
    options: ExportOptions | None = None,
    progress: Progress = no_progress,
) -> BundleSummary:
    """Export a checkpoint, or a randomly initialized encoder, as a bundle.

    Args:
        source: Directory or hub id of a checkpoint, or a configuration for random weights.
        output: Bundle directory to create.
        options: Options of the export.
        progress: Called before each step. An exception that it raises cancels the export and removes all
            files.

    Raises:
        ModelError: The checkpoint can't be loaded.
        SourceError: The tokenizer, pooling or name is not supported, the checkpoint has a head (unless
            `without_head` is set), or the encoder does not fit into memory.
        OutputError: `output` exists or can't be written.
        GraphError: The encoder can't be converted to a portable graph.
        LintError: A graph is not portable.
        ParityError: A graph differs from the encoder (unless `keep_failed` is set).
        DifferenceError: The bundle differs from the publisher's pipeline.
        AccuracyError: No graph in int8 passes the gate.
    """
    options = options or ExportOptions()
    with ExitStack() as stack:  # keeps the files of the checkpoint until the bundle is written
        return _export(lambda: _load(source, options, progress, stack), output, options, progress)


def export_module(
    module: nn.Module,
    output: Path,
    *,
    vocab_size: int,
    max_tokens: int,
    pad_token_id: int = 0,
    is_causal: bool = False,
    embeddings: str | None = None,
    options: ExportOptions | None = None,
    progress: Progress = no_progress,
) -> BundleSummary:
    """Export a module that the user has written as a bundle.

    Dimensions: B batch, T tokens, D hidden size, H heads.

    Args:
        module: Module on the CPU, in fp32 and eval mode. It maps token ids (B, T) and an attention mask
            (B, T), both int64, to hidden states (B, T, D) and a list with the attention weights of each
            layer, (B, H, T, T). The mask is 1 for tokens and 0 for padding, which is on the right. Every text
            has at least one token.
        output: Bundle directory to create.
        vocab_size: Number of token ids.
        max_tokens: Maximum input length in tokens.
        pad_token_id: Token id for padding.
        is_causal: Whether tokens only attend to themselves and preceding tokens.
        embeddings: Name of the submodule that returns token embeddings, to which explanations assign
            contributions. By default, the `nn.Embedding` that is called with the token ids.
        options: Options of the export. `tokenizer` is needed to send texts. `pooling` defaults to the mean.
        progress: Called before each step.

    Raises:
        ConfigError: The module fails, or its results have the wrong shapes.
        SourceError, OutputError, GraphError, LintError, ParityError: See `export_bundle`.
    """
    options = options or ExportOptions()
    encoder = wrap_module(
        module,
        vocab_size=vocab_size,
        max_tokens=max_tokens,
        pad_token_id=pad_token_id,
        is_causal=is_causal,
        embeddings=embeddings,
    )
    name = type(module).__name__
    model = _Model(encoder, encoder.config, None, f"module {name}", options.name or name, is_loaded=False)
    return _export(lambda: model, output, options, progress)


def _export(
    load: Callable[[], "_Model"], output: Path, options: ExportOptions, progress: Progress
) -> BundleSummary:
    with staged(output, force=options.force) as staging:
        model = load()
        built = _build(staging, model, options, progress)
    is_chosen = options.pooling is not None or options.normalize is not None
    decisions = tuple(_describe_decisions(built.manifest, model, is_chosen=is_chosen))
    if built.tokenizer:
        decisions += (f"tokenizer: {built.tokenizer}",)
    warnings = model.warnings
    if model.directory is not None and not (output / "tokenizer.json").is_file():
        remedy = "To send texts, export it again with --tokenizer FILE"
        warnings += (f"{model.source} has no tokenizer: the bundle accepts only token ids. {remedy}",)
    if built.no_contributions:
        warnings += (_describe_missing_contributions(model.config, built.no_contributions),)
    return BundleSummary(output, built.manifest, built.verdict, model.unused_tensors, decisions, warnings)


def _describe_decisions(manifest: Manifest, model: "_Model", *, is_chosen: bool) -> Iterator[str]:
    """Yield lines on embeddings, prompts, maximum length and task.

    Args:
        manifest: Manifest of the bundle.
        model: The exported model.
        is_chosen: Whether the options specify pooling or normalization.
    """
    if manifest.HasField("classifier"):
        yield _describe_classifier(manifest)
    else:
        if model.embedder is not None and (model.embedder / MODULES_FILE).exists():
            origin = "changed by the options" if is_chosen else "as in the checkpoint"
        elif is_chosen:
            origin = "as in the options"
        else:
            origin = "the default of a newly initialized encoder, see --pooling and --normalize"
        steps = "; ".join(_describe_pooling(manifest))
        yield f"embeddings: {steps}; {embedding_size(manifest)} components ({origin})"
    prompts = (
        f"{name} {text!r}" + (" (default)" if name == manifest.default_prompt_name else "")
        for name, text in sorted(manifest.prompts.items())
    )
    yield f"prompts: {', '.join(prompts) or 'none'}"
    if manifest.HasField("chat_template"):
        frame = manifest.chat_template.without_prompt
        yield f"chat template: each text is inserted between {frame.before_text!r} and {frame.after_text!r}"
    positions = manifest.architecture.max_position_embeddings
    if manifest.max_tokens < positions:
        yield (
            f"maximum input: {manifest.max_tokens} tokens, the publisher's limit (the encoder supports "
            f"{positions})"
        )
    else:
        yield f"maximum input: {positions} tokens, the limit of the encoder"
    if model.adapter_task == NO_TASK:
        yield "task: none, the adapters of all tasks are omitted as requested"
    elif model.adapter_task:
        yield f"task: {model.adapter_task}, whose adapters are merged into the weights as requested"


def _describe_pooling(manifest: Manifest) -> Iterator[str]:
    pooling = manifest.pooling
    excluded = " except those of a prompt" if pooling.exclude_prompt else ""
    yield f"{Pooling.Name(pooling.pooling).removeprefix('POOLING_').lower()} over the tokens{excluded}"
    for layer in pooling.dense:
        if layer.normalize_input:
            yield "scaled to length 1"
        yield _describe_dense(layer)
    yield "scaled to length 1" if pooling.normalize else "not normalized"
    if pooling.truncate_dim:
        yield "truncated"


def _describe_classifier(manifest: Manifest) -> str:
    classifier = manifest.classifier
    activation = Activation.Name(classifier.activation).removeprefix("ACTIVATION_").lower()
    scores = "logits" if activation == "identity" else f"the {activation} of the logits"
    if len(classifier.labels) == 1:
        return f"reranker: one logit for a pair of texts; scores are {scores}"
    labels = ", ".join(classifier.labels[:_MAX_LABELS]) + (
        ", ..." if len(classifier.labels) > _MAX_LABELS else ""
    )
    return f"classifier: {len(classifier.labels)} labels ({labels}); scores are {scores}"


def _describe_dense(layer: Dense) -> str:
    activation = Activation.Name(layer.activation).removeprefix("ACTIVATION_").lower()
    bias = "" if layer.bias else ", no bias"
    return f"dense {layer.in_features} -> {layer.out_features} ({activation}{bias})"


def _describe_missing_contributions(config: EncoderConfig, reason: str) -> str:
    """Return a warning with the consequence, an alternative, and the cause for developers."""
    kinds = ", ".join(dict.fromkeys(attention.kind for attention in config.layer_attentions))
    return (
        "this bundle does not support contributions, the default method of `attnlens explain`, because the "
        f"exporter can't derive them for this encoder (attention: {kinds}). Use another method, such as "
        "--method leave_one_out. Cause, for the developer of the encoder: "
        f"{reason.removeprefix('no contributions: ')}; see docs/bundle.md, "
        '"A mechanism of your own"'
    )


def _load(
    source: str | Path | EncoderConfig, options: ExportOptions, progress: Progress, stack: ExitStack
) -> _Model:
    choices = AttentionChoices(options.global_tokens, options.random_blocks)

    def chosen(config: EncoderConfig) -> EncoderConfig:
        progress("Loading the weights", "", 0, 1)  # called after config.json was read
        return choices.applied(config)

    if isinstance(source, EncoderConfig):
        progress("Initializing the weights", "", 0, 1)
        source = choices.applied(source)
        name = options.name or f"{source.family}-{source.num_layers}x{source.hidden_size}"
        encoder = _initialize(source, options.seed)
        model = _Model(encoder, source, None, f"config+seed:{options.seed}", name)
    else:
        opened = stack.enter_context(open_checkpoint(source, options.revision))
        _check_sizes(opened, options)
        checkpoint = load_checkpoint(opened, change=chosen, adapter_task=options.adapter_task)
        model = _from_checkpoint(checkpoint, options)
    # Rejects control characters, and surrogates, which represent bytes of a path that are not UTF-8.
    for text in (model.name, model.source):
        if not text.isprintable():
            raise SourceError(
                f"{text!r} contains characters that can't be printed: rename the directory of the SOURCE and "
                "choose another --name"
            )
    return model


def _check_sizes(opened: StagedCheckpoint, options: ExportOptions) -> None:
    """Check that the export fits into memory, and that transformers can load a checkpoint."""
    check_memory(opened.directory, has_comparison=options.comparison and not opened.code)
    if is_published(opened.directory):
        check_described_size(opened.directory)


def _from_checkpoint(checkpoint: Checkpoint, options: ExportOptions) -> _Model:
    directory, unused = checkpoint.directory, checkpoint.unused_tensors
    head, classifier = find_head(directory, unused), None
    layout = find_classifier(directory, unused) if head and not options.without_head else None
    if layout is not None:
        _check_classifier_options(options)
        if layout is LAYOUTS["Longformer"] and options.global_tokens is None:
            raise SourceError(
                "transformers makes the first token of a Longformer classifier global, which is not in "
                "config.json: add --global-tokens 1"
            )
        classifier, head = read_head(directory, layout, checkpoint.config.vector_size), None
    elif head and not options.without_head:
        raise SourceError(
            f"{head.describe()}. Bundles do not support its head, and its token vectors were not trained to "
            f"be pooled: {head.remedy}, or add --without-head and a --pooling to use the token vectors and "
            "attention weights of this encoder"
        )
    check_settings(
        directory,
        None if head else "sequence-classification" if classifier else "feature-extraction",
        skipped=options.skipped_modules,
        pooling_is_chosen=options.pooling is not None,
        similarity=options.similarity,
    )
    if head is None:
        if classifier is None:
            check_pooling_known(directory, options.pooling)
    elif options.pooling is None:
        raise SourceError(
            f"{head.describe()} and does not specify a pooling: specify --pooling {'|'.join(POOLINGS)}. "
            "Token vectors and attention do not depend on it"
        )
    warnings = list(_describe_omissions(directory, checkpoint.code))
    if not head and classifier is None and is_masked_language_model(directory):
        warnings.insert(0, _describe_language_model(options))
    if classifier is not None and lacks_template_setting(directory):
        warnings.append(
            "sentence-transformers 6 inserts the texts of this checkpoint into the chat template of its "
            "tokenizer, earlier releases and transformers do not: the bundle scores the bare texts"
        )
    if head:
        warnings.insert(
            0, f"{head.describe()}. The head is omitted; the encoder was not trained to compute embeddings"
        )
    return _Model(
        checkpoint.encoder,
        checkpoint.config,
        directory,
        checkpoint.source,
        options.name or checkpoint.source.rpartition("/")[2],
        tuple(name for name in checkpoint.unused_tensors if layout is None or not is_part(layout, name)),
        checkpoint.commit,
        head,
        tuple(warnings),
        checkpoint.adapter_task,
        classifier,
        checkpoint.has_own_code,
    )


def _describe_language_model(options: ExportOptions) -> str:
    """Return a warning on a masked language model.

    Raises:
        SourceError: The options request the pooling of sparse encoders.
    """
    if options.pooling == "max" and not options.without_head:
        raise SourceError(
            "this checkpoint has a head for masked language modeling, and the maximum over tokens is how "
            "sparse encoders (SPLADE) pool its logits. Bundles do not support this head, so --pooling "
            "max would return dense vectors, which are not those of the publisher: export an embedding "
            "model, or add --without-head to pool the token vectors of this encoder nevertheless"
        )
    return (
        "this checkpoint has a head for masked language modeling, which is omitted. If it is a sparse "
        "encoder (SPLADE), the embeddings are dense vectors, not those of the publisher; otherwise, the "
        "encoder was pretrained, but may not have been trained to compute embeddings"
    )


def _check_classifier_options(options: ExportOptions) -> None:
    """Reject options that only apply to embeddings."""
    for name, value in {
        "--pooling": options.pooling,
        "--normalize": options.normalize,
        "--similarity": options.similarity,
        "--skip-module": options.skipped_modules,
    }.items():
        if value:
            raise SourceError(
                f"{name} does not apply to a classifier or reranker, whose head specifies the pooling: omit "
                "it, or add --without-head to export only the encoder"
            )
    for precision in options.precisions:
        if not isinstance(precision, Int8):
            raise SourceError(
                f"--precision {precision.name} is not supported for classifiers and rerankers: use int8, or "
                "omit it"
            )
        if isinstance(precision.gate, Gate):
            raise SourceError(
                "--min-mean-cosine and --min-cosine limit the error of embeddings, which a classifier or "
                "reranker does not compute: omit them"
            )


def _describe_omissions(source: Path, code: Iterable[CodeHook]) -> Iterator[str]:
    """Yield a warning for each part of a checkpoint that the bundle lacks."""
    heads = [name for name in _HEAD_FILES if (source / name).exists()]
    if heads:
        yield f"{' and '.join(heads)} are omitted: the bundle computes only dense embeddings"
    library = "transformers" if is_published(source) else "attnlens"
    uses = {
        "config.json": f"the graphs are those of the encoder of {library} with these weights",
        "tokenizer_config.json": "the tokens are those of the published vocabulary",
    }
    for hook in dict.fromkeys(code):
        used = uses.get(hook.file, "the results may differ from those of the publisher")
        yield (f"the publisher's own code ({hook.value or hook.key} in {hook.file}) was not executed: {used}")


def _initialize(config: EncoderConfig, seed: int) -> Encoder:
    try:
        return new_encoder(config, seed)
    except (RuntimeError, MemoryError) as error:
        raise SourceError(f"not enough memory for an encoder of this size: {config}") from error


class _Built(NamedTuple):
    """Result of `_build`.

    Attributes:
        tokenizer: Description of the tokenizer and its origin. Empty without a tokenizer.
        no_contributions: Reason why there is no contribution graph. Empty if there is one.
    """

    manifest: Manifest
    verdict: Verdict
    tokenizer: str
    no_contributions: str


class _Settings(NamedTuple):
    """Settings of a bundle that do not depend on its graphs."""

    pooling: PoolingDefaults
    prompts: Prompts
    max_tokens: int
    template: dict[str, Any] | None


def _read_settings(model: _Model, options: ExportOptions) -> _Settings:
    config = model.config
    pooling = read_pooling(
        model.embedder, config.vector_size, options.pooling, options.normalize, options.skipped_modules
    )
    prompts = read_prompts(model.directory, options.prompts, options.default_prompt)
    template = render_template(model.embedder, has_prompts=any(prompts.texts.values()))
    if template:
        pooling.exclude_prompt = False  # sentence-transformers does not exclude the system message
    return _Settings(pooling, prompts, read_max_tokens(model.directory, config), template)


def _build(directory: Path, model: _Model, options: ExportOptions, progress: Progress) -> _Built:
    config, settings = model.config, _read_settings(model, options)
    # Before tracing, which takes longer: broken files should fail early.
    copy_described(directory, model.directory, is_embedder=model.head is None)
    if model.classifier is not None:
        write_head(directory, model.classifier)
    lowercase = read_sentence_config(directory).get("do_lower_case") is True
    tokenizer = write_tokenizer(
        directory, model.directory, options.tokenizer, config, settings.max_tokens, lowercase=lowercase
    )
    question, is_small = _question(directory, model, options), False
    if isinstance(question, Question):
        start(libraries_of(question.source))  # they are imported while this process traces the encoder
        is_small = runs_concurrently(question.source)
    with beside(partial(_ask, question, directory, settings.prompts), progress, in_thread=is_small) as answer:
        stated, missing = _write_contents(directory, model, options, settings, progress)
        cases = options.grid or default_grid(config, options.parity_tokens)
        subject = Subject(
            directory, References(model.encoder, is_owned=model.is_loaded), config, model.source, cases
        )
        beyond_grid = options.grid is None and options.parity_tokens is None
        verdict = measure_graphs(subject, stated, progress, beyond_grid=beyond_grid)
        if not verdict.passed and not options.keep_failed:
            raise ParityError(verdict.describe_failure())
        publisher = _compare_with_publisher(directory, model, question, verdict, answer)
    write_report(directory / "parity", verdict, model.name)
    progress("Hashing the files", "", 0, 1)
    origin = Origin(model.name, model.source, model.commit, read_license(model.directory))
    manifest = describe_bundle(directory, config, origin, verdict)
    if model.classifier is None:
        ranges = measure_ranges(directory, config, partial(progress, "Embedding ranges"))
        if ranges is not None:
            manifest.embedding_ranges.CopyFrom(ranges)
    manifest.publisher.CopyFrom(publisher.to_message())
    write_manifest(directory, manifest)
    if options.faithfulness and verdict.passed:
        measured = measure_at_export(directory, partial(progress, "Faithfulness"))
        manifest = record(directory, measured) if measured else manifest
    return _Built(manifest, verdict, tokenizer, missing)


def _write_contents(
    directory: Path, model: _Model, options: ExportOptions, settings: _Settings, progress: Progress
) -> tuple[dict[str, Stated], str]:
    """Write graphs and settings, and return the properties of graphs by path, and `no_contributions`."""
    config, pooling, layers_from = model.config, settings.pooling, model.embedder
    if model.classifier is not None:
        pooling, layers_from = model.classifier.pooling, directory
    fp32 = _write_graphs(directory, model, options, progress)
    missing = write_contributions(fp32, layers_from, pooling)
    progress("Writing the configuration", "", 0, 1)
    has_data = (directory / DATA_PATH).is_file()
    own = {TASK_KEY: model.adapter_task, TEMPLATE_KEY: settings.template}
    write_config(directory, model.directory, config, external_data=has_data, own=own)
    if model.classifier is None:
        write_pooling(directory, model.embedder, config.vector_size, pooling, settings.max_tokens)
    elif model.directory is not None:
        write_classifier_files(directory, model.directory, model.classifier)
    write_prompts(directory, settings.prompts, options.similarity)
    stated = {precision.path: precision.write(fp32, progress) for precision in options.precisions}
    check_graphs(directory, config)
    return stated, missing


def _question(directory: Path, model: _Model, options: ExportOptions) -> Question | tuple[str, ...]:
    """Return the question to the publisher's pipeline, or the reasons for everything that is not compared."""
    skipped = _replaced_results(options)
    reasons = {
        "the encoder is not a published checkpoint": model.directory is None,
        ON_REQUEST: not options.comparison,
        NEEDS_CODE: model.has_own_code,
        NO_TOKENIZER: not (directory / "tokenizer.json").is_file(),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if model.directory is None or reason is not None:
        return (reason or "", *_describe_skipped(skipped))
    kind = "scorer" if model.classifier else "encoder" if model.head else "embedder"
    return Question(model.directory, model.config, kind, skipped)


def _describe_skipped(skipped: Mapping[str, str]) -> list[str]:
    return [f"{result}: {option}" for result, option in skipped.items()]


def _ask(
    question: Question | tuple[str, ...], directory: Path, prompts: Prompts, progress: Progress
) -> Answer | str:
    if not isinstance(question, Question):
        return question[0]
    stage = partial(progress, "Publisher's results")
    return ask_publisher(question, prompts, stage, takes_pairs=takes_pairs(directory, question.config))


def _compare_with_publisher(
    directory: Path,
    model: _Model,
    question: Question | tuple[str, ...],
    verdict: Verdict,
    answer: Callable[[], Answer | str],
) -> PublisherResult:
    """Compare the bundle with the publisher's pipeline.

    Raises:
        DifferenceError: A result differs.
        SourceError: The pipeline can't compute its results.
    """
    if isinstance(question, Question) and not verdict.passed:
        question = ("parity failed", *_describe_skipped(question.skipped))
    if not isinstance(question, Question):
        if model.directory is not None and model.classifier and is_derived(model.directory):
            raise SourceError(
                "attnlens knows the classification head of this class only by its tensors, so its logits "
                f"must be compared with those of transformers, which this export does not: {question[0]}. "
                "Add a tokenizer, leave out --without-comparison, or add --without-head"
            )
        return PublisherResult(not_compared=question)
    reader, rounding = BundleReader(directory, model.config), Rounding.measured(verdict)
    result = compare_with_publisher(question, reader, rounding, no_stage_progress, answer())
    if failures := result.failures():
        first, remedy = describe_first(failures), _remedy(model.config)
        raise DifferenceError(f"the bundle differs from {result.implementation}: {first}. {remedy}")
    return result


def _replaced_results(options: ExportOptions) -> dict[str, str]:
    """Return the results that options replace, and these options."""
    is_pooled = options.pooling is not None or options.normalize is not None or options.skipped_modules
    replaced = {
        ("embeddings", "--pooling, --normalize or --skip-module"): is_pooled,
        ("token ids", "--tokenizer"): options.tokenizer not in (None, "transformers"),
        ("prompts", "--prompt or --default-prompt"): options.prompts or options.default_prompt is not None,
        ("similarity", "--similarity"): options.similarity is not None,
        ("global tokens", "--global-tokens"): options.global_tokens is not None,
        ("random blocks", "--random-blocks original"): options.random_blocks == "original",
    }
    return {result: CHOSEN + option for (result, option), applies in replaced.items() if applies}


def _remedy(config: EncoderConfig) -> str:
    """Return what to do if a bundle differs from its publisher's pipeline."""
    kinds = {attention.kind for attention in config.layer_attentions}
    if "longformer" in kinds:
        return "The pipeline has no global tokens: choose their number with --global-tokens"
    if "big_bird" in kinds:
        return "The pipeline has no random blocks: choose them with --random-blocks transformers"
    return "Report this checkpoint, or export it without the comparison with --without-comparison"


def _write_graphs(directory: Path, model: _Model, options: ExportOptions, progress: Progress) -> Fp32Graph:
    """Trace the encoder, write both graphs in fp32, and return the embeddings graph."""
    progress("Tracing the encoder", "", 0, 1)
    attentions = (options.tracer or trace)(model.encoder, model.config)
    embeddings = embeddings_graph(attentions)
    weights = attentions.weights
    progress("Writing the graphs", "", 0, 1)
    (directory / "onnx").mkdir()
    max_bytes = options.max_embedded_bytes
    complete = _appended_head(directory, model.classifier)
    main = complete(embeddings)  # the graph that other tools open
    if sum(array.nbytes for array in {**weights, **main.weights}.values()) > max_bytes:
        places = write_data(directory / DATA_PATH, weights)
        write_referring(directory / MODEL_PATH, main.proto, main.weights, places)
    else:
        places = write_embedded(directory / MODEL_PATH, main.proto, main.weights)
    if main is not embeddings:
        write_referring(directory / ENCODER_PATH, embeddings.proto, embeddings.weights, places)
    write_referring(directory / ATTENTIONS_PATH, attentions.proto, weights, places)
    verify_places(directory / "onnx", {**weights, **main.weights}, places)
    return Fp32Graph(directory, model.config, embeddings, places, max_bytes, complete)


def _appended_head(directory: Path, head: ClassificationHead | None) -> Callable[[TracedGraph], TracedGraph]:
    """Return a function that appends a head to a graph of token vectors."""
    if head is None:
        return lambda graph: graph
    layers = [read_layer(directory, layer) for layer in head.pooling.dense]
    return partial(logits_graph, pooling=head.pooling.pooling, layers=layers)
