"""`attnlens attend`: which tokens of a text attend to which."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import dataclasses
from typing import TYPE_CHECKING

import click

from attnlens_cli.files.new_file import checked_path
from attnlens_cli.files.text_lines import is_sendable
from attnlens_cli.frame.server_options import ServerOptions, server_options
from attnlens_cli.show.printable import printable_json

if TYPE_CHECKING:
    from attnlens_cli.show.attention_map import AttentionMap


@click.command(
    epilog="""\b
Example:
  attnlens attend "The animal didn't cross the street because it was too tired." --token it
  attnlens attend "It rained." --layer 3 --head 1 --png rain.png"""
)
@click.argument("text")
@click.option(
    "--layer", default=-1, show_default=True, help="The layer, from 0; negative numbers count from the end."
)
@click.option(
    "--head", type=int, help="The head, from 0; negative counts from the end.  [default: the mean of all]"
)
@click.option(
    "--token", metavar="TOKEN|NUMBER", help="Show what this token or word attends to, sorted by weight."
)
@click.option(
    "--top", type=click.IntRange(min=1), help="Show this many of the largest weights of each token only."
)
@click.option("--truncate", is_flag=True, help="Cut a text that is too long; the default is to fail.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with tokens and all weights.")
@click.option("--png", metavar="FILE", help="Write a heat map; needs the extra `plot`.")
@server_options
def attend(
    text: str,
    layer: int,
    head: int | None,
    token: str | None,
    top: int | None,
    truncate: bool,
    as_json: bool,
    png: str | None,
    server: ServerOptions,
) -> None:
    """Show the attention weights of TEXT: rows are tokens, columns are what they attend to.

    Each row sums to 1. Where the table does not fit the terminal, the largest weights of each token
    are shown.
    """
    if not is_sendable(text):
        raise click.BadParameter("it is not UTF-8", param_hint="'TEXT'")
    if as_json and (token is not None or top is not None):
        raise click.UsageError("--json prints all weights: leave out --token and --top")
    if png and top is not None and token is None:
        raise click.UsageError("--top is for what is printed: with --png it needs --token")
    png_path = checked_path(png, "--png", (".png",)) if png else None
    attention = _fetch(text, layer, head, server, truncate=truncate)
    if png_path:
        from attnlens_cli.show.attention_png import write_png

        note = write_png(attention, png_path)
        click.echo(f"{png_path}: {attention.caption}{note}", err=True)
    if as_json:
        click.echo(printable_json(_as_json(attention, text)))
    elif token is not None:
        _print_rows(attention, token, top)
    elif not png_path:
        from attnlens_cli.show.attention_text import print_map

        print_map(attention, top)


def _fetch(
    text: str, layer: int, head: int | None, server: ServerOptions, *, truncate: bool
) -> "AttentionMap":
    from attnlens_cli.show.attention_map import AttentionMap
    from attnlens_client import Client, InputTooLongError

    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
        _check_number("layer", layer, model.num_layers, model.name)
        if head is not None:
            _check_number("head", head, model.num_heads, model.name)
        try:
            [result] = client.encode(
                [text],
                layers=[layer % model.num_layers],
                heads=None if head is None else [head % model.num_heads],
                head_reduction="mean",  # of one head: that head
                hidden_states=False,
                truncate=truncate,
                model=model.name,
            )
        except InputTooLongError as error:
            raise click.ClickException(
                f"TEXT has {error.num_tokens} tokens, the model takes {error.max_tokens}: "
                "shorten it, or give --truncate"
            ) from error
    if not result.tokens:
        raise click.ClickException("TEXT has no tokens, and so no attention")
    return AttentionMap(text=text, model=model, result=result)


def _check_number(kind: str, number: int, count: int, model_name: str) -> None:
    if not -count <= number < count:
        raise click.BadParameter(
            f"{number}: {model_name} has the {kind}s 0 to {count - 1}, or -{count} to -1",
            param_hint=f"'--{kind}'",
        )


def _print_rows(attention: "AttentionMap", wanted: str, top: int | None) -> None:
    from attnlens_cli.show.attention_text import print_row

    rows = attention.find(wanted)
    if not rows:
        shown = " ".join(attention.labels)
        raise click.BadParameter(f"no token or word {wanted!r} among: {shown}", param_hint="'--token'")
    for row in rows:
        print_row(attention, row, top)


def _as_json(attention: "AttentionMap", text: str) -> dict[str, object]:
    result = attention.result
    return {
        "model": attention.model.name,
        "text": text,
        "layer": attention.layer,
        "heads": list(result.heads),
        "num_tokens": result.num_tokens,
        "num_tokens_total": result.num_tokens_total,
        "truncated": result.truncated,
        "tokens": [dataclasses.asdict(token) for token in result.tokens],
        "weights": attention.weights.tolist(),
    }
