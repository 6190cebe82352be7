"""`attnlens explain`: explain an embedding or a similarity by tokens or words."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import (
    EXPLAIN_METHODS,
    explanation_output_options,
    reading_options,
    single_input,
    text_pair_option,
    too_long_explained,
    vector_options,
)
from attnlens_cli.files.output_file import PAGE_SUFFIXES, checked_path, write_page
from attnlens_cli.frame.options import TEXT, Command, in_section
from attnlens_cli.frame.server import ServerOptions, server_options
from attnlens_cli.printable import counted, printable, printable_json

if TYPE_CHECKING:
    from attnlens_client import Explanation
    from attnlens_viewer import Page

_VERIFIER = "leave_one_out"
_explain, _input, _output = in_section("Explanation"), in_section("Input"), in_section("Output")


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens explain "The animal didn't cross the street because it was too tired."
  attnlens explain "A man is playing a guitar." --to "Someone plays an instrument." --verify
  attnlens explain "my query" --to "the hit" --rather-than "the one below it" --words
  attnlens explain "The room was clean." --label positive --rather-than neutral""",
)
@click.argument("text", type=TEXT)
@text_pair_option
@_explain("--to", type=TEXT, help="Explain the similarity to this text.  [default: the text's own embedding]")
@_explain(
    "--rather-than",
    type=TEXT,
    help="Explain why TEXT is more similar to --to than to this text, or more of --label than this.",
)
@_explain("--label", type=TEXT, help="Explain the logit of this label of a classifier.")
@_explain(
    "--method",
    "methods",
    multiple=True,
    type=click.Choice(EXPLAIN_METHODS),
    help="Explanation method; may be repeated.  [default: contributions]",
)
@_explain("--verify", is_flag=True, help="Also remove one token at a time, and compare the rankings.")
@_explain(
    "--head-contributions", is_flag=True, help="With --json: also return the contribution of each head."
)
@vector_options
@reading_options
@_input(
    "--target-prompt-name",
    type=TEXT,
    help="Prompt of --to and --rather-than.  [default: the model's default prompt]",
)
@explanation_output_options
@server_options
def explain(
    text: str,
    text_pair: str | None,
    to: str | None,
    rather_than: str | None,
    label: str | None,
    methods: tuple[str, ...],
    words: bool,
    top: int | None,
    verify: bool,
    as_json: bool,
    html: str | None,
    server: ServerOptions,
    target_prompt_name: str | None,
    **options: Any,  # noqa: ANN401 - arguments of the client's method
) -> None:
    """Show the contribution of each token of TEXT to its embedding, to a similarity, or to a logit.

    With the method `contributions`, the scores and the baseline add up to the target: 1 for the text's own
    embedding, the cosine with another text, or the difference of two cosines with --rather-than. For a
    reranker, it is the logit of TEXT with --text-pair; for a classifier, the logit of --label.
    """
    targets = {"to": to, "label": label, "rather_than": rather_than}
    _check_targets(to, label, rather_than, target_prompt_name)
    if html is not None and text_pair is not None:
        raise click.UsageError("--html shows single texts: omit --text-pair")
    if options["head_contributions"] and not as_json:
        raise click.UsageError("--head-contributions needs --json")
    if as_json and top is not None:
        raise click.UsageError("--json prints all scores: omit --top")
    path = None if html is None else checked_path(html, "--html", PAGE_SUFFIXES)
    selected = _methods(methods, verify=verify)
    options |= {"methods": selected, "level": "words" if words else "tokens"}
    options |= {**targets, "target_prompt_name": target_prompt_name}
    explanation, page = _fetch(text, text_pair, server, options, with_page=path is not None)
    if path is not None and page is not None:
        write_page(path, page)
    if as_json:
        from attnlens_cli.show.as_json import explanation_as_json

        content = {"model": explanation.model, "model_version": explanation.model_version, "text": text}
        targets = {"text_pair": text_pair, **targets}
        content |= {name: value for name, value in targets.items() if value is not None}
        click.echo(printable_json(content | explanation_as_json(explanation, verify=verify)))
        return
    from attnlens_cli.show.console import make_console
    from attnlens_cli.show.explanation import print_caveat, print_scores

    console = make_console()
    console.print(_caption(explanation, to, rather_than, label), soft_wrap=True)
    texts = {"text": text, "prompt": options["prompt"] or ""}
    texts |= {} if text_pair is None else {"second_text": text_pair}
    print_scores(console, explanation, texts=texts, top=top, verify=verify)
    print_caveat(
        console, selected[0], "" if verify else "Add --verify to compare with leaving out each word."
    )


def _check_targets(
    to: str | None, label: str | None, rather_than: str | None, target_prompt_name: str | None
) -> None:
    if rather_than is not None and to is None and label is None:
        raise click.UsageError("--rather-than needs --to or --label")
    if target_prompt_name is not None and to is None:
        raise click.UsageError("--target-prompt-name needs --to")
    if label is not None and to is not None:
        raise click.UsageError("--label and --to exclude each other")


def _methods(methods: tuple[str, ...], *, verify: bool) -> list[str]:
    """Return the methods to request. With `verify`, leave-one-out is the last one."""
    selected = list(dict.fromkeys(methods)) or ["contributions"]
    if not verify:
        return selected
    others = [method for method in selected if method != _VERIFIER]
    if not others:
        raise click.UsageError("--verify compares with leave_one_out: use another --method")
    return [*others, _VERIFIER]


def _fetch(
    text: str, text_pair: str | None, server: ServerOptions, options: dict[str, Any], *, with_page: bool
) -> "tuple[Explanation, Page | None]":
    from attnlens_client import Client

    names = {
        "texts[0]": "TEXT",
        "to": "--to",
        "contrast.to": "--to",
        "contrast.rather_than": "--rather-than",
    }
    with Client(server.address, **server.client_settings()) as client, too_long_explained(names):
        given: str | tuple[str, str] = text
        if text_pair is not None:
            given = single_input(text, text_pair, client.get_model(server.model))
        [explanation] = client.explain([given], model=server.model, **options)
        if not with_page:
            return explanation, None
        from attnlens_client.pages import TextOptions, result_page
        from attnlens_viewer.results import describe_target

        model = client.get_model(server.model)
        # The page needs scores of tokens, and contributions of heads if the method has them.
        arguments = options | {"level": "tokens", "head_contributions": "contributions" in options["methods"]}
        [by_token] = client.explain([text], model=model.name, **arguments)
        reading = TextOptions(
            prompt_names=(options["prompt_name"], None),
            prompts=(options["prompt"], None),
            truncate=options["truncate"],
        )
        target = describe_target(options["to"], options["rather_than"], options["label"])
        return explanation, result_page(
            client, model, [text], reading, explanations=[by_token], target=target
        )


def _caption(explanation: "Explanation", to: str | None, rather_than: str | None, label: str | None) -> str:
    """Return the model, the number of tokens and the target."""
    value = explanation.target_value
    target = f"the text's own embedding, {value:.4f}"
    if label is not None:
        other = "" if rather_than is None else f" minus that of {printable(rather_than)!r}"
        target = f"logit of {printable(label)!r}{other}, {value:+.4f}"
    elif explanation.sums_by_source is not None:
        target = f"logit, {value:+.4f}"
    elif to is not None:
        target = f"cosine with {printable(to)!r}, {value:.4f}"
    if rather_than is not None and label is None:
        target = (
            f"cosine with {printable(to or '')!r} minus cosine with {printable(rather_than)!r}, {value:+.4f}"
        )
    tokens = counted(explanation.usage.num_tokens, "token")
    if explanation.usage.truncated:
        tokens = f"the first {tokens} of {explanation.usage.num_tokens_total}"
    return f"{printable(explanation.model)}, {tokens}, target: {target}"
