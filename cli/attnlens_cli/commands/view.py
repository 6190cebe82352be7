"""`attnlens view`: one HTML file of a text and its attention maps, to look at and to pass on."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

from pathlib import Path
from typing import TYPE_CHECKING

import click

from attnlens_cli.files.new_file import checked_path, replacing
from attnlens_cli.files.text_lines import is_sendable
from attnlens_cli.frame.server_options import ServerOptions, server_options

if TYPE_CHECKING:
    from attnlens_viewer import Page


@click.command(
    epilog="""\b
Example:
  attnlens view "The animal didn't cross the street because it was too tired." -o animal.html
  attnlens view "A man is playing a guitar." "Someone plays an instrument." -o pair.html"""
)
@click.argument("text")
@click.argument("text2", required=False)
@click.option(
    "--output", "-o", required=True, metavar="FILE", help="The page to write: a name ending in .html."
)
@click.option("--prompt-name", help="Put this prompt of the model before each text.  [default: the model's]")
@click.option("--prompt", metavar="TEXT", help="Put TEXT before each text; '' for no prompt at all.")
@click.option("--truncate", is_flag=True, help="Cut a text that is too long; the default is to fail.")
@click.option("--small", is_flag=True, help="Keep the 32 largest weights of each row only.")
@server_options
def view(
    text: str,
    text2: str | None,
    output: str,
    prompt_name: str | None,
    prompt: str | None,
    truncate: bool,
    small: bool,
    server: ServerOptions,
) -> None:
    """Write one HTML file that shows the attention of TEXT, and of TEXT2 if there is one.

    It has all layers and heads, needs no network and opens from the disk in any browser. The model reads two
    texts one by one. The weights are rounded to a byte each; a page has at most 70 MB.
    """
    for name, given in (
        ("TEXT", text),
        ("TEXT2", text2),
        ("--prompt", prompt),
        ("--prompt-name", prompt_name),
    ):
        if not is_sendable(given or ""):
            raise click.BadParameter("it is not UTF-8", param_hint=f"'{name}'")
    if prompt_name is not None and prompt is not None:
        raise click.UsageError("give either --prompt-name or --prompt")
    path = checked_path(output, "--output", (".html", ".htm"))
    from attnlens_viewer import html_of

    texts = [text] if text2 is None else [text, text2]
    page = _fetch(texts, prompt_name, prompt, truncate=truncate, server=server)
    try:
        document = html_of(page, small=small).encode()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    with replacing(Path(path)) as file:
        file.write(document)
    click.echo(f"{path}: {len(document) / 1e6:.2f} MB, open it in a browser", err=True)


def _fetch(
    texts: list[str], prompt_name: str | None, prompt: str | None, *, truncate: bool, server: ServerOptions
) -> "Page":
    from attnlens_cli.show.viewed_page import page_of
    from attnlens_client import AttentionQuery, Client, InputTooLongError

    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
        try:
            results = list(
                client.stream(
                    texts,
                    attention=AttentionQuery(view="dense"),
                    hidden_states=False,
                    prompt_name=prompt_name,
                    prompt=prompt,
                    truncate=truncate,
                    model=model.name,
                )
            )
        except InputTooLongError as error:
            raise click.ClickException(
                f"a text has {error.num_tokens} tokens, the model takes {error.max_tokens}: shorten it, or "
                "give --truncate"
            ) from error
    if prompt is None:
        prompt = model.prompts.get(prompt_name or model.default_prompt_name, "")
    try:
        return page_of(model, results, texts, prompt)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
