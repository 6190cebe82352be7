"""`attnlens embed`: the lines of a file become vectors, many calls at a time, in bounded memory."""
# ruff: noqa: PLC0415 - heavy imports belong into the command, so that `attnlens --help` is fast

import asyncio
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from attnlens_cli.new_file import checked_path, replacing
from attnlens_cli.progress import Progress, shown_progress
from attnlens_cli.server_options import Server, server_options
from attnlens_cli.text_lines import Line, batches, read_lines

if TYPE_CHECKING:
    from attnlens_cli.vector_files import VectorWriter
    from attnlens_client import AsyncClient, Embeddings, EmbedOptions

_STDIO = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to embed, where to, and how."""

    input: str
    output: str
    is_jsonl: bool
    batch_size: int
    in_flight: int
    options: "EmbedOptions"


@dataclass(slots=True)
class Counts:
    """What has been done so far."""

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    started: float = field(default_factory=time.monotonic)

    def summary(self) -> str:
        """Return one line for the end."""
        seconds = time.monotonic() - self.started
        cut = f", {self.truncated:,} of them truncated" if self.truncated else ""
        rate = f"{self.texts / seconds:,.0f} texts/s" if seconds else ""
        return f"{self.texts:,} texts{cut}, {self.tokens:,} tokens in {seconds:.1f} s ({rate})"


@click.command(
    epilog="""\b
Example:
  attnlens embed sentences.txt --address localhost:50051 --output vectors.npy
  zcat corpus.jsonl.gz | attnlens embed - --input-format jsonl --output - > vectors.jsonl"""
)
@click.argument("file", default=_STDIO, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option(
    "--output",
    "-o",
    default=_STDIO,
    type=click.Path(dir_okay=False, allow_dash=True),
    help="A name ending in .npy or .jsonl; - writes JSON lines to standard output.  [default: -]",
)
@click.option(
    "--input-format",
    type=click.Choice(["auto", "lines", "jsonl"]),
    default="auto",
    show_default=True,
    help="auto: jsonl where FILE ends in .jsonl, else lines.",
)
@click.option(
    "--pooling", type=click.Choice(["mean", "cls", "max"]), help="How to pool tokens.  [default: the model's]"
)
@click.option(
    "--normalize/--no-normalize", default=None, help="Scale vectors to length 1.  [default: the model's]"
)
@click.option("--dimensions", type=click.IntRange(min=1), help="Keep the first components only.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="The element type.",
)
@click.option("--truncate", is_flag=True, help="Cut texts that are too long; the default is to fail.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=128, show_default=True, help="Texts in one call."
)
@click.option(
    "--in-flight", type=click.IntRange(min=1), default=8, show_default=True, help="Calls at a time."
)
@server_options
def embed(
    file: str,
    output: str,
    input_format: str,
    batch_size: int,
    in_flight: int,
    server: Server,
    **options: Any,  # noqa: ANN401 - each is an entry of EmbedOptions
) -> None:
    """Turn each line of FILE (- or nothing: standard input) into a vector.

    FILE holds one text a line, an empty line being an empty text, so that row i belongs to line i; or,
    as JSON lines, objects with the text under "text". The output appears under its name only when it
    is complete.
    """
    if output != _STDIO:
        checked_path(output, "--output", (".npy", ".jsonl"))
    job = Job(
        input=file,
        output=output,
        is_jsonl=input_format == "jsonl" or (input_format == "auto" and file.lower().endswith(".jsonl")),
        batch_size=batch_size,
        in_flight=in_flight,
        options=cast("EmbedOptions", {**options, "model": server.model}),
    )
    counts = asyncio.run(_run(job, server))
    target = "" if output == _STDIO else f" -> {output}"
    click.echo(f"{counts.summary()}{target}", err=True)


async def _run(job: Job, server: Server) -> Counts:
    from attnlens_cli.vector_files import JsonlWriter, NpyWriter
    from attnlens_client import AsyncClient

    settings = server.client_settings()
    async with AsyncClient(server.address, batch_size=job.batch_size, **settings) as client:
        like = await client.embed([], **job.options)  # (0, D)
        with ExitStack() as stack:
            source = stack.enter_context(_opened(job.input))
            if job.output == _STDIO:
                target = sys.stdout.buffer
            else:
                target = stack.enter_context(replacing(Path(job.output)))
            is_npy = job.output.endswith(".npy")
            writer: VectorWriter = NpyWriter(target, like) if is_npy else JsonlWriter(target, like)
            lines = read_lines(source, _name(job.input), is_jsonl=job.is_jsonl)
            progress = stack.enter_context(shown_progress(_size(job.input)))
            return await _pump(job, client, lines, writer, progress)


async def _pump(
    job: Job, client: "AsyncClient", lines: Iterator[Line], writer: "VectorWriter", progress: Progress
) -> Counts:
    """Send batches, `in_flight` at a time, and write the results in the order of the input."""
    counts = Counts()
    running: deque[tuple[list[Line], asyncio.Task[Embeddings]]] = deque()

    async def write_oldest() -> None:
        batch, task = running[0]
        result = await task
        running.popleft()
        writer.write([line.text for line in batch], result.vectors)
        counts.texts += len(batch)
        counts.tokens += sum(usage.num_tokens for usage in result.usages)
        counts.truncated += sum(usage.truncated for usage in result.usages)
        progress.advance(counts.texts, batch[-1].end_byte)

    pending = batches(lines, job.batch_size)
    try:
        while batch := await asyncio.to_thread(next, pending, None):  # standard input may keep us waiting
            if len(running) == job.in_flight:
                await write_oldest()
            running.append((batch, asyncio.create_task(_embed(job, client, batch))))
        while running:
            await write_oldest()
    finally:
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
    writer.finish()
    return counts


async def _embed(job: Job, client: "AsyncClient", batch: list[Line]) -> "Embeddings":
    """Embed one batch; a text that is refused is named by its line."""
    from attnlens_client import AttnlensError

    try:
        return await client.embed_with_usage([line.text for line in batch], **job.options)
    except AttnlensError as error:
        if error.text_index is None:
            raise
        where = f"{_name(job.input)}, line {batch[error.text_index].number}"
        message = error.message.replace(f"texts[{error.text_index}]", where)
        raise click.ClickException(message.replace("set truncate", "give --truncate")) from error


def _opened(name: str) -> AbstractContextManager[BinaryIO]:
    if name == _STDIO:
        return nullcontext(sys.stdin.buffer)
    return Path(name).open("rb")


def _size(name: str) -> int | None:
    return None if name == _STDIO or not Path(name).is_file() else Path(name).stat().st_size


def _name(name: str) -> str:
    return "standard input" if name == _STDIO else name
