"""Rows of input files, in order and in bounded memory.

A reader yields tables with the selected columns. A value that is invalid becomes null, and its row is
reported as a problem.
"""

import csv
import json
import lzma
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import IO, Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from attnlens_bulk.columns import plain, plain_type
from attnlens_bulk.errors import InputError
from attnlens_bulk.files import SUFFIXES, InputFile, is_compressed, is_storage_failure, suffix_of

BLOCK_ROWS, BLOCK_BYTES = 4096, 64 << 20
"""Rows that are converted at once, and the size of lines after which no further one is added."""
TYPED_ROWS = BLOCK_ROWS
"""Rows of the first file from which the types of the columns of JSON lines are inferred."""

DEFAULT_MAX_LINE_BYTES = 64 << 20
_ARROW_FILE = b"ARROW1"
_READ_BYTES = 1 << 20
_SNIFFED_LINES = 8  # of a file with an unknown suffix, which may not be text
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INVALID_UTF8 = "not UTF-8"


@dataclass(slots=True)
class Rows:
    """Consecutive rows of a file.

    Attributes:
        table: Selected columns. Strings are valid.
        problems: Reason for each invalid row, by its index in the table.
    """

    table: Any
    problems: dict[int, str] = field(default_factory=dict)


class Reader:
    """Reads the rows of one file.

    Attributes:
        fraction: Fraction of the file that was read, approximately.
    """

    fraction = 0.0

    def __init__(
        self, file: InputFile, stack: ExitStack, columns: Sequence[str], max_line_bytes: int
    ) -> None:
        """Open a file.

        Args:
            file: File.
            stack: Closes the file.
            columns: Columns to read.
            max_line_bytes: Maximum size of a line, and of a record of CSV.
        """
        raise NotImplementedError

    def skip(self, num_rows: int) -> int:
        """Skip up to `num_rows` rows, and return how many there were."""
        raise NotImplementedError

    def read(self, num_rows: int) -> Rows | None:
        """Return up to `num_rows` rows, not necessarily all that are left, or None at the end."""
        raise NotImplementedError


class TextReader(Reader):
    """Reads plain lines, JSON lines and CSV. CSV columns are strings."""

    def __init__(
        self, file: InputFile, stack: ExitStack, columns: Sequence[str], max_line_bytes: int
    ) -> None:
        self._file = file
        self._columns = columns
        self._max_line_bytes = max_line_bytes
        self._record_bytes = 0  # of the current record of CSV
        self._raw: IO[bytes] = stack.enter_context(file.open())
        content: Any = self._raw
        if is_compressed(file.path):
            name = fsspec.utils.infer_compression(file.path)
            if name is None:
                raise InputError(f"{file.name} needs a package for its compression: `pip install zstandard`")
            content = stack.enter_context(fsspec.compression.compr[name](self._raw, mode="rb"))
        self._records = self._read_records(content)

    def skip(self, num_rows: int) -> int:
        """See `Reader`."""
        count = sum(1 for _ in islice(self._records, num_rows))
        self._update_fraction(count < num_rows)
        return count

    def read(self, num_rows: int) -> Rows | None:
        """See `Reader`."""
        records, size_bytes = [], 0
        for record in islice(self._records, min(num_rows, BLOCK_ROWS)):
            records.append(record)
            size_bytes += len(record) if isinstance(record, bytes) else sum(map(len, record[1]))
            if size_bytes > BLOCK_BYTES:
                break
        self._update_fraction(not records)
        if not records:
            return None
        problems: dict[int, str] = {}
        values = [self._parse(record, problems, index) for index, record in enumerate(records)]
        return Rows({name: [row.get(name) for row in values] for name in self._columns}, problems)

    def _update_fraction(self, is_end: bool) -> None:
        self.fraction = 1.0 if is_end else min(1.0, self._raw.tell() / max(1, self._file.size_bytes))

    def _read_records(self, content: Any) -> Iterator[Any]:  # noqa: ANN401 - any binary file
        if self._file.format in ("csv", "tsv"):
            yield from self._csv_records(content)
            return
        suffix = suffix_of(self._file.path)
        must_be_object = suffix == ".json"  # which may be one document
        may_be_binary = self._file.format == "lines" and suffix not in SUFFIXES
        for index, line in enumerate(_lines(content, self._max_line_bytes)):
            raw = line.removeprefix(_BYTE_ORDER_MARK) if index == 0 else line
            if self._file.format == "jsonl":
                if not raw.strip():
                    continue
                if must_be_object and not _is_object(raw):
                    raise InputError(
                        f"{self._file.name} is not JSON lines: write one object per line, without a list "
                        "around them"
                    )
                must_be_object = False
            if may_be_binary and index < _SNIFFED_LINES and b"\0" in raw:
                raise InputError(
                    f"{self._file.name} is not a text file: set the input format, or let its name end in .txt"
                )
            yield raw.removesuffix(b"\r")

    def _csv_records(self, content: Any) -> Iterator[Any]:  # noqa: ANN401 - any binary file
        csv.field_size_limit(sys.maxsize)  # the default of 128 KiB applies to the whole process
        lines = self._csv_lines(content)
        records = csv.reader(lines, delimiter="\t" if self._file.format == "tsv" else ",")
        header = next(records, [])
        _check_columns(self._file, self._columns, header)
        for record in records:
            self._record_bytes = 0
            if record:  # not a blank line
                yield header, record

    def _csv_lines(self, content: Any) -> Iterator[str]:  # noqa: ANN401 - any binary file
        for index, line in enumerate(_lines(content, self._max_line_bytes)):
            self._record_bytes += len(line) + 1
            if self._record_bytes > self._max_line_bytes:
                raise InputError(
                    f"{self._file.name} has a record of more than {self._max_line_bytes} bytes before line "
                    f"{index + 2}: close its quotes, or set a larger maximum size of lines"
                )
            raw = line.removeprefix(_BYTE_ORDER_MARK) if index == 0 else line
            yield raw.decode("utf-8", "surrogateescape") + "\n"

    def _parse(self, record: Any, problems: dict[int, str], index: int) -> Mapping[str, Any]:  # noqa: ANN401
        try:
            if isinstance(record, bytes) and len(record) > self._max_line_bytes:
                raise ValueError(f"the line has more than {self._max_line_bytes} bytes")  # noqa: TRY301
            match self._file.format:
                case "lines":
                    return {"text": record.decode()}
                case "jsonl":
                    content = json.loads(record, object_pairs_hook=self._object)
                    return _checked_object(content, self._columns)
                case _:
                    header, values = record
                    if len(values) != len(header):
                        raise ValueError(f"{len(values)} fields, but the header has {len(header)}")  # noqa: TRY301
                    return _checked_object(dict(zip(header, values, strict=True)), self._columns)
        except UnicodeError:
            problems[index] = _INVALID_UTF8
        except (ValueError, RecursionError) as error:
            problems[index] = f"not JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        return {}

    def _object(self, members: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(members)
        if len(result) < len(members):
            counts = Counter(name for name, _ in members)
            for name in self._columns:
                if counts[name] > 1:
                    raise ValueError(f"{counts[name]} values of {name!r}")
        return result


def _lines(content: Any, max_bytes: int) -> Iterator[bytes]:  # noqa: ANN401 - any binary file
    """Yield lines without their line breaks. Of a longer line, only the first `max_bytes + 1` bytes."""
    start = b""
    while block := content.read(_READ_BYTES):
        *lines, rest = block.split(b"\n")
        for line in lines:
            yield (start + line)[: max_bytes + 1]
            start = b""
        start = (start + rest)[: max_bytes + 1]
    if start:
        yield start


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _checked_object(content: Any, columns: Sequence[str]) -> Mapping[str, Any]:  # noqa: ANN401 - parsed JSON
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - reported like other invalid lines
    selected = {name: content.get(name) for name in columns}
    for value in selected.values():
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    return selected


class ArrowReader(Reader):
    """Reads files and streams of Arrow IPC, and the files of `datasets`."""

    def __init__(
        self,
        file: InputFile,
        stack: ExitStack,
        columns: Sequence[str],
        max_line_bytes: int,  # noqa: ARG002 - there are no lines
    ) -> None:
        source = stack.enter_context(file.arrow_file())
        is_file = source.read(len(_ARROW_FILE)) == _ARROW_FILE
        source.seek(0)
        self._batches: Iterator[Any]
        if is_file:
            opened = pa.ipc.open_file(source)
            self._batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            opened = pa.ipc.open_stream(source)
            self._batches = iter(opened)
        _check_columns(file, columns, opened.schema.names)
        self._columns = list(columns)
        self._source, self._size = source, max(1, file.size_bytes)
        self._rest: Any = None  # unread rows of the current batch

    def skip(self, num_rows: int) -> int:
        """See `Reader`."""
        count = 0
        while count < num_rows and (batch := self._next(num_rows - count)) is not None:
            count += batch.num_rows
        return count

    def read(self, num_rows: int) -> Rows | None:
        """See `Reader`."""
        batch = self._next(num_rows)
        return None if batch is None else Rows(pa.Table.from_batches([batch]).select(self._columns))

    def _next(self, num_rows: int) -> Any:  # noqa: ANN401 - pyarrow has no types
        while self._rest is None or self._rest.num_rows == 0:
            self._rest = next(self._batches, None)
            if self._rest is None:
                self.fraction = 1.0
                return None
        batch, self._rest = self._rest.slice(0, num_rows), self._rest.slice(num_rows)
        self.fraction = min(1.0, self._source.tell() / self._size)
        return batch


class ParquetReader(Reader):
    """Reads Parquet. Row groups that are skipped are not decoded."""

    def __init__(
        self,
        file: InputFile,
        stack: ExitStack,
        columns: Sequence[str],
        max_line_bytes: int,  # noqa: ARG002 - there are no lines
    ) -> None:
        source = stack.enter_context(file.arrow_file())
        self._file = stack.enter_context(pq.ParquetFile(source, pre_buffer=not file.is_local))
        _check_columns(file, columns, self._file.schema_arrow.names)
        self._columns = list(columns)
        metadata = self._file.metadata
        self._ends = [0]  # row numbers at which the row groups end, after the start of the first
        for index in range(metadata.num_row_groups):
            self._ends.append(self._ends[-1] + metadata.row_group(index).num_rows)
        self._position = 0
        self._tables: Iterator[Any] | None = None  # tables of the current row group
        self._rest: Any = None

    def skip(self, num_rows: int) -> int:
        """See `Reader`."""
        target = min(self._position + num_rows, self._ends[-1])
        count = target - self._position
        while self._tables is not None and self._position < min(target, self._group_end()):
            self._next(min(target, self._group_end()) - self._position)
        if self._position < target:
            self._tables, self._position = None, target
        self._update_fraction()
        return count

    def read(self, num_rows: int) -> Rows | None:
        """See `Reader`."""
        if self._position >= self._ends[-1]:
            self.fraction = 1.0
            return None
        table = self._next(min(num_rows, self._group_end() - self._position))
        self._update_fraction()
        return Rows(table)

    def _update_fraction(self) -> None:
        self.fraction = self._position / max(1, self._ends[-1])

    def _group(self) -> int:
        return next(index for index, end in enumerate(self._ends[1:]) if self._position < end)

    def _group_end(self) -> int:
        return self._ends[1 + self._group()] if self._position < self._ends[-1] else self._ends[-1]

    def _next(self, num_rows: int) -> Any:  # noqa: ANN401 - pyarrow has no types
        """Return up to `num_rows` rows of the current row group, at least one."""
        group = self._group()
        if self._tables is None or self._position == self._ends[group]:
            batches = self._file.iter_batches(
                batch_size=BLOCK_ROWS, row_groups=[group], columns=self._columns
            )
            self._tables = (pa.Table.from_batches([batch]) for batch in batches)
            self._rest = None
            skipped = self._position - self._ends[group]
            while skipped:
                table = next(self._tables)
                self._rest = table.slice(min(skipped, table.num_rows))
                skipped -= min(skipped, table.num_rows)
        while self._rest is None or self._rest.num_rows == 0:
            self._rest = next(self._tables)
        table, self._rest = self._rest.slice(0, num_rows), self._rest.slice(num_rows)
        self._position += table.num_rows
        return table


_READERS: dict[str, type[Reader]] = {
    "lines": TextReader,
    "jsonl": TextReader,
    "csv": TextReader,
    "tsv": TextReader,
    "arrow": ArrowReader,
    "parquet": ParquetReader,
}


def _check_columns(file: InputFile, columns: Sequence[str], existing: Sequence[str]) -> None:
    for name in columns:
        if name not in existing:
            shown = ", ".join(existing) or "none"
            raise InputError(f"{file.name} has no column {name!r}: it has {shown}")
        if (count := list(existing).count(name)) > 1:
            raise InputError(f"{file.name} has {count} columns {name!r}: give them different names")


class RowSequence:
    """The rows of all files as one sequence.

    Each column has the type that it has in the first file. Not thread-safe.

    Attributes:
        columns: Names of the selected columns.
        position: Number of rows that were read or skipped.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        columns: Sequence[str],
        text_columns: Sequence[str],
        *,
        max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
        max_text_bytes: int = 0,
    ) -> None:
        """Initialize for files, of which each has all columns.

        Args:
            files: Files.
            columns: Columns to read.
            text_columns: Those of the columns that must be strings.
            max_line_bytes: See `Reader`.
            max_text_bytes: Maximum size of a text. Longer ones are not kept in memory. 0 means no limit.
        """
        for file in files:
            if file.format == "lines":
                _check_columns(file, columns, ["text"])
        self.columns = list(columns)
        self.position = 0
        self._text_columns = text_columns
        self._max_line_bytes, self._max_text_bytes = max_line_bytes, max_text_bytes
        self._files = files
        self._index = 0
        self._file_row = 0
        self._reader: Reader | None = None
        self._stack = ExitStack()
        self._types: dict[str, Any] = {}
        self._total_bytes = sum(file.size_bytes for file in files)
        self._done_bytes = 0

    @property
    def fraction(self) -> float:
        """Fraction of the input bytes that were read, approximately."""
        if self._index >= len(self._files):
            return 1.0
        current = self._files[self._index].size_bytes * (self._reader.fraction if self._reader else 0.0)
        return (self._done_bytes + current) / max(1, self._total_bytes)

    def close(self) -> None:
        """Close the current file."""
        self._stack.close()

    def types(self) -> dict[str, Any]:
        """Return the Arrow type of each column.

        Raises:
            InputError: The first file is unreadable, or the values of a column have several types.
        """
        if not self._types and self._files:
            with ExitStack() as stack, _failures_explained(self._files[0]):
                rows = self._reader_of(self._files[0], stack).read(TYPED_ROWS)
                self._types = {name: self._type(name, rows) for name in self.columns}
        return self._types

    def _type(self, name: str, rows: Rows | None) -> Any:  # noqa: ANN401 - pyarrow has no types
        file = self._files[0]
        if name not in self._text_columns:
            return _type_of(name, rows, file)
        if rows is None or isinstance(rows.table, dict):
            return pa.string()
        found = _type_of(name, rows, file)
        if not (pa.types.is_string(found) or pa.types.is_large_string(found)):
            raise InputError(
                f"the column {name!r} of {file.name} is {found}, not string: choose another text column"
            )
        return found

    def skip(self, num_rows: int) -> int:
        """Skip up to `num_rows` rows, and return how many there were."""
        done = 0
        while done < num_rows and (reader := self._open()) is not None:
            with _failures_explained(self._files[self._index]):
                count = reader.skip(num_rows - done)
            self._file_row += count
            done += count
            if done < num_rows:
                self._end_file()
        self.position += done
        return done

    def read(self, num_rows: int) -> tuple[Rows, list[tuple[int, InputFile, int]]]:
        """Return the next `num_rows` rows, or fewer at the end of the input.

        Returns:
            The rows, and the files that they come from: index of the first row, file, and its number in the
            file.
        """
        types = self.types()
        tables: list[Any] = []
        problems: dict[int, str] = {}
        origins: list[tuple[int, InputFile, int]] = []
        done = 0
        while done < num_rows and (reader := self._open()) is not None:
            file = self._files[self._index]
            with _failures_explained(file):
                rows = reader.read(num_rows - done)
                if rows is None:
                    self._end_file()
                    continue
                table = self._typed(rows, types, file)
            problems |= {done + index: reason for index, reason in rows.problems.items()}
            origins.append((done, file, self._file_row))
            tables.append(table)
            done += table.num_rows
            self._file_row += table.num_rows
        self.position += done
        schema = pa.schema([(name, types.get(name, pa.string())) for name in self.columns])
        return Rows(pa.concat_tables([schema.empty_table(), *tables]), problems), origins

    def _typed(self, rows: Rows, types: Mapping[str, Any], file: InputFile) -> Any:  # noqa: ANN401
        """Return a table with columns of these types. Invalid values become null, and problems of rows."""
        columns = {}
        for name, expected in types.items():
            if isinstance(rows.table, dict):
                column = _array_of(rows.table[name], expected, name, rows.problems)
            else:
                column = _cast(_valid(rows.table[name], rows.problems), expected, name, file)
            if self._max_text_bytes and name in self._text_columns:
                column = _limited(column, self._max_text_bytes, rows.problems)
            columns[name] = column
        return pa.table(columns)

    def _open(self) -> Reader | None:
        if self._reader is None and self._index < len(self._files):
            file = self._files[self._index]
            with _failures_explained(file):
                self._reader = self._reader_of(file, self._stack)
            self._file_row = 0
        return self._reader

    def _reader_of(self, file: InputFile, stack: ExitStack) -> Reader:
        return _READERS[file.format](file, stack, self.columns, self._max_line_bytes)

    def _end_file(self) -> None:
        file = self._files[self._index]
        self._stack.close()
        self._reader = None
        self._index += 1
        self._done_bytes += file.size_bytes
        file.check_unchanged()


class _failures_explained:  # noqa: N801 - used like a function
    """Convert failures of reading into InputError with the name of the file."""

    def __init__(self, file: InputFile) -> None:
        self._file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_damage = isinstance(error, EOFError | pa.ArrowException | csv.Error | lzma.LZMAError | zlib.error)
        if is_damage or is_storage_failure(self._file.fs, error):
            reason = str(error).partition("\n")[0].rstrip(".")
            raise InputError(
                f"{self._file.name} cannot be read: {reason}. Repair the file, and repeat the command, which "
                "continues after the finished parts"
            ) from error


def _type_of(name: str, rows: Rows | None, file: InputFile) -> Any:  # noqa: ANN401 - pyarrow has no types
    if rows is None:
        return pa.string()
    if isinstance(rows.table, dict):
        inferred = _inferred(rows.table[name], name, file)
    else:
        kind = rows.table.schema.field(name).type
        try:
            inferred = plain_type(kind)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise InputError(
                f"the column {name!r} of {file.name} is {kind}, which is not supported ({error}): convert it"
            ) from error
    return pa.string() if pa.types.is_null(inferred) else inferred


def _inferred(values: list[Any], name: str, file: InputFile) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return the type of the values of a JSON column."""
    try:
        try:
            return pa.array(values).type
        except OverflowError:
            if not all(value is None or type(value) is int for value in values):
                raise
            return pa.array(values, pa.uint64()).type
    except OverflowError as error:
        raise InputError(
            f"the column {name!r} of {file.name} has integers beyond 64 bits: write them as strings"
        ) from error
    except (pa.ArrowException, TypeError) as error:
        raise InputError(
            f"the column {name!r} of {file.name} has values of several types ({error}): do not keep it, or "
            "convert it"
        ) from error


def _cast(column: Any, expected: Any, name: str, file: InputFile) -> Any:  # noqa: ANN401 - no types
    if column.type == expected:
        return column
    try:
        return column.cast(expected)
    except pa.ArrowException as error:
        raise InputError(
            f"the column {name!r} of {file.name} is {column.type}, but {expected} in the first file, and "
            "cannot be converted: use files with equal columns"
        ) from error


def _array_of(values: list[Any], expected: Any, name: str, problems: dict[int, str]) -> Any:  # noqa: ANN401
    for index, value in enumerate(values):
        if (defect := _defect(value, expected)) is not None:
            problems.setdefault(index, f"{name!r} {defect}")
            values[index] = None
    try:
        return pa.array(values, expected)
    except (pa.ArrowException, TypeError, OverflowError):
        for index, value in enumerate(values):
            try:
                pa.scalar(value, expected)
            except (pa.ArrowException, TypeError, OverflowError):
                problems.setdefault(index, f"{name!r} is not of type {expected}")
                values[index] = None
        return pa.array(values, expected)


def _defect(value: Any, expected: Any) -> str | None:  # noqa: ANN401 - parsed JSON
    """Return why pyarrow would silently change a value, or None. It truncates numbers and omits keys."""
    defects: Iterator[str | None] = iter(())
    if isinstance(value, float) and pa.types.is_integer(expected) and not value.is_integer():
        return f"is not of type {expected}"
    if pa.types.is_struct(expected) and isinstance(value, list):
        return f"is not of type {expected}"
    if pa.types.is_struct(expected) and isinstance(value, dict):
        types = {field.name: field.type for field in expected}
        defects = (
            _defect(member, types[key])
            if key in types
            else f"has the key {key!r}, which none of the first {TYPED_ROWS} rows has"
            for key, member in value.items()
        )
    elif pa.types.is_list(expected) and isinstance(value, list):
        defects = (_defect(element, expected.value_type) for element in value)
    return next((defect for defect in defects if defect is not None), None)


def _limited(column: Any, max_bytes: int, problems: dict[int, str]) -> Any:  # noqa: ANN401 - no types
    """Return a string column without texts of more than `max_bytes` bytes."""
    sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    is_long = sizes > max_bytes
    if not is_long.any():
        return column
    for index in np.flatnonzero(is_long):
        problems.setdefault(int(index), f"the text has {sizes[index]} bytes, but the limit is {max_bytes}")
    return pc.if_else(pa.array(is_long), None, column)


def _valid(column: Any, problems: dict[int, str]) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return a plain column without the rows that contain invalid UTF-8.

    Raises:
        pa.ArrowInvalid: The file is damaged in another way.
    """
    is_damaged = False
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        is_damaged = True
    column = plain(column)
    if not is_damaged:
        return column
    is_valid = np.array([_is_valid(column.take([index])) for index in range(len(column))])
    for index in np.flatnonzero(~is_valid):
        problems.setdefault(int(index), _INVALID_UTF8)
    return pc.if_else(pa.array(is_valid), column, pa.scalar(None, column.type))


def _is_valid(row: Any) -> bool:  # noqa: ANN401 - pyarrow has no types
    try:
        row.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
