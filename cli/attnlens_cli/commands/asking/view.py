"""`attnlens view`: write an HTML page with the explanation and the attention of a text."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import PAIR_MATRICES, reading_options, too_long_explained
from attnlens_cli.files.output_file import PAGE_SUFFIXES, checked_path, write_page
from attnlens_cli.frame.options import TEXT, Command, in_section
from attnlens_cli.frame.server import ServerOptions, server_options

if TYPE_CHECKING:
    from attnlens_viewer import Page

_explain, _output = in_section("Explanation"), in_section("Output")


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens view "The animal didn't cross the street because it was too tired." -o animal.html
  attnlens view "A man is playing a guitar." "Someone plays an instrument." -o pair.html
  attnlens view "my query" "the hit" --rather-than "the one below it" -o why.html""",
)
@click.argument("text", type=TEXT)
@click.argument("text2", required=False, type=TEXT)
@_explain(
    "--rather-than",
    metavar="TEXT3",
    type=TEXT,
    help="Explain why TEXT is more similar to TEXT2 than to TEXT3.",
)
@_explain(
    "--matrix",
    type=click.Choice(PAIR_MATRICES),
    help="Matrix of token pairs of TEXT and TEXT2.  [default: output]",
)
@reading_options
@_output("--output", "-o", required=True, metavar="FILE", help="Page to write (.html).")
@_output("--small", is_flag=True, help="Keep only the 32 largest weights of each row.")
@server_options
def view(
    text: str,
    text2: str | None,
    output: str,
    rather_than: str | None,
    matrix: str | None,
    small: bool,
    server: ServerOptions,
    **options: Any,  # noqa: ANN401 - arguments of the client's methods
) -> None:
    """Write an HTML page with the contribution of each word of TEXT to its embedding, and the attention.

    With TEXT2, the page explains the similarity of both texts, which the model reads separately. The page
    contains all layers and heads and opens in any browser without a network. Attention weights are rounded to
    one byte. A page has at most 70 MB.
    """
    for name, value in (("--rather-than", rather_than), ("--matrix", matrix)):
        if value is not None and text2 is None:
            raise click.UsageError(f"{name} needs TEXT2")
    path = checked_path(output, "--output", PAGE_SUFFIXES)
    options |= {"rather_than": rather_than, "matrix": matrix or "output"}
    write_page(path, _fetch(text, text2, server, options), small=small)


def _fetch(text: str, text2: str | None, server: ServerOptions, options: dict[str, Any]) -> "Page":
    from attnlens_client import Client
    from attnlens_client.pages import view_page

    with Client(server.address, **server.client_settings()) as client, too_long_explained({}, "a text"):
        try:
            return view_page(client, text, text2, model=server.model, **options)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
