"""`attnlens compare`: show why two texts are similar."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import (
    EXPLAIN_METHODS,
    PAIR_MATRICES,
    explanation_output_options,
    too_long_explained,
    truncate_option,
    vector_options,
)
from attnlens_cli.files.output_file import PAGE_SUFFIXES, checked_path, write_page
from attnlens_cli.frame.options import TEXT, Command, in_section
from attnlens_cli.frame.server import ServerOptions, server_options
from attnlens_cli.printable import printable, printable_json

if TYPE_CHECKING:
    from attnlens_client import Client, Comparison
    from attnlens_viewer import Page

_explain, _input = in_section("Explanation"), in_section("Input")


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens compare "A man is playing a guitar." "Someone plays an instrument."
  attnlens compare "A man is playing a guitar." "Someone plays an instrument." --matrix interaction""",
)
@click.argument("first", metavar="TEXT", type=TEXT)
@click.argument("second", metavar="TEXT", type=TEXT)
@_explain(
    "--matrix",
    type=click.Choice(PAIR_MATRICES),
    help="Also show the contribution of each pair of tokens. interaction needs one run of the model per "
    "token, input one per component of the embedding.",
)
@_explain(
    "--method",
    type=click.Choice(EXPLAIN_METHODS),
    default="contributions",
    show_default=True,
    help="Explanation method for both texts.",
)
@vector_options
@_input("--prompt-name-a", type=TEXT, help="Prompt of the first text.  [default: the model's default prompt]")
@_input(
    "--prompt-name-b", type=TEXT, help="Prompt of the second text.  [default: the model's default prompt]"
)
@truncate_option
@explanation_output_options
@server_options
def compare(
    first: str,
    second: str,
    method: str,
    words: bool,
    top: int | None,
    as_json: bool,
    html: str | None,
    server: ServerOptions,
    **options: Any,  # noqa: ANN401 - arguments of the client's method
) -> None:
    """Show the contribution of each token of two texts to the similarity of their embeddings."""
    if as_json and top is not None:
        raise click.UsageError("--json prints all scores: omit --top")
    path = None if html is None else checked_path(html, "--html", PAGE_SUFFIXES)
    from attnlens_client import Client

    level = "words" if words else "tokens"
    options |= {"methods": method, "level": level, "model": server.model}
    names = {"pairs[0].a": "the first TEXT", "pairs[0].b": "the second TEXT"}
    with Client(server.address, **server.client_settings()) as client, too_long_explained(names):
        comparison = client.compare(first, second, **options)
        if path is not None:
            write_page(path, _page(client, first, second, options))
    if as_json:
        from attnlens_cli.show.as_json import comparison_as_json

        side = comparison.a
        content = {"model": side.model, "model_version": side.model_version, "texts": [first, second]}
        click.echo(printable_json(content | comparison_as_json(comparison)))
    else:
        _print(comparison, (first, second), method, top, options["matrix"])


def _print(
    comparison: "Comparison", texts: tuple[str, str], method: str, top: int | None, matrix: str | None
) -> None:
    from attnlens_cli.show.console import make_console
    from attnlens_cli.show.explanation import print_caveat, print_matrix, print_scores

    console = make_console()
    console.print(f"{printable(comparison.a.model)}: {comparison.function_label} {comparison.similarity:.4f}")
    for text, side in zip(texts, (comparison.a, comparison.b), strict=True):
        console.print()
        console.print(printable(text), soft_wrap=True)
        print_scores(console, side, texts={"text": text}, top=top, verify=False)
    print_caveat(
        console, method, "To compare with leaving out each word: attnlens explain TEXT --to TEXT --verify."
    )
    if matrix is not None:
        console.print()
        print_matrix(console, comparison, texts, matrix)


def _page(client: "Client", first: str, second: str, options: dict[str, Any]) -> "Page":
    """Return the page. It needs scores of tokens, and contributions of heads if the method has them."""
    from attnlens_client.pages import TextOptions, result_page

    has_heads = options["methods"] == "contributions"
    matrix = options["matrix"] or "output"
    model = client.get_model(options["model"])
    if matrix not in model.pair_matrices:
        matrix = None
    arguments = options | {"level": "tokens", "head_contributions": has_heads, "matrix": matrix}
    comparison: Comparison = client.compare(first, second, **arguments)
    reading = TextOptions(
        prompt_names=(options["prompt_name_a"], options["prompt_name_b"]), truncate=options["truncate"]
    )
    return result_page(client, model, [first, second], reading, comparison=comparison, matrix=matrix or "")
