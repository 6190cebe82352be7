"""`attnlens explain`: which words made a vector, or a similarity."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import (
    EXPLAIN_METHODS,
    POOLINGS,
    check_prompt,
    check_sendable,
    dimensions_option,
    too_long_explained,
)
from attnlens_cli.files.page_file import checked_page_path, write_page
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.frame.server_options import ServerOptions, server_options
from attnlens_cli.show.printable import printable, printable_json

if TYPE_CHECKING:
    from attnlens_client import Explanation
    from attnlens_viewer import Page

VERIFIER = "leave_one_out"

_explained = in_section("What to explain")
_read = in_section("What to read")
_show = in_section("What to show")


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens explain "The animal didn't cross the street because it was too tired."
  attnlens explain "A man is playing a guitar." --to "Someone plays an instrument." --verify
  attnlens explain "my query" --to "the hit" --rather-than "the one below it" --words""",
)
@click.argument("text")
@_explained("--to", metavar="TEXT", help="Explain the similarity to TEXT.  [default: the text's own vector]")
@_explained("--rather-than", metavar="TEXT", help="Why nearer to --to than to TEXT?")
@_explained(
    "--method",
    "methods",
    multiple=True,
    type=click.Choice(EXPLAIN_METHODS),
    help="How; may be given several times.  [default: contributions]",
)
@_show("--words", is_flag=True, help="Add up the tokens of each word.")
@_show("--top", type=click.IntRange(min=1), help="Show this many of the largest scores only.")
@_show("--verify", is_flag=True, help="Leave out each token in turn and compare the rankings.")
@_show("--head-contributions", is_flag=True, help="With --json: what each head contributes, too.")
@_read("--prompt-name", help="Put this prompt of the model before TEXT.  [default: the model's]")
@_read("--prompt", metavar="TEXT", help="Put TEXT before it; '' for no prompt at all.")
@_read("--target-prompt-name", help="The prompt of --to and --rather-than.  [default: the model's]")
@_explained("--pooling", type=click.Choice(POOLINGS), help="Instead of the model's own.")
@dimensions_option("What to explain")
@_read("--truncate", is_flag=True, help="Cut a text that is too long; the default is to fail.")
@_show("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_show("--html", metavar="FILE", help="Write a page with the scores and all attention, too.")
@server_options
def explain(
    text: str,
    to: str | None,
    rather_than: str | None,
    methods: tuple[str, ...],
    words: bool,
    top: int | None,
    verify: bool,
    as_json: bool,
    html: str | None,
    server: ServerOptions,
    target_prompt_name: str | None,
    **options: Any,  # noqa: ANN401 - options of the client's method
) -> None:
    """Show what each token of TEXT did for its vector, or for its similarity to another text.

    Scores of `contributions` and their baseline add up to the target: 1 for the text's own vector, the cosine
    for another text, the difference of two cosines with --rather-than.
    """
    check_sendable(
        {
            "TEXT": text,
            "--to": to,
            "--rather-than": rather_than,
            "--prompt": options["prompt"],
            "--prompt-name": options["prompt_name"],
            "--target-prompt-name": target_prompt_name,
        }
    )
    if rather_than is not None and to is None:
        raise click.UsageError("--rather-than needs --to")
    if target_prompt_name is not None and to is None:
        raise click.UsageError("--target-prompt-name needs --to")
    check_prompt(options["prompt_name"], options["prompt"])
    _check_shape(as_json=as_json, head_contributions=options["head_contributions"], top=top)
    path = None if html is None else checked_page_path(html, "--html")
    asked = _methods(methods, verify=verify)
    options |= {"methods": asked, "level": "words" if words else "tokens"}
    options |= {"to": to, "rather_than": rather_than, "target_prompt_name": target_prompt_name}
    explanation, page = _fetch(text, server, options, with_page=path is not None)
    if path is not None and page is not None:
        write_page(path, page)
    if as_json:
        from attnlens_cli.show.explanations.as_json import explanation_as_json

        described = {"model": explanation.model, "model_version": explanation.model_version, "text": text}
        described |= {
            name: given for name, given in (("to", to), ("rather_than", rather_than)) if given is not None
        }
        click.echo(printable_json(described | explanation_as_json(explanation, verify=verify)))
        return
    from attnlens_cli.show.console import make_console
    from attnlens_cli.show.explanations.bars import print_caveat, print_scores

    console = make_console()
    console.print(_caption(explanation, to, rather_than), soft_wrap=True)
    texts = {"text": text, "prompt": options["prompt"] or ""}
    print_scores(console, explanation, texts=texts, top=top, verify=verify)
    print_caveat(console, asked[0], "" if verify else "Add --verify to compare with leaving out each word.")


def _check_shape(*, as_json: bool, head_contributions: bool, top: int | None) -> None:
    """Refuse options that do not go together."""
    if head_contributions and not as_json:
        raise click.UsageError("--head-contributions needs --json")
    if as_json and top is not None:
        raise click.UsageError("--json prints all scores: leave out --top")


def _methods(methods: tuple[str, ...], *, verify: bool) -> list[str]:
    """Return what to ask for: with `verify`, leave-one-out comes last."""
    asked = list(dict.fromkeys(methods)) or ["contributions"]
    if not verify:
        return asked
    others = [method for method in asked if method != VERIFIER]
    if not others:
        raise click.UsageError("--verify compares with leave_one_out: give another --method")
    return [*others, VERIFIER]


def _fetch(
    text: str, server: ServerOptions, options: dict[str, Any], *, with_page: bool
) -> "tuple[Explanation, Page | None]":
    from attnlens_client import Client

    with (
        Client(server.address, **server.client_settings()) as client,
        too_long_explained("texts[0]", "TEXT"),
        too_long_explained("to", "--to"),
        too_long_explained("contrast.to", "--to"),
        too_long_explained("contrast.rather_than", "--rather-than"),
    ):
        [explanation] = client.explain([text], model=server.model, **options)
        if not with_page:
            return explanation, None
        from attnlens_client.pages import Reading, result_page
        from attnlens_viewer.results import describe_target

        model = client.get_model(server.model)
        # The page adds up words by itself, and shows what heads contribute where the method knows.
        of_tokens = options | {"level": "tokens", "head_contributions": "contributions" in options["methods"]}
        [shown] = client.explain([text], model=model.name, **of_tokens)
        reading = Reading(
            prompt_names=(options["prompt_name"], None),
            prompts=(options["prompt"], None),
            truncate=options["truncate"],
        )
        target = describe_target(options["to"], options["rather_than"])
        return explanation, result_page(client, model, [text], reading, explanations=[shown], target=target)


def _caption(explanation: "Explanation", to: str | None, rather_than: str | None) -> str:
    """Say what is explained."""
    from attnlens_cli.show.printable import counted

    value = explanation.target_value
    target = f"its own vector, {value:.4f}"
    if to is not None:
        target = f"its cosine with {printable(to)!r}, {value:.4f}"
    if rather_than is not None:
        target = (
            f"its cosine with {printable(to or '')!r} less that with {printable(rather_than)!r}, {value:+.4f}"
        )
    used = counted(explanation.usage.num_tokens, "token")
    if explanation.usage.truncated:
        used = f"the first {used} of {explanation.usage.num_tokens_total}"
    return f"{printable(explanation.model)}, {used}: what made {target}"
