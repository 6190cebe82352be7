"""Writes vectors as they come: `.npy` or JSON lines.

Letters: n rows of one call, N rows in all, D columns.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from attnlens_cli.files.json_text import json_of
from attnlens_cli.files.text_lines import Line

Array: TypeAlias = npt.NDArray[Any]

JSONL_KEYS = frozenset({"index", "embedding"})
"""What a line of `JsonlWriter` has of its own."""


class VectorWriter(Protocol):
    """Takes the rows in order."""

    num_rows: int

    def write(self, lines: Sequence[Line], vectors: Array) -> None:
        """Append the rows of `vectors`, shape (n, D), which belong to the texts of `lines`."""

    def finish(self) -> None:
        """Complete the file."""


class NpyWriter:
    """An array (N, D) in numpy's format; `finish` puts N into the header.

    numpy pads the header so that a larger number of rows never makes it longer.
    """

    def __init__(self, file: BinaryIO, like: Array) -> None:
        """Write a header for no rows. `like` has D columns and the element type."""
        self.num_rows = 0
        self._file, self._like = file, like
        self._write_header()
        self._header_size = file.tell()

    def write(self, lines: Sequence[Line], vectors: Array) -> None:
        """Append the rows."""
        del lines
        self._file.write(np.ascontiguousarray(vectors, self._like.dtype).tobytes())
        self.num_rows += len(vectors)

    def finish(self) -> None:
        """Put the number of rows into the header."""
        self._file.seek(0)
        self._write_header()
        if self._file.tell() != self._header_size:
            raise AssertionError("the .npy header changed its size")

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._like.dtype),
            "fortran_order": False,
            "shape": (self.num_rows, self._like.shape[1]),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


class JsonlWriter:
    """One object a line: `{"index": 0, "text": "...", "embedding": [...]}`, and other keys after the text."""

    def __init__(self, file: BinaryIO, like: Array) -> None:
        """Prepare to write; `like` has the element type."""
        self.num_rows = 0
        self._file, self._dtype = file, like.dtype

    def write(self, lines: Sequence[Line], vectors: Array) -> None:
        """Append a line for each row."""
        for line, vector in zip(lines, vectors.astype(self._dtype, copy=False), strict=True):
            told = f'{line.as_json(self.num_rows)}, "embedding": {json_of(vector)}}}\n'
            self._file.write(told.encode())
            self.num_rows += 1
        self._file.flush()  # whoever reads the other end of a pipe waits for it

    def finish(self) -> None:
        """Do nothing: every line is complete."""
