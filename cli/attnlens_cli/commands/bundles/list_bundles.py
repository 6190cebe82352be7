"""`attnlens list`: list bundles."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import dataclasses
from pathlib import Path

import click

from attnlens_cli.commands.options import cache_option
from attnlens_cli.frame.options import Command, option
from attnlens_cli.printable import printable_json

EPILOG = """\b
Example:
  attnlens list
  attnlens list bundles --verify
  attnlens list --json | jq -r '.[] | select(.problem == "") | .directory'"""

_BUNDLES = Path("bundles")


@click.command("list", cls=Command, epilog=EPILOG)
@click.argument(
    "directories",
    metavar="[DIR]...",
    nargs=-1,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@cache_option
@option("--verify", is_flag=True, help="Verify the hash of every file; exit with 1 if a bundle is unusable.")
@option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_bundles(directories: tuple[Path, ...], cache_dir: Path | None, verify: bool, as_json: bool) -> None:
    """List the bundles in each DIR with size, precisions, verdict and origin.

    Without DIR, list the bundles in ./bundles and in the cache, which `attnlens serve` and `attnlens try`
    fill. To remove a bundle, delete its directory: rm -r DIR/NAME.

    Reads the manifests and compares the sizes of files. "verified" means that the bundle passed parity with
    PyTorch when it was exported.
    """
    from attnlens_cli.show.bundle_list import list_directory, print_bundles
    from attnlens_cli.sources.cache import default_directory

    folders = dict.fromkeys(directories or (cache_dir or default_directory(), _BUNDLES))
    listed = {folder: list(list_directory(folder, verify=verify)) for folder in folders if folder.is_dir()}
    bundles = [bundle for folder in listed.values() for bundle in folder]
    if as_json:
        content = [dataclasses.asdict(bundle) | {"directory": str(bundle.directory)} for bundle in bundles]
        click.echo(printable_json(content, indent=2))
    elif not bundles:
        click.echo(f"no bundles in {' and '.join(map(str, folders))}", err=True)
    else:
        for folder, in_folder in listed.items():
            if in_folder:
                print_bundles(folder, in_folder)
    if verify and any(bundle.problem for bundle in bundles):
        raise click.exceptions.Exit(1)
