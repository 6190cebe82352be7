"""`attnlens export SOURCE --output DIR`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from attnlens_export.bundle import BundleSummary
    from attnlens_model import EncoderConfig

EPILOG = """\b
Example:
  attnlens export sentence-transformers/all-MiniLM-L6-v2 --output bundles/minilm
  attnlens export --config my.json --seed 0 --output bundles/fresh"""


@click.command(epilog=EPILOG)
@click.argument("source", required=False)
@click.option(
    "--output", required=True, metavar="DIR", type=click.Path(path_type=Path), help="Directory to make."
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead of SOURCE: a configuration in JSON, for a fresh encoder.",
)
@click.option("--seed", type=click.IntRange(min=0), help="For the weights of a fresh encoder.  [default: 0]")
@click.option("--revision", help="Branch, tag or commit of SOURCE on the hub.")
@click.option("--name", help="Name of the model.  [default: the last part of SOURCE]")
@click.option(
    "--pooling", type=click.Choice(["mean", "cls", "max"]), help="Instead of what the checkpoint says."
)
@click.option("--normalize/--no-normalize", default=None, help="Scale pooled vectors to length 1, or not.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A tokenizer.json to use instead of the checkpoint's.",
)
@click.option("--force", is_flag=True, help="Replace a bundle that is in the way.")
@click.option(
    "--keep-failed", is_flag=True, help="Write a bundle that fails parity all the same, marked as failed."
)
def export(
    source: str | None,
    output: Path,
    config: Path | None,
    seed: int | None,
    **options: Any,  # noqa: ANN401
) -> None:
    """Turn a checkpoint into a verified ONNX bundle.

    SOURCE is a directory or a hub id. The bundle appears in DIR when its graphs were compared with PyTorch and
    agree; otherwise nothing is left there.
    """
    from attnlens_cli.check import parity_table, progress_bar, raise_failures  # noqa: PLC0415 - heavy
    from attnlens_export import ExportError, ExportOptions, OutputError, export_bundle  # noqa: PLC0415 - heavy
    from attnlens_model import ModelError  # noqa: PLC0415 - heavy
    from rich.console import Console  # noqa: PLC0415 - heavy

    try:
        encoder_source = _choose_source(source, config, seed, options)
        with progress_bar() as progress:
            choices = ExportOptions(seed=seed or 0, **options)
            summary = export_bundle(encoder_source, output, choices, progress)
    except OutputError as error:
        raise click.UsageError(str(error)) from error
    except (ExportError, ModelError) as error:
        raise click.ClickException(str(error)) from error
    Console().print(parity_table(summary.parity, summary.manifest.model_name))
    click.echo(_describe(summary))
    raise_failures(summary.parity)


def _choose_source(
    source: str | None, config: Path | None, seed: int | None, options: dict[str, Any]
) -> "str | EncoderConfig":
    from attnlens_model import read_config  # noqa: PLC0415 - heavy

    if (source is None) == (config is None):
        raise click.UsageError("give either SOURCE or --config")
    if config is None:
        if seed is not None:
            raise click.UsageError("--seed is for a fresh encoder: it needs --config")
        assert source is not None, "checked above"
        return source
    if options["revision"] is not None:
        raise click.UsageError("--revision is for SOURCE on the hub")
    options["name"] = options["name"] or config.stem
    return read_config(config)


def _describe(summary: "BundleSummary") -> str:
    manifest = summary.manifest
    size_mb = sum(file.size_bytes for file in manifest.files) / 1e6
    architecture = manifest.architecture
    lines = [
        f"{summary.directory}: {manifest.model_name}, {architecture.num_layers} layers, "
        f"{architecture.num_heads} heads, {architecture.hidden_size} wide, up to {manifest.max_tokens} tokens, "
        f"{size_mb:.1f} MB"
    ]
    if not any(file.path == "tokenizer.json" for file in manifest.files):
        lines.append("no tokenizer: a server takes token ids only (--tokenizer adds one)")
    if summary.unused_tensors:
        lines.append(f"not part of the encoder: {', '.join(summary.unused_tensors)}")
    return "\n".join(lines)
