"""Runs: vectors of files in parts, which the same call resumes."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from attnlens_bulk.errors import BulkError, InputError, ResumeError
from attnlens_bulk.files import InputFile, InputFormat, find_files
from attnlens_bulk.formats import OWN_COLUMNS, OutputFormat, encode_part
from attnlens_bulk.parts import Part, make_part
from attnlens_bulk.pipeline import Pipeline, Tally
from attnlens_bulk.reading import Rows, RowSequence
from attnlens_bulk.storage import Storage
from attnlens_bulk.vectors import TOKEN_OPTIONS, Result, TokenVectors, VectorKind, compute, joined
from attnlens_client.client import BlockingMethods

FORMAT_VERSION = 1
RUN_FILE = "run.json"
PARTS = "parts"
"""Directory of the part files, which contains nothing else, so that it can be opened as a data set."""
DEFAULT_ROWS_PER_PART = 32_768
DEFAULT_TOKEN_ROWS_PER_PART = 1_024
"""A text has as many vectors as tokens, and parts are in memory."""
SECONDS_BEFORE_ESTIMATE = 5.0
SAMPLE_FILES, SAMPLE_ROWS = 4, 256
"""Number of files that an estimate reads, and of rows of each that it computes."""


_OTHERWISE_RECORDED = {"model", "ranges"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run.

    Attributes:
        text_columns: Columns with the text. The texts of several columns are joined by a line break.
        id_column: Column that the output contains as `id`.
        keep: Further columns that the output contains.
        input_format: Format of all files. If None, it follows from their suffixes.
        output_format: "parquet", "arrow", "npy" (embeddings alone) or "jsonl".
        vectors: "embeddings" for one vector per text, or "tokens" for the last hidden state of each token.
        rows_per_part: Number of input rows per output file. If None, 32,768, or 1,024 with token vectors.
        shard: Index and number of shards. Shard i of n computes the parts i, i + n, i + 2n, ...
        skip_bad_rows: Whether to omit rows without a valid text and report them in a file, instead of raising
            RowError.
        batch_size: Number of texts per call.
        in_flight: Number of concurrent calls per model.
        embedding: Arguments of `Client.embed`, such as `embedding_type` and `truncate`. For token vectors
            only `dtype`, `model`, `prompt`, `prompt_name` and `truncate`.
    """

    text_columns: Sequence[str] = ("text",)
    id_column: str | None = None
    keep: Sequence[str] = ()
    input_format: InputFormat | None = None
    output_format: OutputFormat = "parquet"
    vectors: VectorKind = "embeddings"
    rows_per_part: int | None = None
    shard: tuple[int, int] = (0, 1)
    skip_bad_rows: bool = False
    batch_size: int = 128
    in_flight: int = 8
    embedding: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        index, count = self.shard
        if not 0 <= index < count:
            raise ValueError(f"shard is {index}/{count}: use an index from 0 to {count - 1}")
        for name, choices in (("output_format", OutputFormat), ("vectors", VectorKind)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: use one of {', '.join(get_args(choices))}"
                )
        self._check_token_options()
        for name in ("rows_per_part", "batch_size", "in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: use at least 1")
        if not self.text_columns:
            raise ValueError("text_columns is empty: name at least one column")
        if self.output_format == "npy" and self.kept:
            raise ValueError("output_format is 'npy', which contains embeddings alone: keep no columns")
        for name in self.keep:
            if name in OWN_COLUMNS[self.vectors]:
                raise ValueError(f"keep contains {name!r}, a column of the output: rename it in the input")

    def _check_token_options(self) -> None:
        if self.vectors != "tokens":
            return
        if self.output_format == "npy":
            raise ValueError(
                "output_format is 'npy', which cannot contain a different number of vectors per text: use "
                "parquet, arrow or jsonl for token vectors"
            )
        embedding_type = self.embedding.get("embedding_type") or "float"
        if embedding_type != "float":
            raise ValueError(
                f"embedding_type is {embedding_type!r}, but token vectors are not quantized: omit it, or set "
                "dtype to 'float16'"
            )
        for name, value in self.embedding.items():
            if value is not None and name not in (*TOKEN_OPTIONS, "embedding_type"):
                raise ValueError(f"{name} does not apply to token vectors: omit it")

    @property
    def part_size(self) -> int:
        """Number of input rows per part."""
        if self.rows_per_part is not None:
            return self.rows_per_part
        return DEFAULT_TOKEN_ROWS_PER_PART if self.vectors == "tokens" else DEFAULT_ROWS_PER_PART

    @property
    def call_options(self) -> dict[str, Any]:
        """Arguments of the models' method."""
        options = {"truncate": False, **self.embedding}
        if self.vectors == "tokens":
            return {name: value for name, value in options.items() if name in TOKEN_OPTIONS}
        return options

    @property
    def kept(self) -> dict[str, str]:
        """Names of the kept columns in the output by their name in the input."""
        names = {name: name for name in self.keep}
        return names | ({self.id_column: "id"} if self.id_column is not None else {})

    @property
    def columns(self) -> list[str]:
        """Columns to read."""
        return list(dict.fromkeys((*self.text_columns, *self.kept)))

    def recorded(self) -> dict[str, Any]:
        """Return the options that determine the output."""
        return {
            "text_columns": list(self.text_columns),
            "id_column": self.id_column,
            "keep": list(self.keep),
            "output_format": self.output_format,
            **({} if self.vectors == "embeddings" else {"vectors": self.vectors}),  # new in runs of tokens
            "rows_per_part": self.part_size,
            **{
                name: self.embedding[name]
                for name in sorted(self.embedding)
                if name not in _OTHERWISE_RECORDED
            },
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running run.

    Attributes:
        texts: Number of texts that this call has computed.
        elapsed_s: Time since the start in seconds.
        position: Fraction of the input that is done, approximately.
        remaining_s: Estimated remaining time in seconds. None if it is unknown.
    """

    texts: int
    elapsed_s: float
    position: float
    remaining_s: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a run.

    Attributes:
        num_rows: Number of input rows, of all shards.
        num_parts: Number of parts of this shard.
        num_written: Number of parts that this call has written. The others existed.
        num_rejected: Number of invalid rows in the parts of this shard.
        tally: Texts and tokens that this call has computed.
        elapsed_s: Duration of this call in seconds.
    """

    num_rows: int
    num_parts: int
    num_written: int
    num_rejected: int
    tally: Tally
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a run from a sample of its rows.

    Attributes:
        num_files: Number of files.
        input_bytes: Size of the files.
        num_sample_rows: Number of rows in the sample.
        num_rows: Number of rows of the input.
        num_parts: Number of parts.
        rows_per_s: Rows per second on these models.
        seconds: Duration for all parts of this shard.
        output_bytes: Size of the output of this shard.
    """

    num_files: int
    input_bytes: int
    num_sample_rows: int
    num_rows: int
    num_parts: int
    rows_per_s: float
    seconds: float
    output_bytes: int


def embed_files(
    inputs: Sequence[str],
    output: str,
    models: Sequence[BlockingMethods],
    options: RunOptions | None = None,
    *,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Embed the texts of files, and write the vectors in parts.

    If the output contains parts of the same run, only the others are computed.

    Args:
        inputs: Paths or fsspec URLs of files, directories and patterns.
        output: Path or fsspec URL of a directory.
        models: Local models or clients that serve the same model. Their calls run concurrently.
        options: Options. If None, the defaults.
        progress: Called after each part and about twice per second.

    Raises:
        ValueError: An option is invalid.
        InputError: An input is missing, unreadable or invalid. Finished parts are kept.
        ResumeError: The output belongs to a run with other inputs, another model or other options.
        OutputError: The output cannot be written. Finished parts are kept.
        AttnlensError: A call failed. Finished parts are kept.
    """
    return _Run(inputs, output, models, options or RunOptions()).execute(progress)


def estimate(
    inputs: Sequence[str],
    output: str,
    models: Sequence[BlockingMethods],
    options: RunOptions | None = None,
) -> Estimate:
    """Estimate duration and size of a run from a few hundred rows of its inputs, without writing.

    See `embed_files` for arguments and errors.
    """
    return _Run(inputs, output, models, options or RunOptions()).estimate()


class _Run:
    def __init__(
        self, inputs: Sequence[str], output: str, models: Sequence[BlockingMethods], options: RunOptions
    ) -> None:
        if not models:
            raise ValueError("models is empty: pass at least one client or local model")
        self._options = options
        self._models = models
        self._storage = Storage(output)
        self._parts_storage = Storage(f"{self._storage.name}/{PARTS}")
        self._files = self._find(inputs)
        self._embedding = options.call_options
        self._like = self._compared_models()
        self._max_text_bytes = self._text_limit()

    def execute(self, progress: Callable[[Progress], None] | None) -> Report:
        """Compute the missing parts."""
        index, count = self._options.shard
        with self._storage.locked(f"shard-{index}-of-{count}"):
            self._open_run()
            rows = RowSequence(self._files, self._options.columns, self._options.text_columns)
            try:
                return self._compute(rows, progress)
            finally:
                rows.close()

    def estimate(self) -> Estimate:
        """Measure a sample."""
        options = self._options
        step = max(1, len(self._files) // SAMPLE_FILES)
        parts, num_read_rows, fraction = [], 0, 0.0
        total_bytes = max(1, sum(file.size_bytes for file in self._files))
        for file in self._files[::step][:SAMPLE_FILES]:
            rows = RowSequence([file], options.columns, options.text_columns)
            try:
                parts.append(self._read_sample(rows))
            finally:
                rows.close()
            num_read_rows += rows.position
            fraction += rows.fraction * file.size_bytes / total_bytes
        num_sample_rows = sum(part.columns.num_rows for part in parts)
        warm_up = [text for part in parts for text in part.texts[:: max(1, len(part.texts) // 32)]]
        for model in self._models if warm_up else ():
            compute(model, options.vectors, warm_up, self._embedding | {"truncate": True})
        start = time.perf_counter()
        with self._pipeline().run(parts) as finished:
            output_bytes = sum(len(self._encoded(part)) for part in finished if part is not None)
        elapsed_s = time.perf_counter() - start
        num_rows = round(num_read_rows / fraction) if 0 < fraction < 1 else num_read_rows
        scale = num_rows / max(1, num_sample_rows) / options.shard[1]
        return Estimate(
            num_files=len(self._files),
            input_bytes=sum(file.size_bytes for file in self._files),
            num_sample_rows=num_sample_rows,
            num_rows=num_rows,
            num_parts=-(-num_rows // options.part_size),
            rows_per_s=num_sample_rows / elapsed_s,
            seconds=elapsed_s * scale,
            output_bytes=round(output_bytes * scale),
        )

    # --- start ------------------------------------------------------------------------------------

    def _find(self, inputs: Sequence[str]) -> list[InputFile]:
        files = find_files(inputs, self._options.input_format)
        for file in files:
            if self._storage.contains(file.fs, file.path):
                raise InputError(f"{file.name} is in the output directory: use another directory")
        return files

    def _compared_models(self) -> Result:
        """Return the vectors of a text by the first model. All models must be the same."""
        kind = self._options.vectors
        first, *others = (compute(model, kind, ["a"], self._embedding) for model in self._models)
        for model, result in zip(self._models[1:], others, strict=True):
            if result.identity != first.identity:
                raise BulkError(
                    f"{model!r} differs from {self._models[0]!r}: {result.identity}, not {first.identity}. "
                    "Use servers with the same model, engine and precision"
                )
        return first

    def _text_limit(self) -> int:
        """Return the maximum size of a text in bytes, without its prompt. 0 means no limit."""
        info = self._models[0].get_model(self._embedding.get("model", ""))
        prompt = self._embedding.get("prompt")
        if prompt is None:
            prompt = info.prompts.get(self._embedding.get("prompt_name") or info.default_prompt_name, "")
        limit = info.limits.max_text_bytes
        return max(1, limit - len(prompt.encode())) if limit else 0

    def _description(self) -> dict[str, Any]:
        """Return the content of `run.json`."""
        vectors = joined(self._like.texts, self._like.texts[0])
        array = vectors.vectors if isinstance(vectors, TokenVectors) else vectors
        ranges = None if self._like.ranges is None else self._like.ranges.tolist()
        return {
            "format_version": FORMAT_VERSION,
            "model": self._like.identity,
            "vectors": {
                "type": array.dtype.name,
                "columns": array.shape[1],
                "embedding_type": self._embedding.get("embedding_type", "float"),
                "ranges": ranges,
            },
            "options": self._options.recorded(),
            "inputs": [file.fingerprint() for file in self._files],
        }

    def _open_run(self) -> None:
        """Write `run.json`, or compare it with this run.

        Raises:
            ResumeError: It differs.
        """
        content = self._storage.read(RUN_FILE)
        expected = self._description()
        if content is not None:
            _check_same(json.loads(content), expected, self._storage.name)
            return
        if self._parts_storage.names():
            raise ResumeError(
                f"{self._parts_storage.name} contains files, but {self._storage.name} has no {RUN_FILE}: use "
                "another directory, or delete them"
            )
        self._storage.commit(RUN_FILE, (json.dumps(expected, ensure_ascii=False, indent=1) + "\n").encode())

    # --- parts ------------------------------------------------------------------------------------

    def _compute(self, rows: RowSequence, progress: Callable[[Progress], None] | None) -> Report:
        done = self._parts_storage.names()
        num_existing = sum(self._is_own(name) for name in done)
        pipeline = self._pipeline()
        num_written = 0
        start = time.monotonic()
        with pipeline.run(self._parts(rows, done)) as finished:
            for part in finished:
                if part is not None:
                    self._write(part)
                    num_written += 1
                    pipeline.release()
                if progress is not None:
                    progress(self._progress(pipeline.tally, time.monotonic() - start))
        num_rejected = self._num_rejected()
        report = Report(
            num_rows=rows.position,
            num_parts=num_existing + num_written,
            num_written=num_written,
            num_rejected=num_rejected,
            tally=pipeline.tally,
            elapsed_s=time.monotonic() - start,
        )
        self._write_summary(report)
        return report

    def _progress(self, tally: Tally, elapsed_s: float) -> Progress:
        left = (1 - tally.position) / self._options.shard[1]
        is_known = tally.work > 0 and elapsed_s >= SECONDS_BEFORE_ESTIMATE
        remaining_s = elapsed_s * left / tally.work if is_known else None
        return Progress(tally.texts, elapsed_s, tally.position, remaining_s)

    def _pipeline(self) -> Pipeline:
        options = self._options
        return Pipeline(
            self._models,
            options.vectors,
            self._embedding,
            self._like,
            batch_size=options.batch_size,
            in_flight=options.in_flight,
        )

    def _parts(self, rows: RowSequence, done: set[str]) -> Iterator[Part]:
        """Yield the missing parts of this shard. Finally, `rows.position` is the number of all rows."""
        size, (shard, num_shards) = self._options.part_size, self._options.shard
        index = 0
        while True:
            start = rows.position
            if index % num_shards != shard or self._part_name(index) in done:
                if rows.skip(size) < size:
                    return
            else:
                part = self._read_part(rows, index, start, size)
                if rows.position > start:
                    yield part
                if rows.position - start < size:
                    return
            index += 1

    def _read_part(self, rows: RowSequence, index: int, start: int, size: int) -> Part:
        before = rows.fraction
        read, origins = rows.read(size)
        return self._part(read, origins, index, start, (before, rows.fraction))

    def _read_sample(self, rows: RowSequence) -> Part:
        """Return evenly spaced rows from the beginning of a file."""
        read, origins = rows.read(DEFAULT_ROWS_PER_PART)
        step = max(1, read.table.num_rows // SAMPLE_ROWS)
        selected = np.arange(0, read.table.num_rows, step)
        problems = {index // step: reason for index, reason in read.problems.items() if index % step == 0}
        return self._part(Rows(read.table.take(pa.array(selected)), problems), origins, 0, 0, (0.0, 1.0))

    def _part(
        self,
        rows: Rows,
        origins: list[tuple[int, InputFile, int]],
        index: int,
        start: int,
        fractions: tuple[float, float],
    ) -> Part:
        part = make_part(
            index,
            start,
            rows,
            origins,
            text_columns=self._options.text_columns,
            kept=self._options.kept,
            max_text_bytes=self._max_text_bytes,
            fractions=fractions,
        )
        if not self._options.skip_bad_rows:
            part.check_rows()
        return part

    def _write(self, part: Part) -> None:
        if part.problems:
            if not self._options.skip_bad_rows:
                part.check_rows()
            self._storage.commit(_report_name(part.index), part.report())
        self._parts_storage.commit(self._part_name(part.index), self._encoded(part))

    def _encoded(self, part: Part) -> memoryview:
        columns, vectors = part.result(self._like.texts[0])
        metadata = {
            **self._like.identity,
            "embedding_type": self._embedding.get("embedding_type", "float"),
        }
        return encode_part(self._options.output_format, columns, vectors, metadata)

    def _part_name(self, index: int) -> str:
        return f"part-{index:06d}.{self._options.output_format}"

    def _is_own(self, name: str) -> bool:
        index, count = self._options.shard
        stem, _, suffix = name.partition(".")
        number = stem.removeprefix("part-")
        return (
            suffix == self._options.output_format
            and number != stem
            and number.isdigit()
            and int(number) % count == index
        )

    def _num_rejected(self) -> int:
        index, count = self._options.shard
        total = 0
        for name in sorted(self._storage.names()):
            number = name.removeprefix("rejected-").removesuffix(".jsonl")
            if name.startswith("rejected-") and number.isdigit() and int(number) % count == index:
                total += (self._storage.read(name) or b"").count(b"\n")
        return total

    def _write_summary(self, report: Report) -> None:
        """Write the file that shows that this shard is complete."""
        index, count = self._options.shard
        content = {
            "rows_of_all_shards": report.num_rows,
            "parts": report.num_parts,
            "rejected_rows": report.num_rejected,
        }
        self._storage.commit(f"complete-{index}-of-{count}.json", (json.dumps(content) + "\n").encode())


def _report_name(index: int) -> str:
    return f"rejected-{index:06d}.jsonl"


def _check_same(found: dict[str, Any], expected: dict[str, Any], output: str) -> None:
    """Compare the contents of `run.json`.

    Raises:
        ResumeError: They differ. The message names the first difference.
    """
    remedy = f"restore it and repeat the command, or start a new run in another directory than {output}"
    if found.get("format_version") != FORMAT_VERSION:
        raise ResumeError(
            f"{output} has format version {found.get('format_version')}, but this version writes "
            f"{FORMAT_VERSION}: use another directory"
        )
    for section, noun in (("options", "option"), ("model", "model's"), ("vectors", "vectors'")):
        for name in found[section].keys() | expected[section].keys():
            before, now = found[section].get(name), expected[section].get(name)
            if before != now:
                raise ResumeError(f"the {noun} {name} was {before!r} and is {now!r}: {remedy}")
    before_files = {entry["file"]: entry for entry in found["inputs"]}
    now_files = {entry["file"]: entry for entry in expected["inputs"]}
    for name in before_files.keys() - now_files.keys():
        raise ResumeError(f"the input {name} of the run is missing: {remedy}")
    for name in now_files.keys() - before_files.keys():
        raise ResumeError(f"the input {name} is new: {remedy}")
    if list(before_files) != list(now_files):
        raise ResumeError(f"the inputs have another order: {remedy}")
    for name, entry in now_files.items():
        _check_same_file(name, before_files[name], entry, remedy)


def _check_same_file(name: str, before: dict[str, Any], now: dict[str, Any], remedy: str) -> None:
    for key in ("format", "size_bytes", "sha256"):
        if before[key] != now[key]:
            raise ResumeError(
                f"the input {name} has changed: its {key} was {before[key]}, now {now[key]}: {remedy}"
            )
    if before["sha256_of"] != "content" and before["modified"] != now["modified"]:
        raise ResumeError(
            f"the input {name} may have changed: its time of change was {before['modified']}, now "
            f"{now['modified']}, and only its head and tail were compared: {remedy}"
        )
