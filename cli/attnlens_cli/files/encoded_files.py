"""Writes what was computed of texts as it comes, a layer at a time: `.npz`, or JSON.

Letters: T tokens of a text, D columns, L layers, H heads, U units (tokens or words).
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, BinaryIO, Protocol
from zipfile import ZipFile, ZipInfo

import click
import numpy as np

from attnlens_cli.files.json_text import json_line, json_of
from attnlens_cli.files.text_lines import Line
from attnlens_cli.files.vector_files import Array
from attnlens_client import AttentionPart, EncodedText

OWN_KEYS = frozenset(
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
"""What a line of JSON has beside the texts and the keys of the line that was read."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A text whose layers are to come.

    Attributes:
        index: the number of the row; None where there is one text.
        line: the text itself.
        prompt: what was put before it.
        encoded: its tokens, and how many there are.
        arrays: what there is of it at once, by name, such as `embedding`, shape (D,).
    """

    index: int | None
    line: Line
    prompt: str
    encoded: EncodedText
    arrays: Mapping[str, Array]

    def described(self) -> dict[str, Any]:
        """Return what it is, without tokens and arrays."""
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
    """What the layers of one output have in common, and the small arrays that come with each.

    Attributes:
        numbers: the layers, of which each is added once.
        special_token_mass: of each layer that was added, shape (H, U): what rows gave to special tokens.
        unit_ids: shape (T,): the row of each token, -1 for none. None: rows are tokens.
    """

    numbers: Sequence[int]
    heads: tuple[int, ...] = ()
    row_sum: str = ""
    shape: tuple[int, ...] = ()
    special_token_mass: list[Array] = field(default_factory=list)
    unit_ids: Array | None = None

    def add(self, part: AttentionPart) -> Array:
        """Note a layer, and return its weights (H, U, U), or gates (T, H).

        Raises:
            click.ClickException: it has other heads than the layers before.
        """
        rows = part.weights if part.pattern is None else part.pattern.dense(part.weights)
        if self.shape not in ((), rows.shape):
            raise click.ClickException(
                f"layer {part.layer} has {len(part.heads)} heads, others have {len(self.heads)}: "
                "choose layers that are alike with --layer"
            )
        self.shape, self.heads, self.row_sum = rows.shape, part.heads, part.row_sum
        self.unit_ids = part.unit_ids
        if part.special_token_mass is not None:
            self.special_token_mass.append(part.special_token_mass)
        return rows

    def described(self) -> dict[str, Any]:
        """Return which layers and heads they are."""
        return {"layers": list(self.numbers), "heads": list(self.heads), "row_sum": self.row_sum}


class EncodedWriter(Protocol):
    """Takes texts in order, and for each its layers, output by output."""

    def begin(self, text: Text) -> None:
        """Begin a text; the one before must have ended."""

    def add(self, name: str, numbers: Sequence[int], part: AttentionPart) -> None:
        """Add a layer of the output `name`, which has the layers `numbers`."""

    def end(self) -> None:
        """End a text."""


class NpzWriter:
    """Arrays by name in numpy's format. In a file of several texts names begin with `0/`, `1/`, ...

    docs/json_output.md lists the names. A layer is in memory at a time.
    """

    def __init__(self, archive: ZipFile) -> None:
        self._archive = archive
        self._member: IO[bytes] | None = None

    def begin(self, text: Text) -> None:
        """Write the tokens and what else is there at once."""
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

    def add(self, name: str, numbers: Sequence[int], part: AttentionPart) -> None:
        """Append a layer; the first one of an output writes the header of its array."""
        output = self._outputs.get(name)
        if output is None:
            self._close_member()
            output = self._outputs[name] = Layers(numbers)
        rows = output.add(part)
        if self._member is None:
            self._member = self._open(name)
            _write_header(self._member, rows.dtype, (len(numbers), *rows.shape))
        self._member.write(np.ascontiguousarray(rows).data)

    def end(self) -> None:
        """Write the small arrays of all layers, and `metadata`, a JSON description of all arrays."""
        self._close_member()
        metadata = self._text.described()
        for name, output in self._outputs.items():
            metadata[name] = output.described()
            if output.special_token_mass:
                self._write(f"{name}_special_token_mass", np.stack(output.special_token_mass))
            if output.unit_ids is not None:
                self._write(f"{name}_unit_ids", output.unit_ids)
        begun = self._text.line.as_json(self._text.index)
        self._write("metadata", np.array(json_line(begun, metadata)))

    def discard(self) -> None:
        """Close an array that is not complete, so that the archive can be closed."""
        with suppress(OSError, ValueError):
            self._close_member()

    def _write(self, name: str, array: Array) -> None:
        with self._open(name) as member:
            np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)

    def _open(self, name: str) -> IO[bytes]:
        index = self._text.index
        # The date of ZipInfo is always the same, and so are the bytes of two runs.
        info = ZipInfo(f"{name}.npy" if index is None else f"{index}/{name}.npy")
        return self._archive.open(info, "w", force_zip64=True)

    def _close_member(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.close()


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})


class JsonWriter:
    """One JSON object a line. A text is in memory at a time, so that every line is complete."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def begin(self, text: Text) -> None:
        """Begin an object."""
        self._text, self._outputs = text, dict[str, tuple[Layers, list[str]]]()

    def add(self, name: str, numbers: Sequence[int], part: AttentionPart) -> None:
        """Keep a layer as JSON."""
        output, rows = self._outputs.setdefault(name, (Layers(numbers), []))
        rows.append(json_of(output.add(part)))

    def end(self) -> None:
        """Write the line."""
        text = self._text
        tokens = [dataclasses.asdict(token) for token in text.encoded.tokens]
        begun = text.line.as_json(text.index)
        self._write(json_line(begun, text.described() | {"tokens": tokens}).removesuffix("}"))
        for name, array in text.arrays.items():
            self._write(f', "{name}": {json_of(array)}')
        for name, (output, rows) in self._outputs.items():
            described = output.described()
            if output.unit_ids is not None:
                described["unit_ids"] = output.unit_ids.tolist()
            told = [json.dumps(described)[1:-1]]
            if output.special_token_mass:
                told.append(f'"special_token_mass": {json_of(np.stack(output.special_token_mass))}')
            key = "gates" if name == "head_gates" else "weights"
            self._write(f', "{name}": {{{", ".join(told)}, "{key}": [')
            for number, layer in enumerate(rows):
                self._write(f"{', ' if number else ''}{layer}")
            self._write("]}")
        self._write("}\n")
        self._file.flush()

    def _write(self, piece: str) -> None:
        self._file.write(piece.encode())


@contextmanager
def npz_writer(file: BinaryIO) -> Iterator[NpzWriter]:
    """Open an archive in `file`, and complete it when the block ends."""
    archive = ZipFile(file, "w")
    writer = NpzWriter(archive)
    try:
        yield writer
    finally:
        writer.discard()
        archive.close()
