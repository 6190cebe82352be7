"""`attnlens attend`: which tokens of a text attend to which."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.files.new_file import checked_path
from attnlens_cli.files.text_lines import is_sendable
from attnlens_cli.frame.sections import SectionCommand
from attnlens_cli.frame.server_options import ServerOptions, server_options
from attnlens_cli.show.printable import printable_json

if TYPE_CHECKING:
    from attnlens_cli.show.attention.map import AttentionMap
    from attnlens_client import AttentionQuery, ModelInfo
    from attnlens_client.arguments import RoleName


def _number_or_mean(_: click.Context, parameter: click.Parameter, value: str | None) -> str | int | None:
    """Return a number from either end, "mean", or None where nothing was said."""
    if value is None or value == "mean":
        return value
    try:
        return int(value)
    except ValueError as error:
        text = f"{value!r} is neither a whole number nor 'mean'"
        raise click.BadParameter(text, param=parameter) from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Which:
    """Which weights are asked for: numbers as they were given, None where nothing was said."""

    role: "RoleName"
    layer: str | int | None
    head: str | int | None
    rollout: bool
    words: bool
    no_special: bool
    top: int | None  # of each row, for JSON


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens attend "The animal didn't cross the street because it was too tired." --token it
  attnlens attend "It rained." --layer 3 --head 1 --png rain.png
  attnlens attend "It was unbelievably wet." --words --no-special --layer mean
  attnlens attend "How did it get wet?" --pair "It rained." --layer 3""",
)
@click.argument("text")
@click.option(
    "--pair", metavar="TEXT", help="A second text, which the model reads with the first as one input."
)
@click.option("--prompt-name", help="Put this prompt of the model before TEXT.  [default: the model's]")
@click.option("--prompt", metavar="TEXT", help="Put TEXT before it; '' for no prompt at all.")
@click.option(
    "--layer",
    metavar="NUMBER|mean",
    callback=_number_or_mean,
    help="The layer, from 0; negative numbers count from the end; 'mean' of all.  [default: -1]",
)
@click.option(
    "--head",
    metavar="NUMBER|mean",
    callback=_number_or_mean,
    help="The head, from 0; negative counts from the end; 'mean' of all.  [default: mean]",
)
@click.option("--rollout", is_flag=True, help="Show the rollout of all layers, of the mean of heads.")
@click.option("--words", is_flag=True, help="Put the tokens of each word together.")
@click.option("--no-special", is_flag=True, help="Leave special tokens out, and let each row sum to 1 again.")
@click.option(
    "--token", metavar="TOKEN|NUMBER", help="Show what this token or word attends to, sorted by weight."
)
@click.option(
    "--top", type=click.IntRange(min=1), help="Show this many of the largest weights of each token only."
)
@click.option("--composed", is_flag=True, help="Show weights as composed of several heads, if there are any.")
@click.option(
    "--gates", is_flag=True, help="Show how much each token uses each head, where the model has gates."
)
@click.option("--truncate", is_flag=True, help="Cut a text that is too long; the default is to fail.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with tokens and all weights.")
@click.option("--png", metavar="FILE", help="Write a heat map; needs the extra `plot`.")
@server_options
def attend(
    text: str,
    pair: str | None,
    prompt_name: str | None,
    prompt: str | None,
    layer: str | int | None,
    head: str | int | None,
    rollout: bool,
    words: bool,
    no_special: bool,
    token: str | None,
    top: int | None,
    composed: bool,
    gates: bool,
    truncate: bool,
    as_json: bool,
    png: str | None,
    server: ServerOptions,
) -> None:
    """Show the attention weights of TEXT: rows are tokens, columns are what they attend to.

    Each row sums to 1, except of composed weights. Where the table does not fit the terminal, the largest
    weights of each token are shown. Tokens of a prompt and of the second text of a pair are marked.
    """
    for name, given in (
        ("TEXT", text),
        ("--pair", pair),
        ("--prompt", prompt),
        ("--prompt-name", prompt_name),
    ):
        if not is_sendable(given or ""):
            raise click.BadParameter("it is not UTF-8", param_hint=f"'{name}'")
    if prompt_name is not None and prompt is not None:
        raise click.UsageError("give either --prompt-name or --prompt")
    _check_shape(token, top, png, composed=composed, gates=gates, as_json=as_json)
    png_path = checked_path(png, "--png", (".png",)) if png else None
    options = {"prompt_name": prompt_name, "prompt": prompt, "truncate": truncate}
    role: RoleName = "head_gates" if gates else "attention_composed" if composed else "attention_weights"
    which = _Which(role, layer, head, rollout, words, no_special, top if as_json else None)
    _check_reduction(which)
    attention = _fetch(text, pair, which, server, options)
    if png_path:
        from attnlens_cli.show.attention.png import write_png

        note = write_png(attention, png_path)
        click.echo(f"{png_path}: {attention.caption}{note}", err=True)
    if as_json:
        click.echo(printable_json(_as_json(attention)))
    elif token is not None:
        _print_rows(attention, token, top)
    elif not png_path:
        _print_all(attention, top)


def _check_shape(
    token: str | None, top: int | None, png: str | None, *, composed: bool, gates: bool, as_json: bool
) -> None:
    """Refuse options that do not go together."""
    if gates and (composed or token is not None or top is not None or png):
        raise click.UsageError("--gates goes without --composed, --token, --top and --png")
    if as_json and token is not None:
        raise click.UsageError("--json prints the weights of all tokens: leave out --token")
    if as_json and top is not None and png:
        raise click.UsageError("--png draws all weights: with --json leave out --top")
    if png and top is not None and token is None:
        raise click.UsageError("--top is for what is printed: with --png it needs --token")


def _check_reduction(which: _Which) -> None:
    """Refuse reductions that do not go together, or with what they are of."""
    if which.rollout and (which.layer is not None or which.head not in (None, "mean")):
        raise click.UsageError(
            "--rollout is of all layers and the mean of heads: leave out --layer and --head"
        )
    is_reduced = which.rollout or which.words or which.no_special or which.layer == "mean"
    if which.role == "head_gates" and (is_reduced or which.head == "mean"):
        raise click.UsageError("--gates goes without --rollout, --words, --no-special and means")
    if which.role == "attention_composed" and (which.rollout or which.no_special):
        raise click.UsageError("--composed goes without --rollout and --no-special: its rows don't sum to 1")


def _print_all(attention: "AttentionMap", top: int | None) -> None:
    if attention.role == "head_gates":
        from attnlens_cli.show.attention.gates import print_gates

        print_gates(attention)
    else:
        from attnlens_cli.show.attention.text import print_map

        print_map(attention, top)


def _fetch(
    text: str,
    pair: str | None,
    which: _Which,
    server: ServerOptions,
    options: dict[str, Any],
) -> "AttentionMap":
    """Ask for weights."""
    from attnlens_cli.show.attention.map import AttentionMap
    from attnlens_client import Client, InputTooLongError

    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
        _check_role(which.role, model)
        if pair is not None and not model.text_pairs:
            raise click.BadParameter(f"{model.name} takes no pairs of texts", param_hint="'--pair'")
        query = _query(which, model)
        given = text if pair is None else (text, pair)
        try:
            [result] = client.encode(
                [given], attention=query, hidden_states=False, model=model.name, **options
            )
        except InputTooLongError as error:
            what = "TEXT has" if pair is None else "the two texts have"
            raise click.ClickException(
                f"{what} {error.num_tokens} tokens, the model takes {error.max_tokens}: shorten "
                f"{'it' if pair is None else 'them'}, or give --truncate"
            ) from error
    if not result.tokens:
        raise click.ClickException("TEXT has no tokens, and so no attention")
    prompt = options["prompt"]
    if prompt is None:
        prompt = model.prompts.get(options["prompt_name"] or model.default_prompt_name, "")
    texts = {"text": text, "prompt": prompt} | ({} if pair is None else {"second_text": pair})
    attention = AttentionMap(texts=texts, model=model, result=result)
    if not attention.units:
        raise click.ClickException("TEXT has special tokens alone: leave out --no-special")
    return attention


def _query(which: _Which, model: "ModelInfo") -> "AttentionQuery":
    from attnlens_client import AttentionQuery, Reduction, TopK

    layer = -1 if which.layer is None else which.layer
    layers = None
    if isinstance(layer, int) and not which.rollout:
        _check_number("layer", layer, model.num_layers, model.name)
        layers = [layer % model.num_layers]
    heads = None
    if isinstance(which.head, int):
        _check_number("head", which.head, model.num_heads, model.name)
        heads = [which.head % model.num_heads]
    reduction = Reduction(
        level="words" if which.words else "tokens",
        special_tokens="drop" if which.no_special else "keep",
        layers="rollout" if which.rollout else "mean" if layers is None else "none",
        form=None if which.top is None else TopK(which.top),
    )
    return AttentionQuery(
        layers=layers,
        heads=heads,
        view="full" if which.role == "head_gates" else "head_mean",  # of one head: that head
        role=which.role,
        reduction=None if reduction == Reduction() else reduction,
    )


def _check_role(role: str, model: "ModelInfo") -> None:
    roles = list(dict.fromkeys(output.role for output in model.outputs if output.layer is not None))
    if role not in roles:
        option = "'--gates'" if role == "head_gates" else "'--composed'"
        raise click.BadParameter(f"{model.name} has {', '.join(roles)} alone", param_hint=option)


def _check_number(kind: str, number: int, count: int, model_name: str) -> None:
    if not -count <= number < count:
        raise click.BadParameter(
            f"{number}: {model_name} has the {kind}s 0 to {count - 1}, or -{count} to -1",
            param_hint=f"'--{kind}'",
        )


def _print_rows(attention: "AttentionMap", wanted: str, top: int | None) -> None:
    from attnlens_cli.show.attention.text import print_row

    rows = attention.find(wanted)
    if not rows:
        shown = " ".join(attention.spellings)
        raise click.BadParameter(f"no token or word {wanted!r} among: {shown}", param_hint="'--token'")
    for row in rows:
        print_row(attention, row, top)


def _as_json(attention: "AttentionMap") -> dict[str, object]:
    if attention.role == "head_gates":
        from attnlens_cli.show.attention.gates import gates_as_json

        return _described(attention) | gates_as_json(attention)
    result = attention.result.attention[0]
    described = _described(attention)
    if result.unit_of_token is not None:
        described["units"] = [
            {"text": text, "tokens": list(tokens)}
            for text, tokens in zip(attention.names, attention.units, strict=True)
        ]
    if result.special_mass is not None:
        described["special_mass"] = result.special_mass[0, 0].tolist()
    if result.layout == "top_k":
        top = result.top_k
        return described | {
            "indices": top.indices[0, 0].tolist(),
            "weights": top.values[0, 0].tolist(),
            "rest": top.rest[0, 0].tolist(),
        }
    return described | {"weights": attention.weights.tolist()}


def _layers(attention: "AttentionMap") -> dict[str, object]:
    result = attention.result.attention[0]
    reduction = result.query.reduction
    if reduction is not None and reduction.joins_layers:
        return {"layers": list(result.layers), "layer_reduction": reduction.layers}
    return {"layer": attention.layer}


def _described(attention: "AttentionMap") -> dict[str, object]:
    result, texts = attention.result, attention.texts
    pair = {"text_pair": texts["second_text"]} if "second_text" in texts else {}
    return {
        "model": result.model,
        "model_version": result.model_version,
        "prompt": texts["prompt"],
        "text": texts["text"],
        **pair,
        **_layers(attention),
        "heads": list(result.attention[0].heads),
        "num_tokens": result.num_tokens,
        "num_tokens_total": result.num_tokens_total,
        "truncated": result.truncated,
        "tokens": [dataclasses.asdict(token) for token in result.tokens],
    }
