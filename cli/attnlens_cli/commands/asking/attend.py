"""`attnlens attend`: which tokens of a text attend to which."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import check_prompt, check_sendable
from attnlens_cli.files.new_file import checked_path
from attnlens_cli.frame.sections import SectionCommand, SingleOption, in_section
from attnlens_cli.frame.server_options import ServerOptions, server_options
from attnlens_cli.show.printable import printable_json

if TYPE_CHECKING:
    from attnlens_cli.show.attention.map import AttentionMap
    from attnlens_cli.show.pictures.style import Scale
    from attnlens_client import AttentionQuery, ModelInfo
    from attnlens_client.arguments import RoleName

_WORDS = ("mean", "all")
_read, _which, _show = in_section("What to read"), in_section("Which weights"), in_section("What to show")


def _number_or_word(_: click.Context, parameter: click.Parameter, value: str | None) -> str | int | None:
    """Return a number from either end, "mean", "all", or None where nothing was said."""
    if value is None or value in _WORDS:
        return value
    try:
        return int(value)
    except ValueError as error:
        text = f"{value!r} is neither a whole number nor 'mean' or 'all'"
        raise click.BadParameter(text, param=parameter) from error


def _complete_word(_: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
    return [word for word in _WORDS if word.startswith(start)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Which:
    """Which weights are asked for: numbers as they were given, None where nothing was said."""

    role: "RoleName"
    layer: str | int | None
    head: str | int | None
    rollout: bool
    words: bool
    no_special: bool
    top: int | None  # of each row, for JSON

    @property
    def axes(self) -> tuple[str, ...]:
        """Of what each is asked for by itself: layers, heads. Gates always are of each head."""
        has_heads = self.head == "all" and self.role != "head_gates"
        return ("layers",) * (self.layer == "all") + ("heads",) * has_heads


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens attend "The animal didn't cross the street because it was too tired." --token it
  attnlens attend "It rained." --layer 3 --head 1 --image rain.png
  attnlens attend "It rained, so it was wet." --layer all --head all --image heads.svg
  attnlens attend "It was unbelievably wet." --words --no-special --layer mean
  attnlens attend "How did it get wet?" --text-pair "It rained." --layer 3""",
)
@click.argument("text")
@_read(
    "--text-pair", metavar="TEXT", help="A second text, which the model reads with the first as one input."
)
@_read("--prompt-name", help="Put this prompt of the model before TEXT.  [default: the model's]")
@_read("--prompt", metavar="TEXT", help="Put TEXT before it; '' for no prompt at all.")
@_read("--truncate", is_flag=True, help="Cut a text that is too long; the default is to fail.")
@_which(
    "--layer",
    cls=SingleOption,
    metavar="NUMBER|mean|all",
    callback=_number_or_word,
    shell_complete=_complete_word,
    help="The layer, from 0; negative numbers count from the end; the mean of all, or each.  [default: -1]",
)
@_which(
    "--head",
    cls=SingleOption,
    metavar="NUMBER|mean|all",
    callback=_number_or_word,
    shell_complete=_complete_word,
    help="The head, from 0; negative counts from the end; the mean of all, or each.  [default: mean]",
)
@_which("--rollout", is_flag=True, help="The rollout of all layers, of the mean of heads.")
@_which("--words", is_flag=True, help="Put the tokens of each word together.")
@_which("--no-special", is_flag=True, help="Leave special tokens out, and let each row sum to 1 again.")
@_which("--composed", is_flag=True, help="Weights as composed of several heads, if there are any.")
@_which("--gates", is_flag=True, help="How much each token uses each head, where the model has gates.")
@_show("--token", metavar="TOKEN|NUMBER", help="What this token or word attends to, sorted by weight.")
@_show("--top", type=click.IntRange(min=1), help="This many of the largest weights of each token only.")
@_show("--json", "as_json", is_flag=True, help="Print one JSON object with tokens and all weights.")
@_show(
    "--image",
    metavar="FILE",
    help="Write a heat map, .png, .svg or .pdf, or a grid of them where all layers or heads are asked for; "
    "needs the extra `plot`.",
)
@_show(
    "--scale",
    type=click.Choice(["sqrt", "linear"]),
    default="sqrt",
    show_default=True,
    help="How --image turns weights into colours; sqrt shows small ones.",
)
@server_options
def attend(
    text: str,
    text_pair: str | None,
    token: str | None,
    top: int | None,
    composed: bool,
    gates: bool,
    as_json: bool,
    image: str | None,
    scale: "Scale",
    server: ServerOptions,
    **options: Any,  # noqa: ANN401 - of reading and of which weights
) -> None:
    """Show the attention weights of TEXT: rows are tokens, columns are what they attend to.

    Each row sums to 1, except of composed weights. Where the table does not fit the terminal, the largest
    weights of each token are shown. Of all layers or heads, each gets a line. Tokens of a prompt and of the
    second text of a pair are marked.
    """
    reading = {name: options.pop(name) for name in ("prompt_name", "prompt", "truncate")}
    check_sendable(
        {
            "TEXT": text,
            "--text-pair": text_pair,
            "--prompt": reading["prompt"],
            "--prompt-name": reading["prompt_name"],
        }
    )
    check_prompt(reading["prompt_name"], reading["prompt"])
    _check_shape(token, top, image, composed=composed, gates=gates, as_json=as_json)
    path = checked_path(image, "--image", (".png", ".svg", ".pdf")) if image else None
    role: RoleName = "head_gates" if gates else "attention_composed" if composed else "attention_weights"
    which = _Which(role=role, top=top if as_json else None, **options)
    _check_reduction(which)
    if which.axes and top is not None and token is None and not as_json:
        raise click.UsageError("--top goes with 'all' where --token or --json is given")
    attention = _fetch(text, text_pair, which, server, reading)
    if path:
        from attnlens_cli.show.pictures.picture import write_picture

        note = write_picture(attention, path, scale)
        click.echo(f"{path}: {attention.caption}{note}", err=True)
    if as_json:
        from attnlens_cli.show.attention.as_json import attention_as_json

        click.echo(printable_json(attention_as_json(attention)))
    elif token is not None:
        _print_rows(attention, token, top)
    elif not path:
        _print_all(attention, top)


def _check_shape(
    token: str | None, top: int | None, image: str | None, *, composed: bool, gates: bool, as_json: bool
) -> None:
    """Refuse options that do not go together."""
    if gates and (composed or token is not None or top is not None or image):
        raise click.UsageError("--gates goes without --composed, --token, --top and --image")
    if as_json and token is not None:
        raise click.UsageError("--json prints the weights of all tokens: leave out --token")
    if as_json and top is not None and image:
        raise click.UsageError("--image draws all weights: with --json leave out --top")
    if image and top is not None and token is None:
        raise click.UsageError("--top is for what is printed: with --image it needs --token")


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
    elif attention.axes:
        from attnlens_cli.show.attention.overview import print_overview

        print_overview(attention)
    else:
        from attnlens_cli.show.attention.text import print_map

        print_map(attention, top)


def _fetch(
    text: str,
    text_pair: str | None,
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
        if text_pair is not None and not model.supports_text_pairs:
            raise click.BadParameter(f"{model.name} takes no pairs of texts", param_hint="'--text-pair'")
        query = _query(which, model)
        given = text if text_pair is None else (text, text_pair)
        try:
            [result] = client.encode(
                [given], attention=query, last_hidden_state=False, model=model.name, **options
            )
        except InputTooLongError as error:
            what = "TEXT has" if text_pair is None else "the two texts have"
            raise click.ClickException(
                f"{what} {error.num_tokens} tokens, the model takes {error.max_tokens}: shorten "
                f"{'it' if text_pair is None else 'them'}, or give --truncate"
            ) from error
    if not result.tokens:
        raise click.ClickException("TEXT has no tokens, and so no attention")
    prompt = options["prompt"]
    if prompt is None:
        prompt = model.prompts.get(options["prompt_name"] or model.default_prompt_name, "")
    texts = {"text": text, "prompt": prompt} | ({} if text_pair is None else {"second_text": text_pair})
    attention = AttentionMap(texts=texts, model=model, result=result, axes=which.axes)
    if not attention.units:
        raise click.ClickException("TEXT has special tokens alone: leave out --no-special")
    return attention


def _query(which: _Which, model: "ModelInfo") -> "AttentionQuery":
    from attnlens_client import AttentionQuery, AttentionReduction, TopK

    layer = -1 if which.layer is None else which.layer
    layers = None  # all
    if isinstance(layer, int) and not which.rollout:
        _check_number("layer", layer, model.num_layers, model.name)
        layers = [layer % model.num_layers]
    heads = None
    if isinstance(which.head, int):
        _check_number("head", which.head, model.num_heads, model.name)
        heads = [which.head % model.num_heads]
    reduction = AttentionReduction(
        level="words" if which.words else "tokens",
        special_tokens="drop" if which.no_special else "keep",
        layers="rollout" if which.rollout else "mean" if layer == "mean" else "none",
        form=None if which.top is None else TopK(which.top),
    )
    is_full = which.role == "head_gates" or which.head == "all"
    layouts = {output.layout for output in model.outputs if output.role == which.role}
    # Layers that are laid out in different ways come together only as dense weights, and as each head.
    is_mixed = (
        which.layer == "all" and reduction == AttentionReduction() and bool(layouts - {"dense", "per_token"})
    )
    return AttentionQuery(
        layers=layers,
        heads=heads,
        view="dense" if is_mixed else "full" if is_full else "head_mean",  # of one head: that head
        role=which.role,
        reduction=None if reduction == AttentionReduction() else reduction,
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
    from attnlens_cli.show.attention.overview import print_rows
    from attnlens_cli.show.attention.text import print_row

    rows = attention.find(wanted)
    if not rows:
        count = len(attention.names)
        if wanted.removeprefix("-").isdecimal():
            raise click.BadParameter(
                f"no token or word {wanted!r}: the numbers are 0 to {count - 1}, or -{count} to -1",
                param_hint="'--token'",
            )
        shown = " ".join(attention.spellings)
        raise click.BadParameter(f"no token or word {wanted!r} among: {shown}", param_hint="'--token'")
    for row in rows:
        (print_rows if attention.axes else print_row)(attention, row, top)
