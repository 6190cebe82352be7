"""`attnlens export SOURCE --output DIR`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from attnlens_cli.commands.options import LAYOUT_NAMES, POOLINGS, link_option, parity_tokens_option
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.frame.stopping import stopped_by_signals
from attnlens_cli.show.checks.further import show_further
from attnlens_cli.show.checks.parity import parity_table, raise_failures
from attnlens_cli.show.layout_summary import describe_layout
from attnlens_cli.show.left_out import describe_left_out
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


def _prompts(_context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    prompts: dict[str, str] = {}
    for prompt in given:
        name, separator, text = prompt.partition("=")
        if not name or not separator:
            raise click.BadParameter(f"{prompt!r} is not NAME=TEXT, for instance 'query=query: '")
        if name in prompts:
            raise click.BadParameter(f"{name!r} is given twice")
        prompts[name] = text
    return prompts


_bundle = in_section("The bundle")
_source = in_section("The source")
_embeddings = in_section("Embeddings")
_attention = in_section("Attention")
_precision = in_section("Precision")
_repository = in_section("Model repositories")
_parity = in_section("Parity")


@click.command(cls=SectionCommand, epilog=EPILOG)
@click.argument("source", required=False)
@_bundle("--output", required=True, metavar="DIR", type=click.Path(path_type=Path), help="Directory to make.")
@_source(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead of SOURCE: a configuration in JSON, for a fresh encoder.",
)
@_source("--seed", type=click.IntRange(0, MAX_SEED), help="For the weights of a fresh encoder.  [default: 0]")
@_source("--revision", help="Branch, tag or commit of SOURCE on the hub.")
@_source(
    "--adapter-task",
    metavar="NAME",
    help="Merge the adapters of this task, where SOURCE has some; 'none': no task's.",
)
@_bundle("--name", help="Name of the model.  [default: the last part of SOURCE]")
@_embeddings(
    "--pooling",
    type=click.Choice(POOLINGS),
    help="Instead of what the checkpoint says; required if it says nothing. Dense modules stay.",
)
@_embeddings("--normalize/--no-normalize", default=None, help="Scale embeddings to length 1, or not.")
@_source(
    "--skip-module",
    "skipped_modules",
    metavar="KIND",
    multiple=True,
    help="Leave out what modules.json lists by this name, for instance LayerNorm.",
)
@_source(
    "--without-head",
    is_flag=True,
    help="Export the encoder of a classifier, reranker or language model, without what makes it one.",
)
@_attention(
    "--global-tokens",
    type=click.IntRange(0),
    help="Longformer: so many tokens at the start of a text attend to all, and all to them.",
)
@_attention(
    "--random-blocks",
    type=click.Choice(["original", "transformers"]),
    help="BigBird: those that it was trained with, or what transformers computes.  [default: original]",
)
@_embeddings(
    "--prompt",
    "prompts",
    metavar="NAME=TEXT",
    multiple=True,
    callback=_prompts,
    help="Add a prompt, for instance 'query=query: '.",
)
@_embeddings("--default-prompt", metavar="NAME", help="Used unless a request says otherwise; '' for none.")
@_source(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A tokenizer.json to use instead of the checkpoint's.",
)
@_repository(
    "--layout",
    "layouts",
    multiple=True,
    type=click.Choice(LAYOUT_NAMES),
    help="Make DIR-triton or DIR-ovms too, a model repository for that server; may be repeated.",
)
@link_option
@_precision(
    "--precision",
    type=click.Choice(["fp32", "fp16", "int8"]),
    default="fp32",
    show_default=True,
    help="fp16 adds onnx/model_fp16.onnx, embeddings for a GPU, int8 onnx/model_int8.onnx, for a CPU.",
)
@_precision(
    "--min-mean-cosine",
    type=click.FloatRange(0, 1),
    help="int8: least mean cosine with fp32 of the embeddings of each kind of text.  [default: 0.999]",
)
@_precision(
    "--min-cosine",
    type=click.FloatRange(0, 1),
    help="int8: least cosine with fp32 of any text's embedding.  [default: 0.995]",
)
@_precision(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="int8: further texts, one per line, as one more kind; half calibrate, half verify and go into DIR.",
)
@parity_tokens_option
@_bundle("--force", is_flag=True, help="Replace what is in the way, if attnlens made it.")
@_parity(
    "--keep-failed", is_flag=True, help="Write a bundle that fails parity all the same, marked as failed."
)
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
    **options: Any,  # noqa: ANN401 - each is a field of ExportOptions
) -> None:
    """Turn a checkpoint into a verified ONNX bundle.

    SOURCE is a directory or a hub id. The bundle appears in DIR only after its graphs were compared with
    PyTorch and agree; otherwise nothing is left there.
    """
    from attnlens_export import (  # noqa: PLC0415 - heavy
        ExportError,
        ExportOptions,
        OutputError,
        export_bundle,
    )
    from attnlens_export.layouts import check_output, write_layout  # noqa: PLC0415 - heavy
    from attnlens_model import ModelError  # noqa: PLC0415 - heavy

    _check_combination(source, config, seed, {"--revision": revision, "--adapter-task": adapter_task})
    if link and not layouts:
        raise click.UsageError("--link is about the files of --layout")
    gate = {"min_mean_cosine": min_mean_cosine, "min_cosine": min_cosine}
    precisions = _precisions(precision, gate, calibration)
    if config is not None:
        name = name or config.stem
    options |= {"revision": revision, "adapter_task": adapter_task, "precisions": precisions}
    choices = ExportOptions(seed=seed or 0, name=name, **options)
    repositories = {layout: _beside(output, layout) for layout in layouts}
    try:
        with stopped_by_signals(), shown_stages(in_lines=True) as progress:
            for repository in repositories.values():
                check_output(output, repository, force=choices.force)
            chosen = cast("str", source) if config is None else _read_config(config)
            summary = export_bundle(chosen, output, choices, progress)
    except OutputError as error:
        raise click.UsageError(str(error)) from error
    except (ExportError, ModelError) as error:
        raise click.ClickException(str(error)) from error
    _show(summary)
    raise_failures(summary.verdict)
    with stopped_by_signals():
        for layout, repository in repositories.items():
            made = write_layout(output, layout, repository, force=choices.force, link=link)
            click.echo(describe_layout(made, link=link))


def _precisions(
    name: str, gate: dict[str, float | None], calibration: Path | None
) -> "tuple[Precision, ...]":
    from attnlens_export.contents import PRECISIONS  # noqa: PLC0415 - heavy
    from attnlens_export.int8.precision import Int8  # noqa: PLC0415 - heavy
    from attnlens_export.int8.result import Gate  # noqa: PLC0415 - heavy

    cosines = {key: value for key, value in gate.items() if value is not None}
    if name == Int8.name:
        return (Int8(Gate(**cosines), calibration),)
    if cosines or calibration is not None:
        raise click.UsageError("--min-mean-cosine, --min-cosine and --calibration need --precision int8")
    return (PRECISIONS[name],) if name in PRECISIONS else ()


def _beside(output: Path, layout: str) -> Path:
    if output.name in {"", ".."}:  # "." has no name of its own
        output = Path(os.path.realpath(output))
    return Path(f"{output}-{layout}")


def _check_combination(
    source: str | None, config: Path | None, seed: int | None, of_source: dict[str, str | None]
) -> None:
    if (source is None) == (config is None):
        raise click.UsageError("give either SOURCE or --config")
    if source is not None and seed is not None:
        raise click.UsageError("--seed is for a fresh encoder: it needs --config instead of SOURCE")
    for option, value in of_source.items():
        if config is not None and value is not None:
            where = " on the hub" if option == "--revision" else ""
            raise click.UsageError(f"{option} is for a SOURCE{where}, not for --config")


def _read_config(path: Path) -> "EncoderConfig":
    from attnlens_model import ConfigError, read_config  # noqa: PLC0415 - heavy

    try:
        return read_config(path)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--config") from error


def _show(summary: "BundleSummary") -> None:
    from attnlens_cli.show.console import make_console  # noqa: PLC0415 - heavy

    make_console(markup=True).print(
        parity_table(summary.verdict, f"{summary.manifest.model_name} against PyTorch")
    )
    show_further(summary.verdict)
    click.echo(_describe(summary))
    for warning in summary.warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)


def _describe(summary: "BundleSummary") -> str:
    manifest = summary.manifest
    size_mb = sum(file.size_bytes for file in manifest.files) / 1e6
    sizes = manifest.architecture
    summary_line = (
        f"{summary.directory}: {manifest.model_name}, {sizes.num_layers} layers, {sizes.num_heads} heads, "
        f"{sizes.hidden_size} wide, up to {manifest.max_tokens} tokens, {size_mb:.1f} MB"
    )
    revision = f" at {manifest.source_revision}" if manifest.source_revision else ""
    lines = [summary_line, f"from {manifest.source}{revision}", *summary.decisions]
    if not any(file.path == "tokenizer.json" for file in manifest.files):
        lines.append("no tokenizer: a server takes token ids only (--tokenizer adds one)")
    if summary.built_tokenizer:
        lines.append(f"tokenizer.json was built: {summary.built_tokenizer}")
    if summary.unused_tensors:
        lines.append(describe_left_out(summary.unused_tensors))
    return "\n".join(lines)
