"""`attnlens tokenize`: show the tokens of a text."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import Texts, json_option, prompt_text, text_failure, text_options
from attnlens_cli.files.text_lines import Line
from attnlens_cli.frame.options import Command
from attnlens_cli.frame.server import ServerOptions, server_options
from attnlens_cli.printable import counted, json_line, printable

if TYPE_CHECKING:
    from attnlens_client import Client, ModelInfo, TokenizedText

_BATCH_SIZE = 128
_SOURCES_WITHOUT_OFFSETS = {"special", "ids"}
TOKENIZE_KEYS = frozenset(
    {
        "index",
        "model",
        "model_version",
        "prompt",
        "num_tokens_total",
        "max_tokens",
        "exceeds_max_tokens",
        "tokens",
    }
)
"""Keys that `tokenize` adds to a JSON line."""


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens tokenize "It was unbelievably wet."
  attnlens tokenize "It rained." --json | jq '[.tokens[].id]'
  attnlens tokenize --input texts.jsonl | jq -c '{id, num_tokens_total}'""",
)
@text_options
@json_option
@server_options
def tokenize(texts: Texts, as_json: bool, server: ServerOptions) -> None:
    """Show all tokens of TEXT, including special tokens and tokens beyond the model's maximum.

    Each token has an id, a spelling, a source, and offsets in characters. With --input, each text becomes a
    JSON line that keeps the other keys of a JSON input line.
    """
    from attnlens_client import Client

    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
        index = 0
        for batch in texts.batches(_BATCH_SIZE, model, TOKENIZE_KEYS):
            for line, result in zip(batch, _tokenize(client, texts, batch, model), strict=True):
                if texts.file is None and not as_json:
                    _print_table(result, model)
                else:
                    row = None if texts.file is None else index
                    content = _as_json(result, model, prompt_text(model, **texts.prompts))
                    click.echo(json_line(line.as_json(row), content).encode())
                index += 1


def _tokenize(client: "Client", texts: Texts, batch: list[Line], model: "ModelInfo") -> "list[TokenizedText]":
    from attnlens_client import AttnlensError

    try:
        return client.tokenize([line.text for line in batch], model=model.name, **texts.prompts)
    except AttnlensError as error:
        if error.text_index is None or error.text_index >= len(batch):
            raise
        raise text_failure(error, texts.name_of(batch[error.text_index])) from error


def _as_json(result: "TokenizedText", model: "ModelInfo", prompt: str) -> dict[str, Any]:
    return {
        "model": result.model,
        "model_version": result.model_version,
        "prompt": prompt,
        "num_tokens_total": len(result.tokens),
        "max_tokens": model.max_tokens,
        "exceeds_max_tokens": result.exceeds_max_tokens,
        "tokens": [dataclasses.asdict(token) for token in result.tokens],
    }


def _print_table(result: "TokenizedText", model: "ModelInfo") -> None:
    from rich import box
    from rich.table import Table

    from attnlens_cli.show.console import make_console

    console = make_console()
    summary = f"{printable(result.model)}: {counted(len(result.tokens), 'token')}"
    summary += f", the limit is {model.max_tokens:,}"
    if result.exceeds_max_tokens:
        summary += "; other commands truncate the text with --truncate"
    console.print(summary, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (("index", "right"), ("id", "right"), ("token", "left"), ("source", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("characters", justify="right", no_wrap=True)
    for index, token in enumerate(result.tokens):
        offsets = f"{token.char_start}-{token.char_end}"
        if token.source in _SOURCES_WITHOUT_OFFSETS:
            offsets = ""
        table.add_row(str(index), str(token.id), printable(token.text), token.source, offsets)
    console.print(table)
