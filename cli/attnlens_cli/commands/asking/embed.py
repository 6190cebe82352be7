"""`attnlens embed`: embed the lines of a file with concurrent calls and bounded memory."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import asyncio
import os
import sys
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnlens_cli.commands.options import (
    EMBEDDING_TYPES,
    batch_size_option,
    check_version,
    data_type_option,
    input_format_option,
    reading_options,
    text_failure,
    vector_options,
)
from attnlens_cli.files.output_file import check_is_other, checked_path, replacing
from attnlens_cli.files.text_lines import STDIO, Batches, InputFile, Line, input_file
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.frame.server import ServerOptions, server_options
from attnlens_cli.show.progress import Counts, TextProgress, shown_progress

if TYPE_CHECKING:
    from attnlens_cli.files.writers import VectorWriter
    from attnlens_client import AsyncClient, Embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Input, output, concurrency, and arguments of the client's method."""

    input: InputFile
    output: str
    batch_size: int
    in_flight: int
    options: dict[str, Any]


class _TextFile(click.Path):
    """An existing file. The message for a missing file explains how to embed a single text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - as in click
        """Return the path."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            if os.path.exists(value):  # noqa: PTH110 - a text may be too long for pathlib
                raise
            hint = (
                "use a file with one text per line, or embed a single text with "
                "`attnlens encode TEXT --outputs embedding`"
            )
            raise click.BadParameter(f"{error.message.removesuffix('.')}: {hint}", ctx, param) from error


@click.command(
    cls=Command,
    epilog="""\b
Example:
  attnlens embed sentences.txt --address localhost:50051 --output vectors.npy
  zcat corpus.jsonl.gz | attnlens embed - --input-format jsonl --output - > vectors.jsonl""",
)
@click.argument("file", default=STDIO, type=_TextFile(exists=True, dir_okay=False, allow_dash=True))
@input_format_option
@reading_options
@vector_options
@in_section("Embedding")(
    "--normalize/--no-normalize",
    default=None,
    help="Scale embeddings to length 1.  [default: as configured for the model]",
)
@in_section("Output")(
    "--output",
    "-o",
    default=STDIO,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="File that ends in .npy or .jsonl; - writes JSON lines to standard output.  [default: -]",
)
@data_type_option
@in_section("Output")(
    "--embedding-type",
    type=click.Choice(EMBEDDING_TYPES),
    default="float",
    show_default=True,
    help="Quantization: one byte per component (int8, uint8; needs the ranges of a bundle), or one bit "
    "(binary, ubinary).",
)
@batch_size_option(128)
@in_section("Requests")(
    "--in-flight",
    type=click.IntRange(1, 1_024),
    default=8,
    show_default=True,
    help="Number of concurrent calls.",
)
@server_options
def embed(
    file: str,
    output: str,
    input_format: str,
    batch_size: int,
    in_flight: int,
    server: ServerOptions,
    **options: Any,  # noqa: ANN401 - arguments of the client's method
) -> None:
    """Embed each line of FILE. Without FILE or with -, read standard input.

    FILE contains one text per line, or JSON lines with the text under "text" and the second text of a pair
    under "text_pair". An empty line is an empty text, and blank JSON lines are skipped. Row i of an .npy file
    belongs to the i-th text. JSON output keeps the other keys of the input, such as "id". The output file
    appears only when it is complete.
    """
    if output != STDIO:
        checked_path(output, "--output", (".npy", ".jsonl"))
        check_is_other(output, file)
    settings = _Settings(
        input=input_file(file, input_format),
        output=output,
        batch_size=batch_size,
        in_flight=in_flight,
        options=options,
    )
    if output == STDIO and sys.stdout is None:
        raise click.UsageError("standard output is closed: use --output")
    if file == STDIO and sys.stdin.isatty():
        click.echo("Reading standard input, one text per line. Ctrl-D ends it.", err=True)
    counts = asyncio.run(_run(settings, server))
    target = "" if output == STDIO else f" -> {output}"
    click.echo(f"{counts.summary()}{target}", err=True)


async def _run(settings: _Settings, server: ServerOptions) -> Counts:
    from attnlens_cli.files.writers import EMBED_KEYS, JsonlWriter, NpyWriter
    from attnlens_client import AsyncClient

    connection = server.client_settings()
    client_options: dict[str, Any] = {"batch_size": settings.batch_size, "priority": "bulk"}
    async with AsyncClient(server.address, **client_options, **connection) as client:
        model = await client.get_model(server.model)
        settings.options["model"] = model.name  # all calls must use the same model
        try:
            like = await client.embed_with_usage([], **settings.options)  # (0, D)
        except ValueError as error:  # an invalid option
            raise click.UsageError(str(error)) from error
        with ExitStack() as stack:
            if settings.output == STDIO:
                target = sys.stdout.buffer
            else:
                target = stack.enter_context(replacing(Path(settings.output)))
            is_npy = settings.output.endswith(".npy")
            writer: VectorWriter = (NpyWriter if is_npy else JsonlWriter)(target, like.vectors)
            own_keys = None if is_npy else EMBED_KEYS
            batches = Batches(
                lambda: settings.input.lines(model.limits.max_text_bytes, own_keys), settings.batch_size
            )
            progress = stack.enter_context(shown_progress(settings.input.size_bytes))
            counts = Counts()
            with counts.added_to_failures():
                await _pump(settings, client, batches, writer, progress, counts, like)
            return counts


async def _pump(
    settings: _Settings,
    client: "AsyncClient",
    batches: Batches,
    writer: "VectorWriter",
    progress: TextProgress,
    counts: Counts,
    like: "Embeddings",
) -> None:
    """Send up to `in_flight` batches concurrently, and write results in input order.

    All embeddings must have the size and the model version of `like`.
    """
    from attnlens_client import BadReplyError

    running: deque[tuple[list[Line], asyncio.Task[Embeddings]]] = deque()

    def write(batch: list[Line], result: "Embeddings") -> None:
        size, expected = result.vectors.shape[1], like.vectors.shape[1]
        if size != expected:
            raise BadReplyError(
                f"the embedding size changed from {expected} to {size} components during the command"
            )
        check_version(result.model_version, like.model_version)
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


async def _embed(settings: _Settings, client: "AsyncClient", batch: list[Line]) -> "Embeddings":
    from attnlens_client import AttnlensError

    try:
        return await client.embed_with_usage([line.text for line in batch], **settings.options)
    except AttnlensError as error:
        if error.text_index is None or error.text_index >= len(batch):
            raise
        line_name = f"{settings.input.name}, line {batch[error.text_index].number}"
        raise text_failure(error, line_name) from error
