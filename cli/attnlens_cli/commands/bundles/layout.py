"""`attnlens layout DIR KIND --output REPO`."""

from pathlib import Path

import click

from attnlens_cli.commands.options import LAYOUT_NAMES, link_option
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.frame.stopping import stopped_by_signals
from attnlens_cli.show.layout_summary import describe_layout

EPILOG = """\b
Example:
  attnlens layout bundles/minilm triton --output models
  attnlens layout bundles/minilm ovms --output models-ovms

Then start the server there, for instance: tritonserver --model-repository=$PWD/models"""

_repository = in_section("Model repositories")


@click.command(cls=SectionCommand, epilog=EPILOG)
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("kind", metavar="triton|ovms", type=click.Choice(LAYOUT_NAMES))
@_repository(
    "--output", required=True, metavar="REPO", type=click.Path(path_type=Path), help="Directory to make."
)
@_repository("--force", is_flag=True, help="Replace a model repository made by attnlens.")
@link_option
def layout(directory: Path, kind: str, output: Path, force: bool, link: bool) -> None:
    """Lay a bundle out as the model repository of another server.

    That is NVIDIA's Triton Inference Server (triton) or OpenVINO Model Server (ovms). REPO gets the graphs
    and weights of the bundle DIR and the server's configuration. Hashes are checked first. Neither server
    reads text: clients send token ids, README.md in REPO says which.
    """
    from attnlens.bundle import BundleError  # noqa: PLC0415 - heavy
    from attnlens_export import ExportError, OutputError  # noqa: PLC0415 - heavy
    from attnlens_export.layouts import write_layout  # noqa: PLC0415 - heavy

    try:
        with stopped_by_signals():
            summary = write_layout(directory, kind, output, force=force, link=link)
    except OutputError as error:
        raise click.UsageError(str(error)) from error
    except (BundleError, ExportError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(describe_layout(summary, link=link))
