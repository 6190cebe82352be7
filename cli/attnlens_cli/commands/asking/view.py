"""`attnlens view`: one HTML file of a text, its vector and its attention, to look at and to pass on."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import PAIR_MATRICES, check_prompt, check_sendable
from attnlens_cli.files.page_file import checked_page_path, write_page
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.frame.server_options import ServerOptions, server_options

if TYPE_CHECKING:
    from attnlens_viewer import Page

_page = in_section("The page")
_explained = in_section("What to explain")
_read = in_section("What to read")


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens view "The animal didn't cross the street because it was too tired." -o animal.html
  attnlens view "A man is playing a guitar." "Someone plays an instrument." -o pair.html
  attnlens view "my query" "the hit" --rather-than "the one below it" -o why.html""",
)
@click.argument("text")
@click.argument("text2", required=False)
@_page("--output", "-o", required=True, metavar="FILE", help="The page to write: a name ending in .html.")
@_explained("--rather-than", metavar="TEXT3", help="Why is TEXT nearer to TEXT2 than to TEXT3?")
@_explained(
    "--matrix",
    type=click.Choice(PAIR_MATRICES),
    help="What to show of pairs of tokens of two texts.  [default: output]",
)
@_read("--prompt-name", help="Put this prompt of the model before each text.  [default: the model's]")
@_read("--prompt", metavar="TEXT", help="Put TEXT before each text; '' for no prompt at all.")
@_read("--truncate", is_flag=True, help="Cut a text that is too long; the default is to fail.")
@_page("--small", is_flag=True, help="Keep the 32 largest weights of each row only.")
@server_options
def view(
    text: str,
    text2: str | None,
    output: str,
    rather_than: str | None,
    matrix: str | None,
    small: bool,
    server: ServerOptions,
    **options: Any,  # noqa: ANN401 - options of the client's methods
) -> None:
    """Write one HTML file that shows what TEXT's words did for its vector, and its attention.

    With TEXT2: what the words of both did for their similarity. The page has all layers and heads, needs no
    network and opens from the disk in any browser. The model reads two texts one by one. Attention weights
    are rounded to a byte each; a page has at most 70 MB.
    """
    prompt, prompt_name = options["prompt"], options["prompt_name"]
    texts = {"TEXT": text, "TEXT2": text2, "--rather-than": rather_than}
    check_sendable({**texts, "--prompt": prompt, "--prompt-name": prompt_name})
    check_prompt(prompt_name, prompt)
    for name, given in (("--rather-than", rather_than), ("--matrix", matrix)):
        if given is not None and text2 is None:
            raise click.UsageError(f"{name} needs TEXT2")
    path = checked_page_path(output, "--output")
    options |= {"rather_than": rather_than, "matrix": matrix or "output"}
    write_page(path, _fetch(text, text2, server, options), small=small)


def _fetch(text: str, text2: str | None, server: ServerOptions, options: dict[str, Any]) -> "Page":
    from attnlens_client import Client, InputTooLongError
    from attnlens_client.pages import view_page

    with Client(server.address, **server.client_settings()) as client:
        try:
            return view_page(client, text, text2, model=server.model, **options)
        except InputTooLongError as error:
            raise click.ClickException(
                f"a text has {error.num_tokens} tokens, the model takes {error.max_tokens}: shorten it, or "
                "give --truncate"
            ) from error
        except ValueError as error:
            raise click.ClickException(str(error)) from error
