"""`attnlens export`: export a checkpoint as a verified bundle."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from attnlens.published import describe_comparison
from attnlens_cli.commands.options import (
    LAYOUT_NAMES,
    POOLINGS,
    link_option,
    parity_tokens_option,
    without_comparison_option,
)
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.frame.signals import stopped_by_signals
from attnlens_cli.show.bundle import describe_layout, describe_left_out, raise_parity_failure, show_verdict
from attnlens_cli.show.progress import shown_stages

if TYPE_CHECKING:
    from attnlens_export.bundle import BundleSummary
    from attnlens_export.precision import Precision
    from attnlens_model import EncoderConfig

EPILOG = """\b
Example:
  attnlens export sentence-transformers/all-MiniLM-L6-v2 --output bundles/minilm
  attnlens export --config my.json --seed 0 --output bundles/fresh"""

MAX_SEED = 2**64 - 1


def _prompts(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Split each NAME=TEXT."""
    prompts: dict[str, str] = {}
    for prompt in values:
        name, separator, text = prompt.partition("=")
        if not name or not separator:
            raise click.BadParameter(f"{prompt!r} is not NAME=TEXT, such as 'query=query: '")
        if name in prompts:
            raise click.BadParameter(f"{name!r} is given twice")
        prompts[name] = text
    return prompts


class _Tokenizer(click.Path):
    """A file, or one of two words."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - see click
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # noqa: ANN401 - see click
        return value if value in ("published", "transformers") else super().convert(value, param, ctx)


_bundle = in_section("Bundle")
_source = in_section("Source")
_embeddings = in_section("Embeddings")
_attention = in_section("Attention")
_precision = in_section("Precision")
_repository = in_section("Model repositories")
_parity = in_section("Parity")


@click.command(cls=Command, epilog=EPILOG)
@click.argument("source", required=False)
@_bundle(
    "--output", required=True, metavar="DIR", type=click.Path(path_type=Path), help="Directory to create."
)
@_source(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Configuration file in JSON to use instead of SOURCE, for a randomly initialized encoder.",
)
@_source("--seed", type=click.IntRange(0, MAX_SEED), help="Seed of random weights.  [default: 0]")
@_source("--revision", help="Branch, tag or commit of SOURCE on the hub.")
@_source(
    "--adapter-task",
    metavar="NAME",
    help="Task whose adapters are merged, if SOURCE has adapters; 'none' for no task.",
)
@_bundle("--name", help="Name of the model.  [default: the last part of SOURCE]")
@_embeddings(
    "--pooling",
    type=click.Choice(POOLINGS),
    help="Pooling to use instead of that of the checkpoint. Required if the checkpoint does not specify one. "
    "Dense modules are kept.",
)
@_embeddings("--normalize/--no-normalize", default=None, help="Whether to scale embeddings to length 1.")
@_embeddings(
    "--similarity",
    type=click.Choice(["cosine"]),
    help="Compare embeddings by cosine even if the checkpoint specifies another similarity function.",
)
@_source(
    "--skip-module",
    "skipped_modules",
    metavar="KIND",
    multiple=True,
    help="Omit modules of this kind in modules.json, such as LayerNorm; may be repeated.",
)
@_source(
    "--without-head",
    is_flag=True,
    help="Export the encoder of a classifier, reranker or language model without its task head.",
)
@_attention(
    "--global-tokens",
    type=click.IntRange(0),
    help="Longformer: number of tokens at the start of a text with global attention.",
)
@_attention(
    "--random-blocks",
    type=click.Choice(["original", "transformers"]),
    help="BigBird: random blocks as in training, or as in transformers.  [default: original]",
)
@_embeddings(
    "--prompt",
    "prompts",
    metavar="NAME=TEXT",
    multiple=True,
    callback=_prompts,
    help="Prompt to add, such as 'query=query: '; may be repeated.",
)
@_embeddings(
    "--default-prompt",
    metavar="NAME",
    help="Name of the prompt for requests that do not select one; '' for no prompt.",
)
@_source(
    "--tokenizer",
    type=_Tokenizer(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE|published|transformers",
    help="tokenizer.json to use instead of the checkpoint's tokenizer. The words choose the token ids if the "
    "checkpoint's tokenizer.json and transformers differ.",
)
@_repository(
    "--layout",
    "layouts",
    multiple=True,
    type=click.Choice(LAYOUT_NAMES),
    help="Also create DIR-triton or DIR-ovms, a model repository for this server; may be repeated.",
)
@link_option
@_precision(
    "--precision",
    type=click.Choice(["fp32", "fp16", "int8"]),
    default="fp32",
    show_default=True,
    help="Precision of embeddings or logits in addition to fp32. fp16 adds onnx/model_fp16.onnx for GPUs, "
    "int8 adds onnx/model_int8.onnx for CPUs.",
)
@_precision(
    "--min-mean-cosine",
    type=click.FloatRange(0, 1),
    help="int8: minimum mean cosine with fp32 embeddings, for each kind of text.  [default: 0.999]",
)
@_precision(
    "--min-cosine",
    type=click.FloatRange(0, 1),
    help="int8: minimum cosine with the fp32 embedding of any text.  [default: 0.995]",
)
@_precision(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="int8: file with additional texts, one per line. Half are used for calibration; the other half are "
    "used for verification and copied into DIR.",
)
@parity_tokens_option
@without_comparison_option
@_bundle("--force", is_flag=True, help="Replace existing output of attnlens.")
@_parity("--keep-failed", is_flag=True, help="Write a bundle that fails parity, marked as failed.")
def export(
    source: str | None,
    output: Path,
    config: Path | None,
    seed: int | None,
    revision: str | None,
    adapter_task: str | None,
    name: str | None,
    layouts: tuple[str, ...],
    link: bool,
    precision: str,
    min_mean_cosine: float | None,
    min_cosine: float | None,
    calibration: Path | None,
    without_comparison: bool,
    **options: Any,  # noqa: ANN401 - fields of ExportOptions
) -> None:
    """Export a checkpoint as a verified ONNX bundle.

    SOURCE is a directory or a hub id. The bundle appears in DIR only if its graphs pass parity with PyTorch,
    and if it returns what the publisher's own pipeline returns, from tokens to embeddings or scores.
    """
    _check_combination(source, config, seed, {"--revision": revision, "--adapter-task": adapter_task})
    _start_publisher(source)
    from attnlens_export import ExportError, ExportOptions, OutputError, export_bundle
    from attnlens_export.layouts import check_output, write_layout
    from attnlens_model import ModelError

    if link and not layouts:
        raise click.UsageError("--link needs --layout")
    gate = {"min_mean_cosine": min_mean_cosine, "min_cosine": min_cosine}
    precisions = _precisions(precision, gate, calibration)
    if config is not None:
        name = name or config.stem
    options |= {"revision": revision, "adapter_task": adapter_task, "precisions": precisions}
    options["comparison"] = not without_comparison
    export_options = ExportOptions(seed=seed or 0, name=name, **options)
    repositories = {layout: _repository_path(output, layout) for layout in layouts}
    try:
        with stopped_by_signals(), shown_stages(in_lines=True) as progress:
            for repository in repositories.values():
                check_output(output, repository, force=export_options.force)
            checkpoint = cast("str", source) if config is None else _read_config(config)
            summary = export_bundle(checkpoint, output, export_options, progress)
    except OutputError as error:
        raise click.UsageError(str(error)) from error
    except (ExportError, ModelError) as error:
        raise click.ClickException(str(error)) from error
    _show(summary)
    raise_parity_failure(summary.verdict)
    with stopped_by_signals():
        for layout, repository in repositories.items():
            layout_summary = write_layout(output, layout, repository, force=export_options.force, link=link)
            click.echo(describe_layout(layout_summary, link=link))


def _precisions(
    name: str, gate: dict[str, float | None], calibration: Path | None
) -> "tuple[Precision, ...]":
    from attnlens_export.contents import PRECISIONS
    from attnlens_export.int8.precision import Int8
    from attnlens_export.int8.result import Gate

    cosines = {key: value for key, value in gate.items() if value is not None}
    if name == Int8.name:
        return (Int8(Gate(**cosines) if cosines else None, calibration),)
    if cosines or calibration is not None:
        raise click.UsageError("--min-mean-cosine, --min-cosine and --calibration need --precision int8")
    return (PRECISIONS[name],) if name in PRECISIONS else ()


def _repository_path(output: Path, layout: str) -> Path:
    if output.name in {"", ".."}:  # such as "."
        output = Path(os.path.realpath(output))
    return Path(f"{output}-{layout}")


def _check_combination(
    source: str | None, config: Path | None, seed: int | None, source_options: dict[str, str | None]
) -> None:
    if (source is None) == (config is None):
        raise click.UsageError("give either SOURCE or --config")
    if source is not None and seed is not None:
        raise click.UsageError("--seed is for random weights: use --config instead of SOURCE")
    for option, value in source_options.items():
        if config is not None and value is not None:
            where = " on the hub" if option == "--revision" else ""
            raise click.UsageError(f"{option} needs a SOURCE{where}, not --config")


def _start_publisher(source: str | None) -> None:
    """Import the publisher's libraries in their process while this one imports PyTorch."""
    from attnlens_publisher.process import TOKENIZER_IMPORTS, start

    if source is not None and Path(source, "config.json").is_file():
        start(TOKENIZER_IMPORTS)


def _read_config(path: Path) -> "EncoderConfig":
    from attnlens_model import ConfigError, read_config

    try:
        return read_config(path)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--config") from error


def _show(summary: "BundleSummary") -> None:
    show_verdict(summary.verdict, f"{summary.manifest.model_name} against PyTorch")
    click.echo(_describe(summary))
    for warning in summary.warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)


def _describe(summary: "BundleSummary") -> str:
    manifest = summary.manifest
    size_mb = sum(file.size_bytes for file in manifest.files) / 1e6
    sizes = manifest.architecture
    summary_line = (
        f"{summary.directory}: {manifest.model_name}, {sizes.num_layers} layers, {sizes.num_heads} heads, "
        f"hidden size {sizes.hidden_size}, up to {manifest.max_tokens} tokens, {size_mb:.1f} MB"
    )
    revision = f" at {manifest.source_revision}" if manifest.source_revision else ""
    lines = [summary_line, f"from {manifest.source}{revision}", *summary.decisions]
    lines.append(f"the publisher's results: {describe_comparison(manifest.publisher)}")
    if not any(file.path == "tokenizer.json" for file in manifest.files):
        lines.append("no tokenizer: a server accepts only token ids (--tokenizer adds one)")
    if summary.unused_tensors:
        lines.append(describe_left_out(summary.unused_tensors))
    return "\n".join(lines)
