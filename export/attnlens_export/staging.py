"""A directory that appears complete or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnlens.bundle import MANIFEST_NAME
from attnlens_export.errors import OutputError


def check_target(output: Path, *, force: bool) -> None:
    """Refuse a target that must not be replaced.

    Raises:
        OutputError: it exists and is not empty, unless it is a bundle and `force` is set.
    """
    if not os.path.lexists(output) or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise OutputError(
            f"{output} exists and is no bundle: choose another directory, or remove it yourself"
        )
    if not force:
        raise OutputError(f"{output} exists: choose another directory, or replace it with --force")


@contextmanager
def staged(output: Path, *, force: bool) -> Iterator[Path]:
    """Yield an empty directory beside `output` that replaces it on a normal exit and vanishes on any other.

    Raises:
        OutputError: the directory can't be made, or `output` may not be replaced (see `check_target`).
    """
    # Where a link leads; the link itself stays.
    output = output.resolve()
    check_target(output, force=force)
    # Hidden, and on the same file system, so that the move is one rename.
    staging = _sibling(output, "partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise OutputError(f"{output} can't be made: {error.strerror}") from error
    try:
        yield staging
        _replace(staging, output, force=force)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(staging: Path, output: Path, *, force: bool) -> None:
    # Again: the export took a while.
    check_target(output, force=force)
    aside = _sibling(output, "replaced")
    try:
        if (output / MANIFEST_NAME).is_file():
            output.rename(aside)
        staging.rename(output)
    except OSError as error:
        raise OutputError(f"the bundle can't be moved to {output}: {error.strerror}") from error
    finally:
        # However the second move failed, Ctrl-C included: the old bundle comes back.
        if aside.exists() and not output.exists():
            aside.rename(output)
    shutil.rmtree(aside, ignore_errors=True)


def _sibling(output: Path, purpose: str) -> Path:
    return output.with_name(f".{output.name}.{secrets.token_hex(4)}.{purpose}")
