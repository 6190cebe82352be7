"""`attnlens list`: which bundles there are."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import dataclasses
from pathlib import Path

import click

from attnlens_cli.frame.sections import SectionCommand
from attnlens_cli.show.printable import printable_json
from attnlens_cli.sources.options import cache_option

EPILOG = """\b
Example:
  attnlens list
  attnlens list bundles --verify
  attnlens list --json | jq -r '.[] | select(.problem == "") | .directory'"""

_BUNDLES = Path("bundles")


@click.command("list", cls=SectionCommand, epilog=EPILOG)
@click.argument(
    "directories",
    metavar="[DIR]...",
    nargs=-1,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@cache_option
@click.option("--verify", is_flag=True, help="Compare the hash of every file; exit with 1 if one differs.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_bundles(directories: tuple[Path, ...], cache_dir: Path | None, verify: bool, as_json: bool) -> None:
    """List the bundles in each DIR: sizes, precisions, verdict, and where they came from.

    Without DIR: those in the cache, which `attnlens serve` and `attnlens try` fill, and in ./bundles. To
    remove a bundle, remove its directory: rm -r DIR/NAME.

    Only manifests are read, and the sizes of files compared. "verified" means that the graphs were compared
    with PyTorch at the export and agreed.
    """
    from attnlens_cli.files.listed_bundles import list_directory
    from attnlens_cli.sources.cache import default_directory

    places = directories or (cache_dir or default_directory(), _BUNDLES)
    found = {
        place: list(list_directory(place, verify=verify)) for place in dict.fromkeys(places) if place.is_dir()
    }
    bundles = [bundle for listed in found.values() for bundle in listed]
    if as_json:
        content = [dataclasses.asdict(bundle) | {"directory": str(bundle.directory)} for bundle in bundles]
        click.echo(printable_json(content, indent=2))
    elif not bundles:
        click.echo(f"no bundles in {' and '.join(map(str, places))}", err=True)
    else:
        from attnlens_cli.show.bundle_table import print_bundles

        for place, listed in found.items():
            if listed:
                print_bundles(place, listed)
    if verify and any(bundle.problem for bundle in bundles):
        raise click.exceptions.Exit(1)
