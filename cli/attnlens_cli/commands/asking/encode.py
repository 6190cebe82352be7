"""`attnlens encode`: writes all that a model computes of texts."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import text_failure
from attnlens_cli.commands.text_options import Texts, text_options
from attnlens_cli.files.new_file import check_is_other, checked_path, replacing
from attnlens_cli.files.text_lines import STDIO, Line
from attnlens_cli.frame.sections import SectionCommand
from attnlens_cli.frame.server_options import ServerOptions, server_options
from attnlens_cli.show.progress import Counts, TextProgress, shown_progress

if TYPE_CHECKING:
    from attnlens_cli.files.encoded_files import EncodedWriter
    from attnlens_client import AttentionQuery, Client, Embeddings, ModelInfo, TextPart

ROLES = {
    "attention": "attention_weights",
    "attention_composed": "attention_composed",
    "head_gates": "head_gates",
}
"""The names of outputs of layers, and the role that the client knows each by."""
NAMES = ("embedding", "last_hidden_state", *ROLES)


def _names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return the names that are separated by commas. None: all that there is."""
    if value is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    unknown = next((name for name in names if name not in NAMES), None)
    if unknown is not None:
        raise click.BadParameter(f"{unknown!r} is none of {', '.join(NAMES)}")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Which:
    """What is asked for: names and numbers as they were given, None or nothing for all."""

    names: tuple[str, ...] | None
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    words: bool
    no_special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to ask for, by the names of the output."""

    embedding: bool
    last_hidden_state: bool
    queries: "dict[str, AttentionQuery]"


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens encode "It rained." --output rain.npz
  attnlens encode "It rained." --outputs attention --layer -1 --words --no-special
  attnlens encode --input texts.jsonl --outputs embedding,last_hidden_state -o vectors.npz""",
)
@text_options
@click.option(
    "--output",
    "-o",
    default=STDIO,
    metavar="FILE",
    help="A name ending in .npz, .jsonl or .json; - writes JSON lines to standard output.  [default: -]",
)
@click.option(
    "--outputs",
    metavar="NAME,...",
    callback=_names,
    help=f"Which of {', '.join(NAMES)}; tokens are always there. The embedding needs a second run "
    "of the model.  [default: all that the model has]",
)
@click.option(
    "--layer",
    "layers",
    type=int,
    multiple=True,
    help="A layer, from 0; negative numbers count from the end; may be given several times.  [default: all]",
)
@click.option(
    "--head",
    "heads",
    type=int,
    multiple=True,
    help="A head, from 0; negative counts from the end; may be given several times.  [default: all]",
)
@click.option("--words", is_flag=True, help="Put the tokens of each word together, in `attention`.")
@click.option(
    "--no-special",
    is_flag=True,
    help="Leave special tokens out of `attention`, and let each row sum to 1 again.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="The element type.",
)
@click.option("--truncate", is_flag=True, help="Cut texts that are too long; the default is to fail.")
@click.option(
    "--batch-size", type=click.IntRange(1, 65_536), default=8, show_default=True, help="Texts in one call."
)
@server_options
def encode(
    texts: Texts,
    output: str,
    outputs: tuple[str, ...] | None,
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    words: bool,
    no_special: bool,
    dtype: str,
    truncate: bool,
    batch_size: int,
    server: ServerOptions,
) -> None:
    """Write all that the model computes of TEXT, or of each line of --input FILE.

    That is its tokens, its embedding, the token vectors of the last layer, and the attention weights of every
    layer and head. Numbers come in a stream, so a reply may be of any size. The output appears under its
    name only when it is complete. docs/json_output.md lists the names in .npz and in JSON.
    """
    if output != STDIO:
        checked_path(output, "--output", (".npz", ".jsonl", ".json"))
        if texts.input is not None:
            check_is_other(output, texts.input)
    elif sys.stdout is None:
        raise click.UsageError("standard output is closed: give --output")
    file = texts.file
    if file is not None and output.endswith(".json"):
        raise click.BadParameter("several texts are JSON lines: end it in .jsonl", param_hint="'--output'")
    which = _Which(names=outputs, layers=layers, heads=heads, words=words, no_special=no_special)
    options = {**texts.prompts, "truncate": truncate, "dtype": dtype}
    from attnlens_client import Client

    counts = Counts()
    with (
        Client(server.address, batch_size=batch_size, **server.client_settings()) as client,
        ExitStack() as stack,
    ):
        model = client.get_model(server.model)
        options["model"] = model.name  # another model at this address must not answer later calls
        work = _Work(client, model, texts, _plan(which, model), options, counts)
        writer = _open(output, stack)
        progress = stack.enter_context(shown_progress(file.size_bytes if file else None))
        with counts.told_by_failures():
            work.run(writer, batch_size, progress)
    if file is not None or output != STDIO:
        click.echo(f"{counts.summary()}{'' if output == STDIO else f' -> {output}'}", err=True)


def _open(output: str, stack: ExitStack) -> "EncodedWriter":
    from attnlens_cli.files.encoded_files import JsonWriter, npz_writer

    if output == STDIO:
        return JsonWriter(sys.stdout.buffer)
    file = stack.enter_context(replacing(Path(output)))
    return stack.enter_context(npz_writer(file)) if output.endswith(".npz") else JsonWriter(file)


def _plan(which: _Which, model: "ModelInfo") -> _Plan:
    """Return what to ask for.

    Raises:
        click.BadParameter: the model lacks it.
    """
    from attnlens_client import AttentionQuery, AttentionReduction

    reduction = AttentionReduction(
        level="words" if which.words else "tokens", special_tokens="drop" if which.no_special else "keep"
    )
    layers = [_checked("layer", layer, model.num_layers, model.name) for layer in which.layers]
    heads = [_checked("head", head, model.num_heads, model.name) for head in which.heads]
    queries = {}
    for name, role in ROLES.items():
        found = [each.layer for each in model.outputs if each.role == role and each.layer is not None]
        chosen = [layer for layer in dict.fromkeys(layers or sorted(found)) if layer in found]
        if which.names is not None and name not in which.names:
            continue
        if not chosen and which.names is not None:
            raise click.BadParameter(f"{model.name} has no {name} in these layers", param_hint="'--outputs'")
        if chosen:
            is_reduced = name == "attention" and reduction != AttentionReduction()
            queries[name] = AttentionQuery(
                layers=chosen,
                heads=list(dict.fromkeys(heads)) or None,
                role=role,  # type: ignore[arg-type]  # a name of ROLES
                reduction=reduction if is_reduced else None,
            )
    return _Plan(
        embedding=which.names is None or "embedding" in which.names,
        last_hidden_state=which.names is None or "last_hidden_state" in which.names,
        queries=queries,
    )


def _checked(kind: str, number: int, count: int, model_name: str) -> int:
    if not -count <= number < count:
        raise click.BadParameter(
            f"{number}: {model_name} has the {kind}s 0 to {count - 1}, or -{count} to -1",
            param_hint=f"'--{kind}'",
        )
    return number % count


@dataclass(slots=True, eq=False)
class _Work:
    """What is asked of one server, and how much of it is done."""

    client: "Client"
    model: "ModelInfo"
    texts: Texts
    plan: _Plan
    options: dict[str, Any]
    counts: Counts

    def run(self, writer: "EncodedWriter", batch_size: int, progress: TextProgress) -> None:
        """Write all texts."""
        from attnlens_cli.files.encoded_files import OWN_KEYS
        from attnlens_client import AttnlensError

        for batch in self.texts.batches(batch_size, self.model, OWN_KEYS):
            try:
                self._write(writer, batch, progress)
            except AttnlensError as error:
                if error.text_index is None or error.text_index >= len(batch):
                    raise
                raise text_failure(error, self.texts.name_of(batch[error.text_index])) from error

    def _write(self, writer: "EncodedWriter", batch: list[Line], progress: TextProgress) -> None:
        """Ask for the texts of one batch, and write each as its layers come."""
        from attnlens_client import TextPart

        given = [line.text for line in batch]
        embeddings = self.client.embed_with_usage(given, **self.options) if self.plan.embedding else None
        names = list(self.plan.queries)
        # Where only embeddings are asked for, the stream brings the tokens, and needs something to bring.
        wants_states = self.plan.last_hidden_state or not names
        parts = self.client.encode_stream_parts(
            given, attention=list(self.plan.queries.values()), last_hidden_state=wants_states, **self.options
        )
        first, line = self.counts.texts, None
        for part in parts:
            if isinstance(part, TextPart):
                self._ended(writer, line, progress)
                line = batch[part.input_index]
                self._begin(writer, line, part, embeddings, first + part.input_index)
            else:
                name = names[part.query_index]
                writer.add(name, self.plan.queries[name].layers or (), part)
        self._ended(writer, line, progress)

    def _begin(
        self,
        writer: "EncodedWriter",
        line: Line,
        part: "TextPart",
        embeddings: "Embeddings | None",
        index: int,
    ) -> None:
        from attnlens_cli.files.encoded_files import Text

        encoded, arrays = part.text, {}
        self._check_version(encoded.model_version)
        if embeddings is not None:
            self._check_version(embeddings.model_version)
            arrays["embedding"] = embeddings.vectors[part.input_index]
        if self.plan.last_hidden_state and encoded.last_hidden_state is not None:
            arrays["last_hidden_state"] = encoded.last_hidden_state
        number = None if self.texts.file is None else index
        writer.begin(Text(number, line, self.texts.prompt_of(self.model), encoded, arrays))
        self.counts.tokens += encoded.num_tokens
        self.counts.truncated += encoded.truncated

    def _ended(self, writer: "EncodedWriter", line: Line | None, progress: TextProgress) -> None:
        if line is not None:
            writer.end()
            self.counts.texts += 1
            progress(self.counts.texts, line.end_byte)

    def _check_version(self, found: str) -> None:
        from attnlens_client import BadReplyError

        if found != self.model.version:
            raise BadReplyError(
                f"the reply is wrong: the version of the model is {found!r} now instead of "
                f"{self.model.version!r}"
            )
