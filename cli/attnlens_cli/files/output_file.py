"""Output files that appear only when complete."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from attnlens_cli.files.text_lines import STDIO

if TYPE_CHECKING:
    from attnlens_viewer import Page

PAGE_SUFFIXES = (".html", ".htm")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends, or is deleted when the block fails.

    The new file has the mode of the old one, otherwise that of the umask. If `path` is a link, its target is
    replaced.

    Raises:
        OSError: The file cannot be written. The exception names `path`.
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
    """Return the path given for `option`.

    Raises:
        click.BadParameter: The path has none of the suffixes, or its directory does not exist.
    """
    path = Path(name)
    if path.suffix not in suffixes:
        raise click.BadParameter(f"{name} must end in {' or '.join(suffixes)}", param_hint=f"'{option}'")
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {path.parent}", param_hint=f"'{option}'")
    return path


def check_is_other(output: str, source: str) -> None:
    """Validate that the output is not the input file under any name. `-` is standard input.

    Raises:
        click.BadParameter: Both are the same file.
    """
    opened: str | int = 0 if source == STDIO else source
    if Path(output).exists() and os.path.samestat(os.stat(opened), os.stat(output)):  # noqa: PTH116 - a descriptor
        raise click.BadParameter(
            f"{output} is the input file, which it would replace: use another name", param_hint="'--output'"
        )


def write_page(path: Path, page: "Page", *, small: bool = False) -> None:
    """Write a page of the viewer and print its size.

    Raises:
        click.ClickException: The page is too large or contains non-finite numbers.
    """
    from attnlens_viewer import html_of  # noqa: PLC0415 - numpy

    try:
        document = html_of(page, small=small).encode()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with replacing(path) as file:
        file.write(document)
    click.echo(f"{path}: {len(document) / 1e6:.2f} MB, open it in a browser", err=True)
