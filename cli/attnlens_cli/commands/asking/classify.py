"""`attnlens classify`: show the labels of a text."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import (
    Texts,
    json_option,
    prompt_text,
    text_failure,
    text_options,
    truncate_option,
)
from attnlens_cli.files.text_lines import Line
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.frame.server import ServerOptions, server_options
from attnlens_cli.printable import json_line, printable

if TYPE_CHECKING:
    from attnlens_client import Classification, Client, ModelInfo

_BATCH_SIZE = 128
CLASSIFY_KEYS = frozenset({"index", "model", "model_version", "prompt", "activation", "labels"})
"""Keys that `classify` adds to a JSON line."""


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens classify "The room was quiet and clean." --top-k 3
  attnlens classify "It rained." --text-pair "It was wet." --json
  attnlens classify --input reviews.jsonl | jq -c '{id, label: .labels[0].label}'""",
)
@text_options
@truncate_option
@in_section("Output")(
    "--top-k", type=click.IntRange(min=1), help="Number of labels with the highest scores.  [default: all]"
)
@json_option
@server_options
def classify(texts: Texts, truncate: bool, top_k: int | None, as_json: bool, server: ServerOptions) -> None:
    """Show the labels of TEXT with their scores and logits. Needs a classifier.

    With --input, each text becomes a JSON line that keeps the other keys of a JSON input line.
    """
    from attnlens_client import Client

    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
        prompt, index = prompt_text(model, **texts.prompts), 0
        for batch in texts.batches(_BATCH_SIZE, model, CLASSIFY_KEYS):
            result = _classify(client, texts, batch, model, truncate=truncate)
            for place, line in enumerate(batch):
                if texts.file is None and not as_json:
                    _print_table(result, place, top_k)
                else:
                    row = None if texts.file is None else index
                    content = _as_json(result, place, prompt, top_k)
                    click.echo(json_line(line.as_json(row), content).encode())
                index += 1


def _classify(
    client: "Client", texts: Texts, batch: list[Line], model: "ModelInfo", *, truncate: bool
) -> "Classification":
    from attnlens_client import AttnlensError

    try:
        return client.classify(
            [line.text for line in batch],
            model=model.name,
            truncate=truncate,
            prompt_name=texts.prompt_name,
            prompt=texts.prompt,
        )
    except AttnlensError as error:
        if error.text_index is None or error.text_index >= len(batch):
            raise
        raise text_failure(error, texts.name_of(batch[error.text_index])) from error


def _rows(result: "Classification", place: int, top_k: int | None) -> list[tuple[str, float, float]]:
    """Return label, score and logit in descending order."""
    logits = dict(zip(result.labels, result.logits[place].tolist(), strict=True))
    return [(label, score, logits[label]) for label, score in result.top(top_k)[place]]


def _as_json(result: "Classification", place: int, prompt: str, top_k: int | None) -> dict[str, Any]:
    return {
        "model": result.model,
        "model_version": result.model_version,
        "prompt": prompt,
        "activation": result.activation,
        "labels": [
            {"label": label, "score": score, "logit": logit}
            for label, score, logit in _rows(result, place, top_k)
        ],
    }


def _print_table(result: "Classification", place: int, top_k: int | None) -> None:
    from attnlens_cli.show.console import make_console, make_table

    console = make_console()
    summary = f"{printable(result.model)}: {result.usages[place].num_tokens:,} tokens"
    console.print(f"{summary}, scores are the {result.activation} of the logits", soft_wrap=True)
    table = make_table("", ["label"], ["score", "logit"])
    for label, score, logit in _rows(result, place, top_k):
        table.add_row(printable(label), f"{score:.4f}", f"{logit:.4f}")
    console.print(table)
