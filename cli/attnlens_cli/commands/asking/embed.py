"""`attnlens embed`: embed the lines of a file, or files of any size in parts, in bounded memory."""
# ruff: noqa: PLC0415 - heavy imports belong in the command, so that `attnlens --help` is fast

import asyncio
import logging
import os
import re
import sys
import time
from collections import deque
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from attnlens_cli.commands.config_option import ENGINES, PRECISIONS, ConfigFailure, config_option
from attnlens_cli.commands.options import (
    EMBEDDING_TYPES,
    batch_size_option,
    check_version,
    data_type_option,
    reading_options,
    text_failure,
    vector_options,
)
from attnlens_cli.files.output_file import check_is_other, checked_path, replacing
from attnlens_cli.files.text_lines import STDIO, Batches, InputFile, Line, input_file
from attnlens_cli.frame.options import Command, in_section
from attnlens_cli.frame.server import ServerOptions, servers_options
from attnlens_cli.printable import counted, printable
from attnlens_cli.show.progress import Counts, TextProgress, shown_progress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from attnlens_bulk import Estimate, Report
    from attnlens_bulk import Progress as RunProgress
    from attnlens_cli.files.writers import VectorWriter
    from attnlens_client import AsyncClient, Embeddings, ModelInfo
    from attnlens_client.client import BlockingMethods
    from attnlens_server.in_process import Local


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Input, output, concurrency, and arguments of the client's method."""

    input: InputFile
    output: str
    batch_size: int
    in_flight: int
    options: dict[str, Any]


_RUN_OPTIONS = (
    "text_columns",
    "id_column",
    "keep",
    "vectors",
    "output_format",
    "rows_per_part",
    "shard",
    "bad_rows",
    "empty",
    "max_line_bytes",
    "patience_s",
    "dry_run",
)
_PROCESS_OPTIONS = ("engine", "precision", "threads")
_LINE_INTERVAL_S = 60.0

_run_option = in_section("Output directory")
_compute = partial(config_option, section="Without a server")


class _Shard(click.ParamType[tuple[int, int]]):
    """Index and number of shards, such as 0/4."""

    name = "shard"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - as in click
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[int, int]:
        """Return index and number."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", str(value))
        if match is None or int(match[1]) >= int(match[2]):
            self.fail(f"{value!r} is not I/N with an index I from 0 to N - 1, such as 0/4", param, ctx)
        return int(match[1]), int(match[2])


def _check_text_file(ctx: click.Context, name: str) -> None:
    """Raise click.BadParameter if an input is not a file. The message explains how to embed one text."""
    param = next(param for param in ctx.command.params if param.name == "inputs")
    try:
        click.Path(exists=True, dir_okay=False, allow_dash=True).convert(name, param, ctx)
    except click.BadParameter as error:
        if os.path.exists(name):  # noqa: PTH110 - a text may be too long for pathlib
            raise click.BadParameter(
                f"{error.message.removesuffix('.')}: to embed a directory, let --output end with /",
                ctx,
                param,
            ) from error
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
  zcat corpus.jsonl.gz | attnlens embed - --input-format jsonl --output - > vectors.jsonl
  attnlens embed passages.jsonl --bundle bundles/minilm --id id --output vectors/""",
)
@click.argument("inputs", metavar="[INPUT]...", nargs=-1)
@in_section("Input")(
    "--input-format",
    type=click.Choice(["auto", "lines", "jsonl", "csv", "tsv", "parquet", "arrow"]),
    default="auto",
    show_default=True,
    help="Format of all files. auto: by suffix, otherwise lines. Formats other than lines and jsonl need an "
    "output directory.",
)
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
    metavar="FILE|DIR/",
    help="File that ends in .npy or .jsonl, or a directory, or the URL of one that ends with /. - writes "
    "JSON lines to standard output.  [default: -]",
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
@_run_option(
    "--text-column",
    "text_columns",
    metavar="NAME",
    multiple=True,
    default=["text"],
    show_default=True,
    help="Column with the text. Several columns are joined by line breaks.",
)
@_run_option("--id", "id_column", metavar="NAME", help="Column to write as id.")
@_run_option("--keep", metavar="NAME", multiple=True, help="Further column to write. May be repeated.")
@_run_option(
    "--vectors",
    type=click.Choice(["embeddings", "tokens"]),
    default="embeddings",
    show_default=True,
    help="One embedding per text, or the last hidden state of each token (without --pooling, --dimensions, "
    "--normalize and --embedding-type).",
)
@_run_option(
    "--output-format",
    type=click.Choice(["parquet", "arrow", "npy", "jsonl"]),
    default="parquet",
    show_default=True,
    help="Format of the parts. npy contains embeddings alone.",
)
@_run_option(
    "--rows-per-part",
    type=click.IntRange(min=1),
    help="Input rows per part. Two parts are in memory, and an interruption loses up to two.  [default: "
    "32768; 1024 with --vectors tokens]",
)
@_run_option(
    "--shard",
    metavar="I/N",
    type=_Shard(),
    default="0/1",
    show_default=True,
    help="Compute only the parts I, I + N, I + 2N, ... One process per shard writes to the same directory.",
)
@_run_option(
    "--bad-rows",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="Rows without a valid text: end the command, or omit them and list them in rejected-*.jsonl.",
)
@_run_option(
    "--empty",
    type=click.Choice(["embed", "skip", "reject"]),
    default="embed",
    show_default=True,
    help="Rows whose text is empty or white space: embed them, omit and list them (and rows without a text) "
    "in rejected-*.jsonl, or treat them as bad rows.",
)
@_run_option(
    "--max-line-bytes",
    type=click.IntRange(min=1),
    default=64 << 20,
    show_default=True,
    help="Maximum size of a line of a text file, and of a record of CSV. A longer line is a bad row.",
)
@_run_option(
    "--patience",
    "patience_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=900.0,
    show_default=True,
    help="Time to wait for servers that do not answer, before the command ends. It can be continued.",
)
@_run_option("--dry-run", is_flag=True, help="Estimate duration and size from a sample. Write nothing.")
@batch_size_option(128)
@in_section("Requests")(
    "--in-flight",
    type=click.IntRange(1, 1_024),
    default=8,
    show_default=True,
    help="Number of concurrent calls per server.",
)
@in_section("Without a server")(
    "--bundle",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Run this bundle in the process of the command, instead of calling a server.",
)
@_compute("engine", "Engine that runs the bundle.", ENGINES)
@_compute("precision", "Precision of the bundle's embeddings.", PRECISIONS)
@_compute("threads", "Number of compute threads; 0: one per physical core.")
@servers_options
def embed(
    inputs: tuple[str, ...],
    output: str,
    input_format: str,
    batch_size: int,
    in_flight: int,
    bundle: str | None,
    server: ServerOptions,
    **options: Any,  # noqa: ANN401 - options of runs and bundles, and arguments of the client's method
) -> None:
    """Embed the texts of INPUT. Without INPUT or with -, read standard input.

    With an --output file, INPUT is a file with one text per line, or JSON lines with the text under "text"
    and the second text of a pair under "text_pair". An empty line is an empty text, and blank JSON lines are
    skipped. Row i of an .npy file belongs to the i-th text. JSON output keeps the other keys of the input,
    such as "id". The output file appears only when it is complete.

    With an --output directory, INPUT are files, directories, patterns or URLs of Parquet, Arrow, CSV, JSON
    lines or plain lines, also compressed. The output is written in parts. The same command continues an
    interrupted one.
    """
    ctx = click.get_current_context()
    run = {name: options.pop(name) for name in _RUN_OPTIONS}
    process = {name: options.pop(name) for name in _PROCESS_OPTIONS}
    calls = {"batch_size": batch_size, "in_flight": in_flight}
    if not bundle:
        _check_default(ctx, _PROCESS_OPTIONS, "--bundle, since a server has its own settings")
    models = _Models(server, None if bundle is None else Path(bundle), process, batch_size)
    if output.endswith("/") or Path(output).is_dir():
        run["input_format"] = None if input_format == "auto" else input_format
        _embed_files(inputs, output, models, run | calls, options)
        return
    _check_default(ctx, _RUN_OPTIONS, "an --output directory, which ends with /")
    file = _single_file(ctx, inputs, input_format)
    if output != STDIO:
        checked_path(output, "--output", (".npy", ".jsonl"))
        check_is_other(output, file)
    settings = _Settings(input=input_file(file, input_format), output=output, options=options, **calls)
    if output == STDIO and sys.stdout is None:
        raise click.UsageError("standard output is closed: use --output")
    if file == STDIO and sys.stdin.isatty():
        click.echo("Reading standard input, one text per line. Ctrl-D ends it.", err=True)
    counts = asyncio.run(_run(settings, models))
    target = "" if output == STDIO else f" -> {output}"
    click.echo(f"{counts.summary()}{target}", err=True)


def _check_default(ctx: click.Context, names: tuple[str, ...], needed: str) -> None:
    """Raise click.UsageError if one of these options is set."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        if param.name in names and source not in {ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP}:
            raise click.UsageError(f"{param.opts[0]} needs {needed}")


def _single_file(ctx: click.Context, inputs: tuple[str, ...], input_format: str) -> str:
    """Return the input for an output file."""
    if len(inputs) > 1:
        raise click.UsageError(
            f"{len(inputs)} inputs need an --output directory: let --output end with /, or give one input"
        )
    [name] = inputs or (STDIO,)
    _check_text_file(ctx, name)
    if input_format not in {"auto", "lines", "jsonl"}:
        raise click.UsageError(
            f"--input-format {input_format} needs an --output directory, which ends with /"
        )
    return name


@dataclass(frozen=True, slots=True)
class _Models:
    """A bundle in this process, or servers."""

    server: ServerOptions
    bundle: Path | None
    settings: dict[str, Any]
    batch_size: int

    @contextmanager
    def opened(self) -> "Iterator[list[BlockingMethods]]":
        """Yield a local model, or one client per server."""
        with ExitStack() as stack:
            if self.bundle is not None:
                yield [stack.enter_context(self._local())]
                return
            from attnlens_client import Client

            options: dict[str, Any] = {"batch_size": self.batch_size, "priority": "bulk"}
            options["max_attempts"] = 1  # the run itself retries, and reports what it waits for
            yield [
                stack.enter_context(Client(address, **options, **self.server.client_settings()))
                for address in self.server.addresses
            ]

    @asynccontextmanager
    async def opened_one(self) -> "AsyncIterator[AsyncClient | _AsyncLocal]":
        """Yield a model with asynchronous methods."""
        if self.bundle is not None:
            with self._local() as model:
                yield _AsyncLocal(model)
            return
        from attnlens_client import AsyncClient

        if len(self.server.addresses) > 1:
            raise click.UsageError("several addresses need an --output directory: let --output end with /")
        options: dict[str, Any] = {"batch_size": self.batch_size, "priority": "bulk"}
        async with AsyncClient(self.server.address, **options, **self.server.client_settings()) as client:
            yield client

    def _local(self) -> "Local":
        import attnlens_server
        from attnlens_server.config import ConfigError

        assert self.bundle is not None  # noqa: S101 - for mypy
        logging.getLogger("attnlens_server").setLevel(logging.WARNING)
        try:
            return attnlens_server.local(self.bundle, batch_size=self.batch_size, **self.settings)
        except ConfigError as error:
            raise ConfigFailure(error) from error


class _AsyncLocal:
    """A local model with the asynchronous methods that the command calls."""

    def __init__(self, model: "Local") -> None:
        self._model = model

    async def get_model(self, name: str) -> "ModelInfo":
        return await asyncio.to_thread(self._model.get_model, name)

    async def embed_with_usage(self, texts: list[Any], **options: Any) -> "Embeddings":  # noqa: ANN401
        return await asyncio.to_thread(self._model.embed_with_usage, texts, **options)


# --- an output directory --------------------------------------------------------------------------


def _embed_files(
    inputs: tuple[str, ...], output: str, models: _Models, run: dict[str, Any], options: dict[str, Any]
) -> None:
    from attnlens_bulk import RunOptions, embed_files, estimate

    if not inputs or STDIO in inputs:
        raise click.UsageError("an --output directory needs files as INPUT, which can be read again")
    is_dry_run = run.pop("dry_run")
    run["skip_bad_rows"] = run.pop("bad_rows") == "skip"
    try:
        run_options = RunOptions(**run, embedding=options | {"model": models.server.model})
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with models.opened() as opened:
        try:
            if is_dry_run:
                _show_estimate(estimate(inputs, output, opened, run_options))
                return
            with _shown_run() as progress:
                report = embed_files(inputs, output, opened, run_options, progress=progress)
        except ValueError as error:  # an invalid option
            raise click.UsageError(str(error)) from error
    _show_report(report, output)


def _show_estimate(result: "Estimate") -> None:
    click.echo(
        f"input: {counted(result.num_files, 'file')}, {result.input_bytes / 1e6:,.1f} MB, about "
        f"{counted(result.num_rows, 'row')} in {counted(result.num_parts, 'part')}\n"
        f"speed: {result.rows_per_s:,.0f} rows/s, measured with {counted(result.num_sample_rows, 'row')}\n"
        f"time: about {_duration(result.seconds)} for this shard\n"
        f"output: about {result.output_bytes / 1e6:,.1f} MB for this shard"
    )


def _show_report(report: "Report", output: str) -> None:
    tally, seconds = report.tally, report.elapsed_s
    kept = report.num_parts - report.num_written
    rows = counted(report.num_rows, "row")
    if report.num_shard_rows != report.num_rows:
        rows = f"{report.num_shard_rows:,} of {rows}"
    numbers = {
        "rejected": report.num_rejected,
        "truncated": report.num_truncated,
        "with an empty text": report.num_empty,
    }
    special = "".join(f", {counted(number, 'row')} {name}" for name, number in numbers.items() if number)
    existing = f" ({kept:,} existed)" if kept else ""
    rate = f"{tally.texts / seconds:,.0f} texts/s"
    click.echo(
        f"{rows}{special}, {counted(report.num_parts, 'part')}{existing}, "
        f"{counted(tally.texts, 'distinct text')}, {counted(tally.tokens, 'token')} in {seconds:.1f} s "
        f"({rate}) -> {output}",
        err=True,
    )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes // 60} h {minutes % 60} min"  # noqa: PLR2004


def _waiting(state: "RunProgress") -> str:
    return f", waiting for {printable(state.waiting_for)}" if state.waiting_for else ""


@contextmanager
def _shown_run() -> "Iterator[Callable[[RunProgress], None]]":
    """Show a bar on a terminal, otherwise a line per minute."""
    if not sys.stderr.isatty():
        last, waiting_for = time.monotonic(), ""

        def write_line(state: "RunProgress") -> None:
            nonlocal last, waiting_for
            is_new = bool(state.waiting_for) and not waiting_for
            waiting_for = state.waiting_for
            if is_new or time.monotonic() - last >= _LINE_INTERVAL_S:
                last = time.monotonic()
                left = "" if state.remaining_s is None else f", about {_duration(state.remaining_s)} left"
                rate = state.texts / (state.elapsed_s or 1.0)
                click.echo(f"{state.position:.1%}, {rate:,.0f} texts/s{left}{_waiting(state)}", err=True)

        yield write_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TextColumn("{task.percentage:.1f} %"),
        TextColumn("{task.fields[rate]:,.0f} texts/s"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0, rate=0.0, left="")

        def advance(state: "RunProgress") -> None:
            left = "" if state.remaining_s is None else f"about {_duration(state.remaining_s)} left"
            left += _waiting(state)
            bar.update(task, completed=state.position, rate=state.texts / (state.elapsed_s or 1.0), left=left)

        yield advance


# --- an output file -------------------------------------------------------------------------------


async def _run(settings: _Settings, models: _Models) -> Counts:
    from attnlens_cli.files.writers import EMBED_KEYS, JsonlWriter, NpyWriter

    async with models.opened_one() as client:
        model = await client.get_model(models.server.model)
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
    client: "AsyncClient | _AsyncLocal",
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


async def _embed(settings: _Settings, client: "AsyncClient | _AsyncLocal", batch: list[Line]) -> "Embeddings":
    from attnlens_client import AttnlensError

    try:
        return await client.embed_with_usage([line.text for line in batch], **settings.options)
    except AttnlensError as error:
        if error.text_index is None or error.text_index >= len(batch):
            raise
        line_name = f"{settings.input.name}, line {batch[error.text_index].number}"
        raise text_failure(error, line_name) from error
