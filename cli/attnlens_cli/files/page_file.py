"""A page of the viewer as a file."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnlens_cli.files.new_file import checked_path, replacing

if TYPE_CHECKING:
    from attnlens_viewer import Page

ENDINGS = (".html", ".htm")


def checked_page_path(given: str, option: str) -> Path:
    """Return where a page goes, before anything is asked of a server.

    Raises:
        click.UsageError: it can't be written there.
    """
    return Path(checked_path(given, option, ENDINGS))


def write_page(path: Path, page: "Page", *, small: bool = False) -> None:
    """Write a page and say how large it is.

    Raises:
        click.ClickException: it is too large, or holds numbers that no page shows.
    """
    from attnlens_viewer import html_of  # noqa: PLC0415 - numpy

    try:
        document = html_of(page, small=small).encode()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with replacing(path) as file:
        file.write(document)
    click.echo(f"{path}: {len(document) / 1e6:.2f} MB, open it in a browser", err=True)
