"""Output files that are there complete, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the name `path` when the block ends, and vanishes when it fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def checked_path(name: str, option: str, suffixes: tuple[str, ...]) -> Path:
    """Return the path that `option` names.

    Raises:
        click.BadParameter: it does not end in one of `suffixes`, or its directory does not exist.
    """
    path = Path(name)
    if path.suffix not in suffixes:
        raise click.BadParameter(f"{name} must end in {' or '.join(suffixes)}", param_hint=f"'{option}'")
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {path.parent}", param_hint=f"'{option}'")
    return path
