"""`attnlens embed`: turns the lines of a file into vectors, many calls at a time, in bounded memory."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import asyncio
import os
import sys
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import POOLINGS, check_prompt, dimensions_option, text_failure
from attnlens_cli.files.new_file import check_is_other, checked_path, replacing
from attnlens_cli.files.text_lines import STDIO, Batches, InputFile, Line, input_file
from attnlens_cli.frame.sections import SectionCommand, in_section
from attnlens_cli.frame.server_options import ServerOptions, server_options
from attnlens_cli.show.progress import Counts, TextProgress, shown_progress

if TYPE_CHECKING:
    from attnlens_cli.files.vector_files import VectorWriter
    from attnlens_client import AsyncClient, Embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to embed, how, and where to write it."""

    input: InputFile
    output: str
    batch_size: int
    in_flight: int
    options: dict[str, Any]


class _TextFile(click.Path):
    """A file that exists. The message says what to do with a text that is given in its place."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's own
        """Return the path."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            if os.path.exists(value):  # noqa: PTH110 - a text may be too long for pathlib
                raise
            hint = (
                "give a file with one text a line, or for one text `attnlens encode TEXT --outputs embedding`"
            )
            raise click.BadParameter(f"{error.message.removesuffix('.')}: {hint}", ctx, param) from error


_file = in_section("Files")
_read = in_section("What to read")
_vectors = in_section("Vectors")
_calls = in_section("Calls")


@click.command(
    cls=SectionCommand,
    epilog="""\b
Example:
  attnlens embed sentences.txt --address localhost:50051 --output vectors.npy
  zcat corpus.jsonl.gz | attnlens embed - --input-format jsonl --output - > vectors.jsonl""",
)
@click.argument("file", default=STDIO, type=_TextFile(exists=True, dir_okay=False, allow_dash=True))
@_file(
    "--output",
    "-o",
    default=STDIO,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="A name ending in .npy or .jsonl; - writes JSON lines to standard output.  [default: -]",
)
@_file(
    "--input-format",
    type=click.Choice(["auto", "lines", "jsonl"]),
    default="auto",
    show_default=True,
    help="auto: jsonl where FILE ends in .jsonl, else lines.",
)
@_vectors("--pooling", type=click.Choice(POOLINGS), help="How to pool tokens.  [default: the model's]")
@_vectors(
    "--normalize/--no-normalize", default=None, help="Scale vectors to length 1.  [default: the model's]"
)
@_read("--prompt-name", help="Put this prompt of the model before each text.  [default: the model's]")
@_read("--prompt", metavar="TEXT", help="Put TEXT before each text; '' for no prompt at all.")
@dimensions_option("Vectors")
@_vectors(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="The element type.",
)
@_read("--truncate", is_flag=True, help="Cut texts that are too long; the default is to fail.")
@_calls(
    "--batch-size", type=click.IntRange(1, 65_536), default=128, show_default=True, help="Texts in one call."
)
@_calls("--in-flight", type=click.IntRange(1, 1_024), default=8, show_default=True, help="Calls at a time.")
@server_options
def embed(
    file: str,
    output: str,
    input_format: str,
    batch_size: int,
    in_flight: int,
    server: ServerOptions,
    **options: Any,  # noqa: ANN401 - each is an argument of `embed`
) -> None:
    """Turn each line of FILE (- or nothing: standard input) into a vector.

    FILE holds one text a line. An empty line is an empty text, so that row i belongs to line i. A file of
    JSON lines holds objects with the text under "text", and for a pair of texts that the model reads as one
    input the second one under "text_pair". JSON lines that are written keep the other keys, such as "id". An
    .npy file has a row for each line; of JSON lines, for each that is not blank. The output appears under its
    name only when it is complete.
    """
    check_prompt(options["prompt_name"], options["prompt"])
    if output != STDIO:
        checked_path(output, "--output", (".npy", ".jsonl"))
        check_is_other(output, file)
    settings = Settings(
        input=input_file(file, input_format),
        output=output,
        batch_size=batch_size,
        in_flight=in_flight,
        options=options,
    )
    if output == STDIO and sys.stdout is None:
        raise click.UsageError("standard output is closed: give --output")
    if file == STDIO and sys.stdin.isatty():
        click.echo("Reading standard input, one text a line. Ctrl-D ends it.", err=True)
    counts = asyncio.run(_run(settings, server))
    target = "" if output == STDIO else f" -> {output}"
    click.echo(f"{counts.summary()}{target}", err=True)


async def _run(settings: Settings, server: ServerOptions) -> Counts:
    from attnlens_cli.files.vector_files import JSONL_KEYS, JsonlWriter, NpyWriter
    from attnlens_client import AsyncClient

    connection = server.client_settings()
    async with AsyncClient(server.address, batch_size=settings.batch_size, **connection) as client:
        model = await client.get_model(server.model)
        settings.options["model"] = model.name  # another model at this address must not answer later calls
        try:
            like = await client.embed_with_usage([], **settings.options)  # (0, D)
        except ValueError as error:  # for instance a prompt that is not UTF-8
            raise click.UsageError(str(error)) from error
        with ExitStack() as stack:
            if settings.output == STDIO:
                target = sys.stdout.buffer
            else:
                target = stack.enter_context(replacing(Path(settings.output)))
            is_npy = settings.output.endswith(".npy")
            writer: VectorWriter = (NpyWriter if is_npy else JsonlWriter)(target, like.vectors)
            own_keys = None if is_npy else JSONL_KEYS
            batches = Batches(
                lambda: settings.input.lines(model.limits.max_text_bytes, own_keys), settings.batch_size
            )
            progress = stack.enter_context(shown_progress(settings.input.size_bytes))
            counts = Counts()
            with counts.told_by_failures():
                await _pump(settings, client, batches, writer, progress, counts, like)
            return counts


async def _pump(
    settings: Settings,
    client: "AsyncClient",
    batches: Batches,
    writer: "VectorWriter",
    progress: TextProgress,
    counts: Counts,
    like: "Embeddings",
) -> None:
    """Send batches, `in_flight` at a time, and write the results in the input's order, as they come.

    All of them must be as wide as those of `like`, and made by the same version of the model.
    """
    from attnlens_client import BadReplyError

    running: deque[tuple[list[Line], asyncio.Task[Embeddings]]] = deque()

    def write(batch: list[Line], result: "Embeddings") -> None:
        found, width = result.vectors.shape[1], like.vectors.shape[1]
        if found != width:
            raise BadReplyError(f"the reply is wrong: the embeddings are {found} wide now instead of {width}")
        if result.model_version != like.model_version:
            raise BadReplyError(
                f"the reply is wrong: the version of the model is {result.model_version!r} now instead of "
                f"{like.model_version!r}"
            )
        writer.write(batch, result.vectors)
        counts.texts += len(batch)
        counts.tokens += sum(usage.num_tokens for usage in result.usages)
        counts.truncated += sum(usage.truncated for usage in result.usages)
        progress(counts.texts, batch[-1].end_byte)

    reading: asyncio.Task[list[Line]] | None = asyncio.create_task(batches.next())
    try:
        while reading or running:
            awaited: list[asyncio.Task[Any]] = [task for _, task in running][:1]
            if reading and len(running) < settings.in_flight:
                awaited.append(reading)
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            while running and running[0][1].done():
                write(running[0][0], running[0][1].result())
                running.popleft()
            if reading and reading.done() and len(running) < settings.in_flight:
                batch = reading.result()
                reading = asyncio.create_task(batches.next()) if batch else None
                if batch:
                    running.append((batch, asyncio.create_task(_embed(settings, client, batch))))
    finally:
        tasks: list[asyncio.Task[Any]] = [task for _, task in running] + ([reading] if reading else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    writer.finish()


async def _embed(settings: Settings, client: "AsyncClient", batch: list[Line]) -> "Embeddings":
    """Embed one batch."""
    from attnlens_client import AttnlensError

    try:
        return await client.embed_with_usage([line.text for line in batch], **settings.options)
    except AttnlensError as error:
        if error.text_index is None or error.text_index >= len(batch):
            raise
        line_name = f"{settings.input.name}, line {batch[error.text_index].number}"
        raise text_failure(error, line_name) from error
