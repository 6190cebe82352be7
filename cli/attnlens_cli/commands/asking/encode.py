"""`attnlens encode`: write all model outputs for texts."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import (
    Texts,
    batch_size_option,
    check_version,
    checked_index,
    data_type_option,
    prompt_text,
    text_failure,
    text_options,
    truncate_option,
    unit_options,
)
from attnlens_cli.files.output_file import check_is_other, checked_path, replacing
from attnlens_cli.files.text_lines import STDIO, Line
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.frame.server import ServerOptions, server_options
from attnlens_cli.show.progress import Counts, TextProgress, shown_progress

if TYPE_CHECKING:
    from attnlens_cli.files.writers import EncodedWriter
    from attnlens_client import AttentionQuery, Client, Embeddings, ModelInfo, TextPart

ROLES = {
    "attention": "attention_weights",
    "attention_composed": "attention_composed",
    "head_gates": "head_gates",
}
"""Roles of the outputs with a layer axis, keyed by their name in --outputs."""
NAMES = ("embedding", "last_hidden_state", *ROLES)


def _names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Split a comma-separated list of names."""
    if value is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in value.split(",")))
    unknown = next((name for name in names if name not in NAMES), None)
    if unknown is not None:
        raise click.BadParameter(f"{unknown!r} is not one of {', '.join(NAMES)}")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """Requested outputs. To select all, `names` is None, and `layers` and `heads` are empty."""

    names: tuple[str, ...] | None
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    words: bool
    no_special: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Requests for a model. Queries are keyed by output name."""

    embedding: bool
    last_hidden_state: bool
    queries: "dict[str, AttentionQuery]"


_select, _output = in_section("Selection"), in_section("Output")


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens encode "It rained." --output rain.npz
  attnlens encode "It rained." --outputs attention --layer -1 --words --no-special
  attnlens encode --input texts.jsonl --outputs embedding,last_hidden_state -o vectors.npz""",
)
@text_options
@truncate_option
@_select(
    "--outputs",
    metavar="NAME,...",
    callback=_names,
    help=f"Outputs in addition to tokens: {', '.join(NAMES)}. The embedding needs a second run "
    "of the model.  [default: all outputs of the model]",
)
@_select(
    "--layer",
    "layers",
    metavar="INDEX",
    type=int,
    multiple=True,
    help="Layer index, starting at 0; negative indices count from the end. May be repeated.  [default: all]",
)
@_select(
    "--head",
    "heads",
    metavar="INDEX",
    type=int,
    multiple=True,
    help="Head index, starting at 0; negative indices count from the end. May be repeated.  [default: all]",
)
@unit_options
@_output(
    "--output",
    "-o",
    default=STDIO,
    metavar="FILE",
    help="Output file (.npz, .jsonl or .json); - writes JSON lines to standard output.  [default: -]",
)
@data_type_option
@batch_size_option(8)
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
    """Write all outputs of the model for TEXT, or for each line of --input FILE.

    The outputs are tokens, the embedding, the token vectors of the last layer, and the attention weights of
    every layer and head. Their total size is not limited. --words and --no-special apply to `attention`. The
    output file appears only when it is complete. docs/json_output.md lists the names in .npz and JSON.
    """
    if output != STDIO:
        checked_path(output, "--output", (".npz", ".jsonl", ".json"))
        if texts.input is not None:
            check_is_other(output, texts.input)
    elif sys.stdout is None:
        raise click.UsageError("standard output is closed: use --output")
    file = texts.file
    if file is not None and output.endswith(".json"):
        raise click.BadParameter(
            "--input produces JSON lines: use a file name that ends in .jsonl", param_hint="'--output'"
        )
    selection = _Selection(names=outputs, layers=layers, heads=heads, words=words, no_special=no_special)
    options = {**texts.prompts, "truncate": truncate, "dtype": dtype}
    from attnlens_client import Client

    counts = Counts()
    with (
        Client(server.address, batch_size=batch_size, **server.client_settings()) as client,
        ExitStack() as stack,
    ):
        model = client.get_model(server.model)
        options["model"] = model.name  # all calls must use the same model
        encoding = _Encoding(client, model, texts, _plan(selection, model), options, counts)
        writer = _open(output, stack)
        progress = stack.enter_context(shown_progress(file.size_bytes if file else None))
        with counts.added_to_failures():
            encoding.run(writer, batch_size, progress)
    if file is not None or output != STDIO:
        click.echo(f"{counts.summary()}{'' if output == STDIO else f' -> {output}'}", err=True)


def _open(output: str, stack: ExitStack) -> "EncodedWriter":
    from attnlens_cli.files.writers import JsonWriter, npz_writer

    if output == STDIO:
        return JsonWriter(sys.stdout.buffer)
    file = stack.enter_context(replacing(Path(output)))
    return stack.enter_context(npz_writer(file)) if output.endswith(".npz") else JsonWriter(file)


def _plan(selection: _Selection, model: "ModelInfo") -> _Plan:
    """Return the requests for a selection.

    Raises:
        click.BadParameter: The model lacks an output, layer or head.
    """
    from attnlens_client import AttentionQuery, AttentionReduction

    reduction = AttentionReduction(
        level="words" if selection.words else "tokens",
        special_tokens="drop" if selection.no_special else "keep",
    )
    layers = [checked_index("layer", layer, model.num_layers, model.name) for layer in selection.layers]
    heads = [checked_index("head", head, model.num_heads, model.name) for head in selection.heads]
    names, queries = selection.names, {}
    for name, role in ROLES.items():
        if names is not None and name not in names:
            continue
        available = [output.layer for output in model.outputs if output.role == role]
        available_layers = [layer for layer in available if layer is not None]
        selected = [
            layer for layer in dict.fromkeys(layers or sorted(available_layers)) if layer in available_layers
        ]
        if not selected and names is not None:
            raise click.BadParameter(f"{model.name} has no {name} in these layers", param_hint="'--outputs'")
        if selected:
            is_reduced = name == "attention" and reduction != AttentionReduction()
            queries[name] = AttentionQuery(
                layers=selected,
                heads=list(dict.fromkeys(heads)) or None,
                role=role,  # type: ignore[arg-type]  # a value of ROLES
                reduction=reduction if is_reduced else None,
            )
    return _Plan(
        embedding="embedding" in names if names is not None else not model.labels,  # classifiers have none
        last_hidden_state=names is None or "last_hidden_state" in names,
        queries=queries,
    )


@dataclass(slots=True, eq=False)
class _Encoding:
    """Requests the outputs of texts, writes them and counts the texts."""

    client: "Client"
    model: "ModelInfo"
    texts: Texts
    plan: _Plan
    options: dict[str, Any]
    counts: Counts

    def run(self, writer: "EncodedWriter", batch_size: int, progress: TextProgress) -> None:
        """Write all texts."""
        from attnlens_cli.files.writers import ENCODE_KEYS
        from attnlens_client import AttnlensError

        for batch in self.texts.batches(batch_size, self.model, ENCODE_KEYS):
            try:
                self._write(writer, batch, progress)
            except AttnlensError as error:
                if error.text_index is None or error.text_index >= len(batch):
                    raise
                raise text_failure(error, self.texts.name_of(batch[error.text_index])) from error

    def _write(self, writer: "EncodedWriter", batch: list[Line], progress: TextProgress) -> None:
        """Request one batch, and write each layer as it arrives."""
        from attnlens_client import TextPart

        inputs = [line.text for line in batch]
        embeddings = self.client.embed_with_usage(inputs, **self.options) if self.plan.embedding else None
        names = list(self.plan.queries)
        # The stream also provides the tokens. It must request an output even if only embeddings are written.
        has_hidden_state = self.plan.last_hidden_state or not names
        parts = self.client.encode_stream_parts(
            inputs,
            attention=list(self.plan.queries.values()),
            last_hidden_state=has_hidden_state,
            **self.options,
        )
        first, line = self.counts.texts, None
        for part in parts:
            if isinstance(part, TextPart):
                self._end(writer, line, progress)
                line = batch[part.input_index]
                self._begin(writer, line, part, embeddings, first + part.input_index)
            else:
                name = names[part.query_index]
                writer.add(name, self.plan.queries[name].layers or (), part)
        self._end(writer, line, progress)

    def _begin(
        self,
        writer: "EncodedWriter",
        line: Line,
        part: "TextPart",
        embeddings: "Embeddings | None",
        index: int,
    ) -> None:
        from attnlens_cli.files.writers import Text

        encoded, arrays = part.text, {}
        check_version(encoded.model_version, self.model.version)
        if embeddings is not None:
            check_version(embeddings.model_version, self.model.version)
            arrays["embedding"] = embeddings.vectors[part.input_index]
        if self.plan.last_hidden_state and encoded.last_hidden_state is not None:
            arrays["last_hidden_state"] = encoded.last_hidden_state
        row = None if self.texts.file is None else index
        prompt = prompt_text(self.model, **self.texts.prompts)
        writer.begin(Text(row, line, prompt, encoded, arrays))
        self.counts.tokens += encoded.num_tokens
        self.counts.truncated += encoded.truncated

    def _end(self, writer: "EncodedWriter", line: Line | None, progress: TextProgress) -> None:
        if line is not None:
            writer.end()
            self.counts.texts += 1
            progress(self.counts.texts, line.end_byte)
