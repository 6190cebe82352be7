"""`attnlens deploy`: files that run a server as a service, which an installation contains."""

import shutil
from pathlib import Path

import click

from attnlens_cli.frame.failures import unknown_name
from attnlens_cli.frame.options import Command, option

EPILOG = """\b
Example:
  attnlens deploy
  attnlens deploy attnlens@.service > /etc/systemd/system/attnlens@.service
  attnlens deploy --output deploy"""


@click.command(cls=Command, epilog=EPILOG)
@click.argument("name", metavar="[FILE]", required=False)
@option(
    "--output", metavar="DIR", type=click.Path(path_type=Path), help="Copy all files to this new directory."
)
def deploy(name: str | None, output: Path | None) -> None:
    """Print FILE, or list the files.

    The files run a server with systemd, behind HAProxy or on Kubernetes, and monitor it with Prometheus and
    Grafana. The pages of the documentation about each of these explain them.
    """
    folder = _folder()
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    if name is not None and output is not None:
        raise click.UsageError("FILE and --output are both given: use one of them")
    if output is not None:
        if output.exists():
            raise click.UsageError(f"{output} exists: remove it, or choose another directory")
        shutil.copytree(folder, output)
    elif name is None:
        click.echo("\n".join(names))
    elif name in names:
        click.echo((folder / name).read_bytes(), nl=False)
    else:
        raise unknown_name("file", name, names)


def _folder() -> Path:
    """Return the folder with the files, which a wheel has in this package."""
    package = Path(__file__).parents[2]
    packaged = package / "deploy"
    return packaged if packaged.is_dir() else package.parents[1] / "deploy"
