"""Output files that appear complete or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import click

from attnlens_cli.files.text_lines import STDIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` when the block ends, and vanishes when it fails.

    The new file has the mode of the old one, else that of the umask; where `path` is a link, it replaces
    the target of the link.

    Raises:
        OSError: it can't be written. The error has the name `path`.
    """
    target = path.resolve()
    # Random, since containers that share a volume share process ids. Not mkstemp, which ignores the umask.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with temporary.open("xb") as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
        temporary.replace(target)
    except OSError as error:
        if error.filename in {None, str(temporary)}:
            error.filename = str(path)
        raise
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


def check_is_other(output: str, source: str) -> None:
    """Refuse an output that is the file of the texts, under this or another name; - is standard input.

    Raises:
        click.BadParameter: it is the same file.
    """
    read: str | int = 0 if source == STDIO else source
    if Path(output).exists() and os.path.samestat(os.stat(read), os.stat(output)):  # noqa: PTH116 - a number
        raise click.BadParameter(
            f"{output} is the file of the texts, which it would replace: give another name",
            param_hint="'--output'",
        )
