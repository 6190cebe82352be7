"""Parts of a run: a fixed number of consecutive input rows, and one output file.

Texts are computed in batches of similar length. Equal texts are computed once.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from attnlens_bulk.errors import RowError
from attnlens_bulk.files import InputFile
from attnlens_bulk.formats import ROW
from attnlens_bulk.reading import Rows
from attnlens_bulk.vectors import Array, TextVectors, TokenVectors, joined

EmptyPolicy: TypeAlias = Literal["embed", "skip", "reject"]
NO_TEXT, EMPTY_TEXT = "no text", "the text is empty"


@dataclass(slots=True, eq=False)
class Part:
    """Rows of a part, their distinct texts, and the vectors as they arrive.

    Attributes:
        index: Index of the part.
        columns: Table with the number of each row and the kept columns.
        texts: Distinct valid texts, longest first.
        text_of_row: Index in `texts` for each row of the part, -1 for an invalid row.
        problems: Reason for each invalid row, by its index in the part.
        skipped: Reason for each row without content that is omitted on request.
        origins: Index of the first row, file, and its number in the file, for each block of rows.
        fractions: Fractions of the input at which the part begins and ends, approximately.
        vectors: Vectors of each of `texts`, or None until they arrive.
        num_missing: Number of texts without vectors.
        truncated: Indices of the texts that were truncated.
    """

    index: int
    columns: Any
    texts: list[str]
    text_of_row: npt.NDArray[np.int64]
    problems: dict[int, str]
    skipped: dict[int, str]
    origins: list[tuple[int, InputFile, int]]
    fractions: tuple[float, float]
    vectors: list[TextVectors | None] = field(init=False)
    num_missing: int = field(init=False)
    truncated: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.vectors = [None] * len(self.texts)
        self.num_missing = len(self.texts)

    def batches(self, size: int) -> Iterator[range]:
        """Yield ranges of texts of similar length."""
        for start in range(0, len(self.texts), size):
            yield range(start, min(start + size, len(self.texts)))

    def reject(self, text_index: int, reason: str) -> None:
        """Report all rows with this text."""
        for row in np.flatnonzero(self.text_of_row == text_index):
            self.problems.setdefault(int(row), reason)

    def _described(self, reasons: dict[int, str]) -> Iterator[dict[str, Any]]:
        """Yield descriptions of rows, in order."""
        for row in sorted(reasons):
            start, file, file_row = next(origin for origin in reversed(self.origins) if origin[0] <= row)
            yield {
                "row": self.columns[ROW][row].as_py(),
                "file": file.name,
                "file_row": file_row + row - start,
                "reason": reasons[row],
            }

    def check_rows(self) -> None:
        """Raise RowError if a row is invalid."""
        for entry in self._described(self.problems):
            raise RowError(
                f"row {entry['file_row']} of {entry['file']}: {entry['reason']}. Correct it, or skip bad "
                "rows, which a file then reports"
            )

    def report(self) -> bytes:
        """Return the invalid and skipped rows as JSON lines."""
        entries = self._described(self.skipped | self.problems)
        return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()

    def counts(self) -> dict[str, int]:
        """Return numbers of rows for the record of the part."""
        rows = self.text_of_row[self._is_valid()]
        empty = [index for index, text in enumerate(self.texts) if not text.strip()]
        return {
            "rows": int(self.columns.num_rows),
            "rejected_rows": len(self.problems | self.skipped),
            "truncated_rows": int(np.isin(rows, list(self.truncated)).sum()),
            "empty_rows": int(np.isin(rows, empty).sum()),
        }

    def _is_valid(self) -> npt.NDArray[np.bool_]:
        is_valid = self.text_of_row >= 0
        is_valid[list(self.problems)] = False
        return is_valid

    def result(self, like: TextVectors) -> tuple[Any, Array | TokenVectors]:
        """Return the columns and vectors of the valid rows, in order.

        Args:
            like: See `joined`.
        """
        is_valid = self._is_valid()
        vectors = [cast("TextVectors", self.vectors[text]) for text in self.text_of_row[is_valid]]
        return self.columns.filter(pa.array(is_valid)), joined(vectors, like)


def make_part(
    index: int,
    first_row: int,
    rows: Rows,
    origins: list[tuple[int, InputFile, int]],
    *,
    text_columns: Sequence[str],
    kept: dict[str, str],
    max_text_bytes: int,
    empty: EmptyPolicy,
    fractions: tuple[float, float],
) -> Part:
    """Return the part of these rows.

    Args:
        index: Index of the part.
        first_row: Number of the first row in the input.
        rows: Rows. Row numbers of the input count from 0.
        origins: See `Part`.
        text_columns: Columns that are joined by a line break to one text. Null is omitted.
        kept: Names of kept columns in the output by their name in the input.
        max_text_bytes: Maximum size of a text. 0 means no limit.
        empty: See `RunOptions.empty`.
        fractions: See `Part`.
    """
    table, problems = rows.table, dict(rows.problems)
    columns = [table[name].to_pylist() for name in text_columns]
    if "id" in kept.values():
        id_column = next(name for name, output in kept.items() if output == "id")
        for null_row in np.flatnonzero(table[id_column].is_null().to_numpy()):
            problems.setdefault(int(null_row), f"no value in the column {id_column!r}")
    distinct: dict[str, list[int]] = {}
    skipped: dict[int, str] = {}
    for row, values in enumerate(zip(*columns, strict=True)):
        texts = [value for value in values if value is not None]
        text = texts[0] if len(texts) == 1 else "\n".join(texts)
        if row in problems:
            continue
        if not texts or (empty != "embed" and not text.strip()):
            (skipped if empty == "skip" else problems)[row] = EMPTY_TEXT if texts else NO_TEXT
        elif max_text_bytes and len(text) > max_text_bytes // 4 and len(text.encode()) > max_text_bytes:
            problems[row] = f"the text has {len(text.encode())} bytes, but the limit is {max_text_bytes}"
        else:
            distinct.setdefault(text, []).append(row)
    ordered = sorted(distinct, key=len, reverse=True)
    text_of_row = np.full(table.num_rows, -1, dtype=np.int64)
    for number, text in enumerate(ordered):
        text_of_row[distinct[text]] = number
    numbers = pa.array(np.arange(first_row, first_row + table.num_rows, dtype=np.int64))
    output = {ROW: numbers} | {output: table[name] for name, output in kept.items()}
    return Part(index, pa.table(output), ordered, text_of_row, problems, skipped, origins, fractions)
