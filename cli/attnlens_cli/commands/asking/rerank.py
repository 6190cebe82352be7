"""`attnlens rerank`: sort the lines of a file by their relevance to a query."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import json
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import input_format_option, json_option, prompt_options, prompt_text
from attnlens_cli.files.text_lines import Line, input_file
from attnlens_cli.frame.options import TEXT, Command, in_section
from attnlens_cli.frame.server import ServerOptions, server_options
from attnlens_cli.printable import counted, printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console

    from attnlens_client import ModelInfo, RankedDocument

_MAX_INT32 = 2**31 - 1
LONG_DOCUMENTS = ("truncate", "split", "reject")
RESULT_KEYS = frozenset({"index", "score", "logit", "num_parts", "part", "explanation"})
"""Keys that `rerank` adds to a JSON line."""

_documents = in_section("Documents")


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens rerank "Who wrote Emma?" passages.txt --top-n 3 --explain
  attnlens rerank "Who wrote Emma?" passages.jsonl --json | jq '.results[0]'""",
)
@click.argument("query", type=TEXT)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@input_format_option
@prompt_options
@_documents(
    "--top-n", type=click.IntRange(1, _MAX_INT32), help="Number of documents to show.  [default: all]"
)
@_documents(
    "--long-documents",
    type=click.Choice(LONG_DOCUMENTS),
    default="truncate",
    show_default=True,
    help="Handling of a document that does not fit into the model's input with its query: truncate it, "
    "split it into parts and show the highest logit, or fail.",
)
@_documents(
    "--max-tokens-per-document",
    type=click.IntRange(1, _MAX_INT32),
    help="Maximum number of tokens of a document.  [default: limited by the model]",
)
@_documents(
    "--explain",
    is_flag=True,
    help="Show the contributions of the words of query and documents to each logit.",
)
@json_option
@server_options
def rerank(
    query: str,
    file: str,
    input_format: str,
    as_json: bool,
    server: ServerOptions,
    **options: Any,  # noqa: ANN401 - arguments of the client's method
) -> None:
    """Sort the documents in FILE by their relevance to QUERY. Needs a reranker.

    FILE contains one document per line, or JSON lines with the document under "text". - reads standard input.
    JSON output keeps the other keys of the input, such as "id".
    """
    from attnlens_client import Client

    given = input_file(file, input_format)
    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
        lines = [*given.lines(model.limits.max_text_bytes, RESULT_KEYS)]
        documents = [_document(line, given.name) for line in lines]
        try:
            ranked = client.rerank(query, documents, model=model.name, **options)
        except ValueError as error:  # an invalid argument
            raise click.UsageError(str(error)) from error
    if as_json:
        prompt = prompt_text(model, options["prompt_name"], options["prompt"])
        click.echo(printable_json(_as_json(query, ranked, lines, model, prompt)))
        return
    from attnlens_cli.show.console import make_console

    console = make_console()
    summary = f"{printable(model.name)}: {counted(len(documents), 'document')}"
    console.print(f"{summary}, scores are the {model.activation} of the logits", soft_wrap=True)
    if options["explain"]:
        from attnlens_cli.show.ranking import print_ranking

        print_ranking(console, query, ranked)
    else:
        _print_table(console, ranked)


def _document(line: Line, name: str) -> str:
    if not isinstance(line.text, str):
        raise click.ClickException(f'{name}, line {line.number}: documents cannot be pairs: omit "text_pair"')
    return line.text


def _as_json(
    query: str, ranked: "list[RankedDocument]", lines: list[Line], model: "ModelInfo", prompt: str
) -> dict[str, Any]:
    return {
        "model": model.name,
        "model_version": model.version,
        "prompt": prompt,
        "query": query,
        "activation": model.activation,
        "results": [
            {
                "index": result.index,
                "score": result.score,
                "logit": result.logit,
                "num_parts": result.num_parts,
                "part": result.part,
                "text": result.document,
                **_explained(result),
                **json.loads("{" + lines[result.index].other_keys + "}"),
            }
            for result in ranked
        ],
    }


def _explained(result: "RankedDocument") -> dict[str, Any]:
    """Return the explanation of a result, if requested."""
    if result.explanation is None:
        return {}
    from attnlens_cli.show.as_json import explanation_as_json

    return {"explanation": explanation_as_json(result.explanation, verify=False)}


def _print_table(console: "Console", ranked: "list[RankedDocument]") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("rank", "score", "logit"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("document", overflow="fold")
    for rank, result in enumerate(ranked, 1):
        part = f" (part {result.part + 1} of {result.num_parts})" if result.num_parts > 1 else ""
        text = printable(result.document) + part
        table.add_row(str(rank), f"{result.score:.4f}", f"{result.logit:.4f}", text)
    console.print(table)
