"""Runs: vectors of files in parts, which the same call resumes."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from attnlens.short_repr import short_repr
from attnlens_bulk.description import (
    FORMAT_VERSION,
    RUN_FILE,
    check_same,
    parse_description,
    resolve_options,
)
from attnlens_bulk.errors import BulkError, InputError, ResumeError
from attnlens_bulk.files import InputFile, InputFormat, find_files
from attnlens_bulk.formats import OWN_COLUMNS, OutputFormat, check_columns, encode_part
from attnlens_bulk.parts import EmptyPolicy, Part, make_part
from attnlens_bulk.pipeline import Pipeline, Tally, is_transient, name_of, servers_unavailable
from attnlens_bulk.reading import DEFAULT_MAX_LINE_BYTES, Rows, RowSequence
from attnlens_bulk.storage import Storage
from attnlens_bulk.vectors import TOKEN_OPTIONS, Result, TokenVectors, VectorKind, compute, joined
from attnlens_client import AttnlensError, ModelInfo
from attnlens_client.client import BlockingMethods

PARTS, RECORDS = "parts", "records"
"""Directories of the part files, which contains nothing else, so that it can be opened as a data set, and of
a record for each part: its size, hash and numbers of rows."""
DEFAULT_ROWS_PER_PART = 32_768
DEFAULT_TOKEN_ROWS_PER_PART = 1_024
"""A text has as many vectors as tokens, and parts are in memory."""
DEFAULT_PATIENCE_S = 900.0
START_PATIENCE_S = 5.0
"""Time to wait for the models of a new run, whose addresses may be wrong."""
_START_DELAY_S = 0.5
SECONDS_BEFORE_ESTIMATE = 5.0
SAMPLE_FILES, SAMPLE_ROWS = 4, 256
"""Number of files that an estimate reads, and of rows of each that it computes."""


_OTHERWISE_RECORDED = {"model", "ranges"}


@short_repr
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
        empty: Rows whose text is empty or white space: "embed" computes their vectors, "skip" omits them and
            rows without a text, and reports both in the file, and "reject" makes them bad rows.
        max_line_bytes: Maximum size of a line of a text file, and of a record of CSV. A longer line is a bad
            row, and a longer record an InputError.
        patience_s: Time to wait if no model answers. Then ServersUnavailableError is raised. A new run waits
            only a few seconds for its first answer.
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
    empty: EmptyPolicy = "embed"
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
    patience_s: float = DEFAULT_PATIENCE_S
    batch_size: int = 128
    in_flight: int = 8
    embedding: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        index, count = self.shard
        if not 0 <= index < count:
            raise ValueError(f"shard is {index}/{count}: use an index from 0 to {count - 1}")
        for name, choices in (
            ("output_format", OutputFormat),
            ("vectors", VectorKind),
            ("empty", EmptyPolicy),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: use one of {', '.join(get_args(choices))}"
                )
        self._check_token_options()
        self._check_numbers()
        if not self.text_columns:
            raise ValueError("text_columns is empty: name at least one column")
        if self.output_format == "npy" and self.kept:
            raise ValueError("output_format is 'npy', which contains embeddings alone: keep no columns")
        for name in self.keep:
            if name in OWN_COLUMNS[self.vectors]:
                raise ValueError(f"keep contains {name!r}, a column of the output: rename it in the input")

    def _check_numbers(self) -> None:
        if not self.patience_s >= 0:
            raise ValueError(f"patience_s is {self.patience_s}: use 0 or more seconds")
        for name in ("rows_per_part", "batch_size", "in_flight", "max_line_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: use at least 1")

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
        """Return the options that determine the output, as given."""
        return {
            "text_columns": list(self.text_columns),
            "id_column": self.id_column,
            "keep": list(self.keep),
            "output_format": self.output_format,
            "vectors": self.vectors,
            "empty": self.empty,
            "rows_per_part": self.part_size,
            **{
                name: self.embedding[name]
                for name in sorted(self.embedding)
                if name not in _OTHERWISE_RECORDED
            },
        }


@short_repr
@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running run.

    Attributes:
        texts: Number of texts that this call has computed.
        elapsed_s: Time since the start in seconds.
        position: Fraction of the input that is done, approximately.
        remaining_s: Estimated remaining time in seconds. None if it is unknown.
        waiting_for: Models that do not answer, with the reason. Empty if all do.
    """

    texts: int
    elapsed_s: float
    position: float
    remaining_s: float | None
    waiting_for: str = ""


@short_repr
@dataclass(frozen=True, slots=True)
class Report:
    """Result of a run.

    Attributes:
        num_rows: Number of input rows, of all shards.
        num_parts: Number of parts of this shard.
        num_written: Number of parts that this call has written. The others existed.
        num_rejected: Number of invalid and skipped rows in the parts of this shard.
        tally: Texts and tokens that this call has computed.
        elapsed_s: Duration of this call in seconds.
        num_shard_rows: Number of input rows in the parts of this shard.
        num_truncated: Number of truncated rows in the parts of this shard, except parts of older versions.
        num_empty: Number of rows with the vector of an empty text, in the same parts.
    """

    num_rows: int
    num_parts: int
    num_written: int
    num_rejected: int
    tally: Tally
    elapsed_s: float
    num_shard_rows: int
    num_truncated: int
    num_empty: int


@short_repr
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
        ServersUnavailableError: No call has succeeded for `patience_s`. Finished parts are kept.
        OutputError: The output cannot be written. Finished parts are kept.
        AttnlensError: A call failed, and a repetition would fail too. Finished parts are kept.
    """
    return _Run(inputs, output, models, options or RunOptions(), progress).execute()


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
        self,
        inputs: Sequence[str],
        output: str,
        models: Sequence[BlockingMethods],
        options: RunOptions,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        if not models:
            raise ValueError("models is empty: pass at least one client or local model")
        self._options = options
        self._models = models
        self._progress = progress
        self._storage = Storage(output)
        self._parts_storage = Storage(f"{self._storage.name}/{PARTS}", is_inner=True)
        self._records = Storage(f"{self._storage.name}/{RECORDS}", is_inner=True)
        self._files = self._find(inputs)
        self._embedding = options.call_options
        self._found = self._read_description()
        self._like, self._info, self._max_text_bytes = self._open_models()
        self._existing: Counter[str] = Counter()  # parts and rows of the shard. Written by the feeder
        self._written: Counter[str] = Counter()  # by the caller's thread

    def execute(self) -> Report:
        """Compute the missing parts."""
        index, count = self._options.shard
        with self._storage.locked(f"shard-{index}-of-{count}"):
            self._open_run()
            rows = self._rows(self._files)
            try:
                if self._files:
                    check_columns(self._options.output_format, rows.types(), self._options.kept)
                return self._compute(rows)
            finally:
                rows.close()

    def _rows(self, files: Sequence[InputFile]) -> RowSequence:
        options = self._options
        return RowSequence(
            files,
            options.columns,
            options.text_columns,
            max_line_bytes=options.max_line_bytes,
            max_text_bytes=self._max_text_bytes,
        )

    def estimate(self) -> Estimate:
        """Measure a sample."""
        options = self._options
        step = max(1, len(self._files) // SAMPLE_FILES)
        parts, num_read_rows, fraction = [], 0, 0.0
        total_bytes = max(1, sum(file.size_bytes for file in self._files))
        for file in self._files[::step][:SAMPLE_FILES]:
            rows = self._rows([file])
            try:
                check_columns(options.output_format, rows.types(), options.kept)
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

    def _read_description(self) -> dict[str, Any] | None:
        content = self._storage.read(RUN_FILE)
        return None if content is None else parse_description(content, self._storage.name)

    def _open_models(self) -> tuple[Result, ModelInfo, int]:
        """Wait until a model answers, and compare those that do. Others are compared with each result.

        Returns:
            Vectors of a text, the description of the model, and the maximum size of a text in bytes.
        """
        start = time.monotonic()
        while True:
            failures: dict[str, AttnlensError] = {}
            answers: list[tuple[BlockingMethods, Result, ModelInfo]] = []
            for model in self._models:
                try:
                    info = model.get_model(self._embedding.get("model") or "")
                    result = compute(model, self._options.vectors, ["a"], self._embedding)
                except AttnlensError as error:
                    if not is_transient(error):
                        raise
                    failures[name_of(model)] = error
                else:
                    answers.append((model, result, info))
            if answers:
                self._compare(answers)
                _, first, info = answers[0]
                limits = [limit for _, _, other in answers if (limit := self._text_limit(other))]
                return first, info, min(limits, default=0)
            self._wait(failures, time.monotonic() - start)

    def _compare(self, answers: list[tuple[BlockingMethods, Result, ModelInfo]]) -> None:
        (first, like, info), *others = answers
        expected = like.identity | {"max_tokens": info.max_tokens}
        for model, result, other_info in others:
            identity = result.identity | {"max_tokens": other_info.max_tokens}
            if identity != expected:
                raise BulkError(
                    f"{model!r} differs from {first!r}: {identity}, not {expected}. Use servers with the "
                    "same model, engine, precision and token limit"
                )

    def _wait(self, failures: dict[str, AttnlensError], elapsed_s: float) -> None:
        """Wait before the models are called again.

        Raises:
            AttnlensError: A new run has no more patience.
            ServersUnavailableError: A continued run has none.
        """
        *_, last = failures.values()
        is_starting = last.retry_delay_s is not None
        patience_s = self._options.patience_s
        if self._found is None and not is_starting:
            patience_s = min(patience_s, START_PATIENCE_S)
        if elapsed_s >= patience_s:
            if self._found is None:
                raise last
            raise servers_unavailable(failures, elapsed_s) from last
        if self._progress is not None:
            self._progress(Progress(0, elapsed_s, 0.0, None, _waiting_for(failures)))
        time.sleep(min(max(_START_DELAY_S, last.retry_delay_s or 0.0), patience_s - elapsed_s))

    def _text_limit(self, info: ModelInfo) -> int:
        """Return the maximum size of a text in bytes, without its prompt. 0 means no limit."""
        prompt = resolve_options(self._options.recorded(), info)["prompt"]
        limit = info.limits.max_text_bytes
        return max(1, limit - len(prompt.encode())) if limit else 0

    @property
    def _embedding_type(self) -> str:
        return self._embedding.get("embedding_type") or "float"

    def _description(self) -> dict[str, Any]:
        """Return the content of `run.json`."""
        vectors = joined(self._like.texts, self._like.texts[0])
        array = vectors.vectors if isinstance(vectors, TokenVectors) else vectors
        ranges = None if self._like.ranges is None else self._like.ranges.tolist()
        return {
            "format_version": FORMAT_VERSION,
            "model": self._like.identity
            | {"max_tokens": self._info.max_tokens, "similarity": self._info.similarity},
            "vectors": {
                "type": array.dtype.name,
                "columns": array.shape[1],
                "embedding_type": self._embedding_type,
                "ranges": ranges,
            },
            "options": resolve_options(self._options.recorded(), self._info),
            "inputs": [file.fingerprint() for file in self._files],
            "records": RECORDS,
        }

    def _open_run(self) -> None:
        """Write `run.json`, or compare it with this run.

        Raises:
            ResumeError: It differs.
        """
        self._found = self._read_description()  # another shard may have written it
        expected = self._description()
        if self._found is not None:
            check_same(self._found, expected, self._info, self._storage.name)
            if "max_tokens" in self._found["model"]:
                return
            # A run of an older version: the later calls must have the limit of this one.
            expected = self._found | {"model": expected["model"]}
        elif self._parts_storage.names():
            raise ResumeError(
                f"{self._parts_storage.name} contains files, but {self._storage.name} has no {RUN_FILE}: use "
                "another directory, or delete them"
            )
        content = json.dumps(expected, ensure_ascii=False, indent=1, default=_plain_number)
        self._storage.commit(RUN_FILE, f"{content}\n".encode())
        self._found = expected

    # --- parts ------------------------------------------------------------------------------------

    def _compute(self, rows: RowSequence) -> Report:
        done = self._parts_storage.names()
        pipeline = self._pipeline()
        start = time.monotonic()
        with pipeline.run(self._parts(rows, done)) as finished:
            for part in finished:
                if part is not None:
                    self._write(part)
                    pipeline.release()
                self._report_progress(pipeline, time.monotonic() - start)
        totals = self._existing + self._written
        report = Report(
            num_rows=rows.position,
            num_parts=totals["parts"],
            num_written=self._written["parts"],
            num_rejected=totals["rejected_rows"],
            tally=pipeline.tally,
            elapsed_s=time.monotonic() - start,
            num_shard_rows=totals["rows"],
            num_truncated=totals["truncated_rows"],
            num_empty=totals["empty_rows"],
        )
        self._write_summary(report)
        return report

    def _report_progress(self, pipeline: Pipeline, elapsed_s: float) -> None:
        if self._progress is None:
            return
        tally = pipeline.tally
        left = (1 - tally.position) / self._options.shard[1]
        is_known = tally.work > 0 and elapsed_s >= SECONDS_BEFORE_ESTIMATE
        remaining_s = elapsed_s * left / tally.work if is_known else None
        waiting_for = _waiting_for(pipeline.failures())
        self._progress(Progress(tally.texts, elapsed_s, tally.position, remaining_s, waiting_for))

    def _pipeline(self) -> Pipeline:
        options = self._options
        return Pipeline(
            self._models,
            options.vectors,
            self._embedding,
            self._like,
            max_tokens=self._info.max_tokens,
            batch_size=options.batch_size,
            in_flight=options.in_flight,
            patience_s=options.patience_s,
        )

    def _parts(self, rows: RowSequence, done: set[str]) -> Iterator[Part]:
        """Yield the missing parts of this shard. Finally, `rows.position` is the number of all rows."""
        size, (shard, num_shards) = self._options.part_size, self._options.shard
        index = 0
        while True:
            start = rows.position
            is_own = index % num_shards == shard
            record = self._record(index) if is_own and self._part_name(index) in done else None
            if not is_own or record is not None:
                count = rows.skip(size)
                if record is not None and count:
                    self._existing.update(record | {"parts": 1, "rows": count})
                if count < size:
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
            empty=self._options.empty,
            fractions=fractions,
        )
        if not self._options.skip_bad_rows:
            part.check_rows()
        return part

    def _write(self, part: Part) -> None:
        if not self._options.skip_bad_rows:
            part.check_rows()
        if part.problems or part.skipped:
            self._storage.commit(_report_name(part.index), part.report())
        content, counts = self._encoded(part), part.counts()
        record = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), **counts}
        # First, so that a part of another call never fits the record.
        self._records.commit(_record_name(part.index), (json.dumps(record) + "\n").encode())
        self._parts_storage.commit(self._part_name(part.index), content)
        self._written.update(counts | {"parts": 1})

    def _record(self, index: int) -> dict[str, int] | None:
        """Return the numbers of rows of a finished part, or None if it has to be computed again."""
        content = self._records.read(_record_name(index))
        if content is None:
            is_old = self._found is not None and "records" not in self._found
            rejected = self._storage.read(_report_name(index)) if is_old else None
            return {"rejected_rows": (rejected or b"").count(b"\n")} if is_old else None
        try:
            record = json.loads(content)
            names = ("rejected_rows", "truncated_rows", "empty_rows")
            counts = {name: int(record[name]) for name in names}
            expected = (record["size_bytes"], record["sha256"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return counts if self._parts_storage.digest(self._part_name(index)) == expected else None

    def _encoded(self, part: Part) -> memoryview:
        columns, vectors = part.result(self._like.texts[0])
        metadata = {**self._like.identity, "embedding_type": self._embedding_type}
        try:
            return encode_part(self._options.output_format, columns, vectors, metadata)
        except pa.ArrowException as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"part {part.index} cannot be written as {self._options.output_format}: {reason}. Keep other "
                "columns, or use another output format"
            ) from error

    def _part_name(self, index: int) -> str:
        return f"part-{index:06d}.{self._options.output_format}"

    def _write_summary(self, report: Report) -> None:
        """Write the file that shows that this shard is complete."""
        index, count = self._options.shard
        content = {
            "rows_of_all_shards": report.num_rows,
            "rows": report.num_shard_rows,
            "parts": report.num_parts,
            "rejected_rows": report.num_rejected,
            "truncated_rows": report.num_truncated,
            "empty_rows": report.num_empty,
        }
        self._storage.commit(f"complete-{index}-of-{count}.json", (json.dumps(content) + "\n").encode())


def _report_name(index: int) -> str:
    return f"rejected-{index:06d}.jsonl"


def _record_name(index: int) -> str:
    return f"part-{index:06d}.json"


def _waiting_for(failures: Mapping[str, AttnlensError]) -> str:
    return "; ".join(f"{name} ({error.message})" for name, error in failures.items())


def _plain_number(value: Any) -> Any:  # noqa: ANN401 - a NumPy number in the options
    return value.item()
