"""Writers of `embed` and `encode`: `.npy`, `.npz` and JSON lines.

Shapes: n rows of one call, N rows, D components, T tokens, L layers, H heads, U units (tokens or words).
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO, Protocol, TypeAlias
from zipfile import ZipFile, ZipInfo

import click
import numpy as np
import numpy.typing as npt

from attnlens_cli.files.text_lines import Line
from attnlens_cli.printable import json_line, json_of
from attnlens_client import AttentionPart, EncodedText

Array: TypeAlias = npt.NDArray[Any]

EMBED_KEYS = frozenset({"index", "embedding"})
"""Keys that `embed` adds to a JSON line."""


class VectorWriter(Protocol):
    """Writes embeddings in the order of the input."""

    num_rows: int

    def write(self, lines: Sequence[Line], vectors: Array) -> None:
        """Append `vectors`, shape (n, D), the embeddings of the texts of `lines`."""

    def finish(self) -> None:
        """Complete the file."""


class NpyWriter:
    """Writes an array (N, D) as `.npy`. `finish` sets N in the header.

    NumPy pads the header, so that its size does not depend on the number of rows.
    """

    def __init__(self, file: BinaryIO, like: Array) -> None:
        """Write the header of an empty array with the columns and data type of `like`, shape (0, D)."""
        self.num_rows = 0
        self._file, self._like = file, like
        self._write_header()
        self._header_size = file.tell()

    def write(self, lines: Sequence[Line], vectors: Array) -> None:
        """Append rows."""
        del lines
        self._file.write(np.ascontiguousarray(vectors, self._like.dtype).tobytes())
        self.num_rows += len(vectors)

    def finish(self) -> None:
        """Write the header with the number of rows."""
        self._file.seek(0)
        self._write_header()
        if self._file.tell() != self._header_size:
            raise AssertionError("the size of the .npy header changed")

    def _write_header(self) -> None:
        _write_header(self._file, self._like.dtype, (self.num_rows, self._like.shape[1]))


class JsonlWriter:
    """Writes one object per line: `{"index": 0, "text": "...", OTHER KEYS, "embedding": [...]}`."""

    def __init__(self, file: BinaryIO, like: Array) -> None:
        """Initialize with the data type of `like`."""
        self.num_rows = 0
        self._file, self._dtype = file, like.dtype

    def write(self, lines: Sequence[Line], vectors: Array) -> None:
        """Append one line per row."""
        for line, vector in zip(lines, vectors.astype(self._dtype, copy=False), strict=True):
            row = f'{line.as_json(self.num_rows)}, "embedding": {json_of(vector)}}}\n'
            self._file.write(row.encode())
            self.num_rows += 1
        self._file.flush()  # so that the reader of a pipe receives each line at once

    def finish(self) -> None:
        """Do nothing, because every line is complete."""


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})


ENCODE_KEYS = frozenset(
    {
        "index",
        "model",
        "model_version",
        "prompt",
        "num_tokens",
        "num_tokens_total",
        "truncated",
        "tokens",
        "embedding",
        "last_hidden_state",
        "attention",
        "attention_composed",
        "head_gates",
    }
)
"""Keys that `encode` adds to a JSON line."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A text, before its attention layers arrive.

    Attributes:
        index: Row number. None for a single text.
        line: The text and its line.
        prompt: The prompt that was prepended.
        encoded: The tokens.
        arrays: Arrays without a layer axis by name, such as `embedding`, shape (D,).
    """

    index: int | None
    line: Line
    prompt: str
    encoded: EncodedText
    arrays: Mapping[str, Array]

    def metadata(self) -> dict[str, Any]:
        """Return the JSON keys about the text, without tokens and arrays."""
        return {
            "model": self.encoded.model,
            "model_version": self.encoded.model_version,
            "prompt": self.prompt,
            "num_tokens": self.encoded.num_tokens,
            "num_tokens_total": self.encoded.num_tokens_total,
            "truncated": self.encoded.truncated,
        }


@dataclass(slots=True, eq=False)
class Layers:
    """Properties that all layers of one output share, and small arrays per layer.

    Attributes:
        indices: Layer indices in order.
        special_token_mass: (H, U) per added layer: attention of each row to special tokens.
        unit_ids: (T,): row of each token, -1 for omitted tokens. None if rows are tokens.
    """

    indices: Sequence[int]
    heads: tuple[int, ...] = ()
    row_sum: str = ""
    shape: tuple[int, ...] = ()
    special_token_mass: list[Array] = field(default_factory=list)
    unit_ids: Array | None = None

    def add(self, part: AttentionPart) -> Array:
        """Record a layer, and return its weights (H, U, U) or gates (T, H).

        Raises:
            click.ClickException: The layer has different heads than the previous layers.
        """
        rows = part.weights if part.pattern is None else part.pattern.dense(part.weights)
        if self.shape not in ((), rows.shape):
            raise click.ClickException(
                f"layer {part.layer} has {len(part.heads)} heads, others have {len(self.heads)}: "
                "select layers with equal heads with --layer"
            )
        self.shape, self.heads, self.row_sum = rows.shape, part.heads, part.row_sum
        self.unit_ids = part.unit_ids
        if part.special_token_mass is not None:
            self.special_token_mass.append(part.special_token_mass)
        return rows

    def metadata(self) -> dict[str, Any]:
        """Return the JSON keys about the layers, without arrays."""
        return {"layers": list(self.indices), "heads": list(self.heads), "row_sum": self.row_sum}


class EncodedWriter(Protocol):
    """Writes texts in order, and the layers of each text by output."""

    def begin(self, text: Text) -> None:
        """Begin a text. The previous text must have ended."""

    def add(self, name: str, indices: Sequence[int], part: AttentionPart) -> None:
        """Add a layer of the output `name`, which consists of the layers `indices`."""

    def end(self) -> None:
        """End a text."""


class NpzWriter:
    """Writes `.npz`. In a file of several texts, names start with `0/`, `1/`, ...

    docs/json_output.md lists the names. One layer is in memory at a time.
    """

    def __init__(self, archive: ZipFile) -> None:
        self._archive = archive
        self._member: IO[bytes] | None = None

    def begin(self, text: Text) -> None:
        """Write the tokens and the arrays without a layer axis."""
        self._text, self._outputs = text, dict[str, Layers]()
        tokens = text.encoded.tokens
        arrays = {
            "input_ids": np.array([token.id for token in tokens], np.int32),
            "tokens": np.array([token.text for token in tokens], np.str_),
            "token_sources": np.array([token.source for token in tokens], np.str_),
            "token_offsets": np.array(
                [(token.char_start, token.char_end) for token in tokens], np.int32
            ).reshape(-1, 2),
            "word_index": np.array(
                [-1 if token.word_index is None else token.word_index for token in tokens], np.int32
            ),
        }
        for name, array in (*arrays.items(), *text.arrays.items()):
            self._write(name, array)

    def add(self, name: str, indices: Sequence[int], part: AttentionPart) -> None:
        """Append a layer. The first layer of an output also writes the header of its array."""
        output = self._outputs.get(name)
        if output is None:
            self._close_member()
            output = self._outputs[name] = Layers(indices)
        rows = output.add(part)
        if self._member is None:
            self._member = self._open(name)
            _write_header(self._member, rows.dtype, (len(indices), *rows.shape))
        self._member.write(np.ascontiguousarray(rows).data)

    def end(self) -> None:
        """Write the small arrays, and `metadata`, a JSON description of all arrays."""
        self._close_member()
        metadata = self._text.metadata()
        for name, output in self._outputs.items():
            metadata[name] = output.metadata()
            if output.special_token_mass:
                self._write(f"{name}_special_token_mass", np.stack(output.special_token_mass))
            if output.unit_ids is not None:
                self._write(f"{name}_unit_ids", output.unit_ids)
        start = self._text.line.as_json(self._text.index)
        self._write("metadata", np.array(json_line(start, metadata)))

    def discard(self) -> None:
        """Close an incomplete array, so that the archive can be closed."""
        with suppress(OSError, ValueError):
            self._close_member()

    def _write(self, name: str, array: Array) -> None:
        with self._open(name) as member:
            np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)

    def _open(self, name: str) -> IO[bytes]:
        index = self._text.index
        # ZipInfo has a constant default date, which makes the file reproducible.
        info = ZipInfo(f"{name}.npy" if index is None else f"{index}/{name}.npy")
        return self._archive.open(info, "w", force_zip64=True)

    def _close_member(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.close()


class JsonWriter:
    """Writes one JSON object per line. One text is in memory at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def begin(self, text: Text) -> None:
        """Start collecting the layers of a text."""
        self._text, self._outputs = text, dict[str, tuple[Layers, list[str]]]()

    def add(self, name: str, indices: Sequence[int], part: AttentionPart) -> None:
        """Store a layer as JSON."""
        output, rows = self._outputs.setdefault(name, (Layers(indices), []))
        rows.append(json_of(output.add(part)))

    def end(self) -> None:
        """Write the line."""
        text = self._text
        tokens = [dataclasses.asdict(token) for token in text.encoded.tokens]
        start = text.line.as_json(text.index)
        self._write(json_line(start, text.metadata() | {"tokens": tokens}).removesuffix("}"))
        for name, array in text.arrays.items():
            self._write(f', "{name}": {json_of(array)}')
        for name, (output, rows) in self._outputs.items():
            metadata = output.metadata()
            if output.unit_ids is not None:
                metadata["unit_ids"] = output.unit_ids.tolist()
            members = [json.dumps(metadata)[1:-1]]
            if output.special_token_mass:
                members.append(f'"special_token_mass": {json_of(np.stack(output.special_token_mass))}')
            key = "gates" if name == "head_gates" else "weights"
            self._write(f', "{name}": {{{", ".join(members)}, "{key}": [')
            for index, layer in enumerate(rows):
                self._write(f"{', ' if index else ''}{layer}")
            self._write("]}")
        self._write("}\n")
        self._file.flush()

    def _write(self, text: str) -> None:
        self._file.write(text.encode())


@contextmanager
def npz_writer(file: BinaryIO) -> Iterator[NpzWriter]:
    """Return a writer whose archive is completed when the block ends."""
    archive = ZipFile(file, "w")
    writer = NpzWriter(archive)
    try:
        yield writer
    finally:
        writer.discard()
        archive.close()
