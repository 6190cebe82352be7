"""`attnlens compare`: why two texts are similar."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import (
    EXPLAIN_METHODS,
    PAIR_MATRICES,
    POOLINGS,
    check_sendable,
    dimensions_option,
    too_long_explained,
)
from attnlens_cli.files.page_file import checked_page_path, write_page
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.frame.server_options import ServerOptions, server_options
from attnlens_cli.show.printable import printable, printable_json

if TYPE_CHECKING:
    from attnlens_client import Client, Comparison
    from attnlens_viewer import Page

_explained = in_section("What to explain")
_read = in_section("What to read")
_show = in_section("What to show")


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens compare "A man is playing a guitar." "Someone plays an instrument."
  attnlens compare "A man is playing a guitar." "Someone plays an instrument." --matrix interaction""",
)
@click.argument("first", metavar="TEXT")
@click.argument("second", metavar="TEXT")
@_explained(
    "--matrix",
    type=click.Choice(PAIR_MATRICES),
    help="Show what each pair did, too; interaction takes a run of the model for each token, input one for "
    "each component of the vectors.",
)
@_explained(
    "--method",
    type=click.Choice(EXPLAIN_METHODS),
    default="contributions",
    show_default=True,
    help="How each side is explained.",
)
@_show("--words", is_flag=True, help="Add up the tokens of each word.")
@_show("--top", type=click.IntRange(min=1), help="Show this many of the largest scores only.")
@_read("--prompt-name-a", help="The prompt of the first text.  [default: the model's]")
@_read("--prompt-name-b", help="The prompt of the second one.  [default: the model's]")
@_explained("--pooling", type=click.Choice(POOLINGS), help="Instead of the model's own.")
@dimensions_option("What to explain")
@_read("--truncate", is_flag=True, help="Cut a text that is too long; the default is to fail.")
@_show("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_show("--html", metavar="FILE", help="Write a page with the scores and all attention, too.")
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
    **options: Any,  # noqa: ANN401 - options of the client's method
) -> None:
    """Show what each token of two texts did for the cosine of their vectors."""
    names = ("prompt_name_a", "prompt_name_b")
    given = {f"--{name.replace('_', '-')}": options[name] for name in names}
    check_sendable({"TEXT": first + second, **given})
    if as_json and top is not None:
        raise click.UsageError("--json prints all scores: leave out --top")
    path = None if html is None else checked_page_path(html, "--html")
    from attnlens_client import Client

    level = "words" if words else "tokens"
    options |= {"methods": method, "level": level, "model": server.model}
    with (
        Client(server.address, **server.client_settings()) as client,
        too_long_explained("pairs[0].a", "the first TEXT"),
        too_long_explained("pairs[0].b", "the second TEXT"),
    ):
        found = client.compare(first, second, **options)
        if path is not None:
            write_page(path, _page(client, first, second, options))
    if as_json:
        from attnlens_cli.show.explanations.as_json import comparison_as_json

        described = {"model": found.a.model, "model_version": found.a.model_version, "texts": [first, second]}
        click.echo(printable_json(described | comparison_as_json(found)))
        return
    from attnlens_cli.show.console import make_console
    from attnlens_cli.show.explanations.bars import print_caveat, print_scores
    from attnlens_cli.show.explanations.pairs import print_matrix

    console = make_console()
    console.print(f"{printable(found.a.model)}: cosine {found.similarity:.4f}")
    for text, side in ((first, found.a), (second, found.b)):
        console.print()
        console.print(printable(text), soft_wrap=True)
        print_scores(console, side, texts={"text": text}, top=top, verify=False)
    print_caveat(
        console, method, "To compare with leaving out each word: attnlens explain TEXT --to TEXT --verify."
    )
    if options["matrix"] is not None:
        console.print()
        print_matrix(console, found, (first, second), options["matrix"])


def _page(client: "Client", first: str, second: str, options: dict[str, Any]) -> "Page":
    """Return the page. It adds up words by itself, and shows what heads contribute where the method knows."""
    from attnlens_client.pages import Reading, result_page

    has_heads = options["methods"] == "contributions"
    matrix = options["matrix"] or "output"
    model = client.get_model(options["model"])
    if matrix not in model.pair_matrices:
        matrix = None
    asked = options | {"level": "tokens", "head_contributions": has_heads, "matrix": matrix}
    found: Comparison = client.compare(first, second, **asked)
    reading = Reading(
        prompt_names=(options["prompt_name_a"], options["prompt_name_b"]), truncate=options["truncate"]
    )
    return result_page(client, model, [first, second], reading, comparison=found, matrix=matrix or "")
