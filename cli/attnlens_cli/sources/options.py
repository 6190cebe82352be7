"""What commands that take a SOURCE have. Imports nothing that is heavy, so that `--help` is fast."""

from pathlib import Path

import click

source_argument = click.argument("source", metavar="SOURCE", type=click.Path(path_type=Path))
cache_option = click.option(
    "--cache-dir",
    metavar="DIR",
    envvar="ATTNLENS_CACHE_DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where bundles of checkpoints are kept.  [default: ~/.cache/attnlens; ATTNLENS_CACHE_DIR]",
)
