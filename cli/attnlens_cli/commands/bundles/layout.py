"""`attnlens layout`: create the model repository of another server."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

from pathlib import Path

import click

from attnlens_cli.commands.options import LAYOUT_NAMES, bundle_argument, link_option
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.frame.signals import stopped_by_signals
from attnlens_cli.show.bundle import describe_layout

EPILOG = """\b
Example:
  attnlens layout bundles/minilm triton --output models
  attnlens layout bundles/minilm ovms --output models-ovms

Then start the server, such as: tritonserver --model-repository=$PWD/models"""

_repository = in_section("Model repositories")


@click.command(cls=Command, epilog=EPILOG)
@bundle_argument
@click.argument("kind", metavar="triton|ovms", type=click.Choice(LAYOUT_NAMES))
@_repository(
    "--output", required=True, metavar="REPO", type=click.Path(path_type=Path), help="Directory to create."
)
@_repository("--force", is_flag=True, help="Replace an existing model repository of attnlens.")
@link_option
def layout(directory: Path, kind: str, output: Path, force: bool, link: bool) -> None:
    """Create the model repository of another server from the bundle DIR.

    Supports NVIDIA's Triton Inference Server (triton) and OpenVINO Model Server (ovms). REPO contains the
    graphs, the weights and the server's configuration. Hashes are verified first. Clients of these servers
    send token ids instead of text; see README.md in REPO.
    """
    from attnlens.bundle import BundleError
    from attnlens_export import ExportError, OutputError
    from attnlens_export.layouts import write_layout

    try:
        with stopped_by_signals():
            summary = write_layout(directory, kind, output, force=force, link=link)
    except OutputError as error:
        raise click.UsageError(str(error)) from error
    except (BundleError, ExportError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(describe_layout(summary, link=link))
