"""`attnlens tokenize`: what the model reads of a text."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import text_failure
from attnlens_cli.commands.text_options import Texts, text_options
from attnlens_cli.files.json_text import json_line
from attnlens_cli.files.text_lines import Line
from attnlens_cli.frame.sections import SectionCommand
from attnlens_cli.frame.server_options import ServerOptions, server_options

if TYPE_CHECKING:
    from attnlens_client import Client, ModelInfo, TokenizedText

_BATCH_SIZE = 128
OWN_KEYS = frozenset(
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
"""What a line of JSON has beside the texts and the keys of the line that was read."""


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens tokenize "It was unbelievably wet."
  attnlens tokenize "It rained." --json | jq '[.tokens[].id]'
  attnlens tokenize --input texts.jsonl | jq -c '{id, num_tokens_total}'""",
)
@text_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@server_options
def tokenize(texts: Texts, as_json: bool, server: ServerOptions) -> None:
    """Show all tokens of TEXT, special tokens included, also those beyond the model's longest input.

    Each has its id, its spelling, where it comes from, and the characters of its text that it stands for.
    With --input each text becomes a JSON line, which keeps the other keys of a line that was JSON.
    """
    from attnlens_client import Client

    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
        index = 0
        for batch in texts.batches(_BATCH_SIZE, model, OWN_KEYS):
            for line, found in zip(batch, _tokenize(client, texts, batch, model), strict=True):
                if texts.file is None and not as_json:
                    from attnlens_cli.show.tokens_table import print_tokens

                    print_tokens(found, model)
                else:
                    number = None if texts.file is None else index
                    described = _described(found, model, texts.prompt_of(model))
                    click.echo(json_line(line.as_json(number), described).encode())
                index += 1


def _tokenize(client: "Client", texts: Texts, batch: list[Line], model: "ModelInfo") -> "list[TokenizedText]":
    from attnlens_client import AttnlensError

    try:
        return client.tokenize([line.text for line in batch], model=model.name, **texts.prompts)
    except AttnlensError as error:
        if error.text_index is None or error.text_index >= len(batch):
            raise
        raise text_failure(error, texts.name_of(batch[error.text_index])) from error


def _described(found: "TokenizedText", model: "ModelInfo", prompt: str) -> dict[str, Any]:
    return {
        "model": found.model,
        "model_version": found.model_version,
        "prompt": prompt,
        "num_tokens_total": len(found.tokens),
        "max_tokens": model.max_tokens,
        "exceeds_max_tokens": found.exceeds_max_tokens,
        "tokens": [dataclasses.asdict(token) for token in found.tokens],
    }
