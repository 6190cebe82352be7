"""`attnlens attend`: show which tokens of a text attend to which."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import (
    checked_index,
    prompt_text,
    reading_options,
    single_input,
    text_pair_option,
    too_long_explained,
    unit_options,
)
from attnlens_cli.files.output_file import checked_path
from attnlens_cli.frame.options import TEXT, Command, SingleOption, in_section
from attnlens_cli.frame.server import ServerOptions, server_options
from attnlens_cli.printable import printable_json

if TYPE_CHECKING:
    from attnlens_cli.show.attention_map import AttentionMap
    from attnlens_cli.show.picture import Scale
    from attnlens_client import AttentionQuery, ModelInfo
    from attnlens_client.arguments import RoleName

_WORDS = ("mean", "all")
_select, _output = in_section("Selection"), in_section("Output")


def _index_or_word(_: click.Context, parameter: click.Parameter, value: str | None) -> str | int | None:
    """Return an index, "mean" or "all"."""
    if value is None or value in _WORDS:
        return value
    try:
        return int(value)
    except ValueError as error:
        message = f"{value!r} is neither an integer nor 'mean' or 'all'"
        raise click.BadParameter(message, param=parameter) from error


def _complete_word(_: click.Context, _parameter: click.Parameter, start: str) -> list[str]:
    return [word for word in _WORDS if word.startswith(start)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """The requested weights. `layer` and `head` are None if the option was not given."""

    role: "RoleName"
    layer: str | int | None
    head: str | int | None
    rollout: bool
    words: bool
    no_special: bool
    top: int | None  # number of weights per row in JSON

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which every layer or head was requested. Gates always have all heads."""
        has_heads = self.head == "all" and self.role != "head_gates"
        return ("layers",) * (self.layer == "all") + ("heads",) * has_heads

    def check_usage(self) -> None:
        """Raise UsageError if options exclude each other."""
        if self.rollout and (self.layer is not None or self.head not in (None, "mean")):
            raise click.UsageError(
                "--rollout combines all layers and the mean of heads: omit --layer and --head"
            )
        is_reduced = self.rollout or self.words or self.no_special or self.layer == "mean"
        if self.role == "head_gates" and (is_reduced or self.head == "mean"):
            raise click.UsageError("--gates excludes --rollout, --words, --no-special and means")
        if self.role == "attention_composed" and (self.rollout or self.no_special):
            raise click.UsageError("--composed excludes --rollout and --no-special: its rows do not sum to 1")

    def query(self, model: "ModelInfo") -> "AttentionQuery":
        """Return the query for a model.

        Raises:
            click.BadParameter: The model lacks the role, layer or head.
        """
        from attnlens_client import AttentionQuery, AttentionReduction, TopK

        self._check_role(model)
        layer = -1 if self.layer is None else self.layer
        layers = heads = None  # all
        if isinstance(layer, int) and not self.rollout:
            layers = [checked_index("layer", layer, model.num_layers, model.name)]
        if isinstance(self.head, int):
            heads = [checked_index("head", self.head, model.num_heads, model.name)]
        reduction = AttentionReduction(
            level="words" if self.words else "tokens",
            special_tokens="drop" if self.no_special else "keep",
            layers="rollout" if self.rollout else "mean" if layer == "mean" else "none",
            form=None if self.top is None else TopK(self.top),
        )
        is_reduced = reduction != AttentionReduction()
        is_full = self.role == "head_gates" or self.head == "all"
        layouts = {output.layout for output in model.outputs if output.role == self.role}
        # Layers with different layouts can only be requested together as dense weights of each head.
        is_dense = self.layer == "all" and not is_reduced and bool(layouts - {"dense", "per_token"})
        return AttentionQuery(
            layers=layers,
            heads=heads,
            view="dense"
            if is_dense
            else "full"
            if is_full
            else "head_mean",  # the mean of a single head is that head
            role=self.role,
            reduction=reduction if is_reduced else None,
        )

    def _check_role(self, model: "ModelInfo") -> None:
        roles = list(dict.fromkeys(output.role for output in model.outputs if output.layer is not None))
        if self.role not in roles:
            option = "'--gates'" if self.role == "head_gates" else "'--composed'"
            raise click.BadParameter(f"{model.name} has only {', '.join(roles)}", param_hint=option)


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens attend "The animal didn't cross the street because it was too tired." --token it
  attnlens attend "It rained." --layer 3 --head 1 --image rain.png
  attnlens attend "It rained, so it was wet." --layer all --head all --image heads.svg
  attnlens attend "It was unbelievably wet." --words --no-special --layer mean
  attnlens attend "How did it get wet?" --text-pair "It rained." --layer 3""",
)
@click.argument("text", type=TEXT)
@text_pair_option
@reading_options
@_select(
    "--layer",
    cls=SingleOption,
    metavar="INDEX|mean|all",
    callback=_index_or_word,
    shell_complete=_complete_word,
    help="Layer index (negative indices count from the end), `mean` of all layers, or `all` layers."
    "  [default: -1]",
)
@_select(
    "--head",
    cls=SingleOption,
    metavar="INDEX|mean|all",
    callback=_index_or_word,
    shell_complete=_complete_word,
    help="Head index (negative indices count from the end), `mean` of all heads, or `all` heads."
    "  [default: mean]",
)
@_select("--rollout", is_flag=True, help="Show the rollout over all layers, for the mean of heads.")
@unit_options
@_select("--composed", is_flag=True, help="Show weights composed from several heads, if the model has them.")
@_select(
    "--gates", is_flag=True, help="Show how much each token uses each head, if the model has head gates."
)
@_output("--token", metavar="TOKEN|INDEX", help="Show what this token or word attends to, by weight.")
@_output("--top", type=click.IntRange(min=1), help="Number of largest weights to show per token.")
@_output("--json", "as_json", is_flag=True, help="Print one JSON object with tokens and all weights.")
@_output(
    "--image",
    metavar="FILE",
    help="Write a heat map (.png, .svg or .pdf), or a grid of heat maps for all layers or heads. Needs the "
    "extra `plot`.",
)
@_output(
    "--scale",
    type=click.Choice(["sqrt", "linear"]),
    default="sqrt",
    show_default=True,
    help="Color scale of --image; sqrt emphasizes small weights.",
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
    prompt_name: str | None,
    prompt: str | None,
    truncate: bool,
    **selected: Any,  # noqa: ANN401 - fields of _Selection
) -> None:
    """Show the attention weights of TEXT: rows are tokens, columns are the tokens they attend to.

    Each row sums to 1, except for composed weights. If the table does not fit the terminal, only the largest
    weights of each token are shown. For all layers or heads, each map is summarized in one line. Tokens of a
    prompt and of the second text of a pair are marked.
    """
    _check_output(token, top, image, composed=composed, gates=gates, as_json=as_json)
    path = checked_path(image, "--image", (".png", ".svg", ".pdf")) if image else None
    role: RoleName = "head_gates" if gates else "attention_composed" if composed else "attention_weights"
    selection = _Selection(role=role, top=top if as_json else None, **selected)
    selection.check_usage()
    if selection.axes and top is not None and token is None and not as_json:
        raise click.UsageError("--top with 'all' needs --token or --json")
    options = {"prompt_name": prompt_name, "prompt": prompt, "truncate": truncate}
    attention = _fetch(text, text_pair, selection, server, options)
    if path:
        from attnlens_cli.show.picture import write_picture

        note = write_picture(attention, path, scale)
        click.echo(f"{path}: {attention.caption}{note}", err=True)
    if as_json:
        from attnlens_cli.show.as_json import attention_as_json

        click.echo(printable_json(attention_as_json(attention)))
    elif token is not None:
        _print_rows(attention, token, top)
    elif not path:
        _print_all(attention, top)


def _check_output(
    token: str | None, top: int | None, image: str | None, *, composed: bool, gates: bool, as_json: bool
) -> None:
    """Raise UsageError if options exclude each other."""
    if gates and (composed or token is not None or top is not None or image):
        raise click.UsageError("--gates excludes --composed, --token, --top and --image")
    if as_json and token is not None:
        raise click.UsageError("--json prints the weights of all tokens: omit --token")
    if as_json and top is not None and image:
        raise click.UsageError("--image draws all weights: omit --top, or one of --json and --image")
    if image and top is not None and token is None:
        raise click.UsageError("--top limits printed weights: with --image, it needs --token")


def _print_all(attention: "AttentionMap", top: int | None) -> None:
    from attnlens_cli.show.attention import print_gates, print_map, print_overview

    if attention.role == "head_gates":
        print_gates(attention)
    elif attention.axes:
        print_overview(attention)
    else:
        print_map(attention, top)


def _fetch(
    text: str,
    text_pair: str | None,
    selection: _Selection,
    server: ServerOptions,
    options: dict[str, Any],
) -> "AttentionMap":
    """Request the weights."""
    from attnlens_cli.show.attention_map import AttentionMap
    from attnlens_client import Client

    with Client(server.address, **server.client_settings()) as client:
        model = client.get_model(server.model)
        query = selection.query(model)
        inputs = [single_input(text, text_pair, model)]
        with too_long_explained({}, "TEXT" if text_pair is None else "TEXT with --text-pair"):
            [result] = client.encode(
                inputs, attention=query, last_hidden_state=False, model=model.name, **options
            )
    if not result.tokens:
        raise click.ClickException("TEXT has no tokens, and therefore no attention")
    prompt = prompt_text(model, options["prompt_name"], options["prompt"])
    texts = {"text": text, "prompt": prompt} | ({} if text_pair is None else {"second_text": text_pair})
    attention = AttentionMap(texts=texts, model=model, result=result, axes=selection.axes)
    if not attention.units:
        raise click.ClickException("TEXT has only special tokens: omit --no-special")
    return attention


def _print_rows(attention: "AttentionMap", name: str, top: int | None) -> None:
    from attnlens_cli.show.attention import print_row, print_rows

    rows = attention.find(name)
    if not rows:
        count = len(attention.names)
        if name.removeprefix("-").isdecimal():
            raise click.BadParameter(
                f"no token or word {name!r}: the indices are 0 to {count - 1}, or -{count} to -1",
                param_hint="'--token'",
            )
        shown = " ".join(attention.spellings)
        raise click.BadParameter(f"no token or word {name!r} among: {shown}", param_hint="'--token'")
    for row in rows:
        (print_rows if attention.axes else print_row)(attention, row, top)
