"""Output formats of a part: Parquet, Arrow, npy and JSON lines. Equal content results in equal bytes.

Shapes: N rows, S tokens of all rows, D components (bytes for binary embeddings).
"""

import io
import json
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from attnlens_bulk.columns import UnsupportedTypeError, json_values
from attnlens_bulk.errors import InputError
from attnlens_bulk.vectors import Array, TokenVectors, VectorKind

OutputFormat: TypeAlias = Literal["parquet", "arrow", "npy", "jsonl"]

ROW, EMBEDDING = "row", "embedding"
TOKEN_IDS, TOKEN_VECTORS = "token_ids", "token_vectors"
OWN_COLUMNS: dict[VectorKind, tuple[str, ...]] = {
    "embeddings": (ROW, "id", EMBEDDING),
    "tokens": (ROW, "id", TOKEN_IDS, TOKEN_VECTORS),
}
"""Columns that the output adds."""

_METADATA_KEY = b"attnlens"
_JSON_FORMATS = {"float16": "%.5g", "float32": "%.9g", "int8": "%d", "uint8": "%d"}
_FLOAT_COMPRESSION = 1  # level of zstd: vectors hardly compress


def encode_part(
    output_format: OutputFormat,
    columns: Any,  # noqa: ANN401 - pyarrow has no types
    vectors: Array | TokenVectors,
    metadata: Mapping[str, Any],
) -> memoryview:
    """Return the content of a part file.

    Args:
        output_format: Format. "npy" is for embeddings alone.
        columns: Table (N rows) with the number of each row and the kept columns.
        vectors: Embeddings (N, D), or token vectors of N texts.
        metadata: Description of the vectors, stored in the schema of Parquet and Arrow.
    """
    if output_format in {"npy", "jsonl"}:
        content = io.BytesIO()
        if isinstance(vectors, np.ndarray) and output_format == "npy":
            np.save(content, vectors, allow_pickle=False)
        else:
            content.writelines(_json_lines(columns, vectors))
        return content.getbuffer()
    # One chunk, because the chunks depend on where reading has started, and determine the pages of the file.
    table = columns.combine_chunks()
    names = [*table.column_names, f"{TOKEN_IDS}.list.element"]
    for name, column in _arrow_columns(vectors).items():
        table = table.append_column(name, column)
    table = table.replace_schema_metadata({_METADATA_KEY: json.dumps(metadata, sort_keys=True)})
    sink = pa.BufferOutputStream()
    if output_format == "arrow":
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(
            table, sink, compression="zstd", compression_level=_FLOAT_COMPRESSION, use_dictionary=names
        )
    return memoryview(sink.getvalue())


def check_columns(output_format: OutputFormat, schema: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check that a format can contain columns of these types.

    Args:
        output_format: Format.
        schema: Plain types by name.
        names: Names of the columns in the output by their names in the input.

    Raises:
        InputError: It cannot. The message names column and type.
    """
    for name, output in names.items():
        try:
            columns = pa.table({output: pa.nulls(1, schema[name])})
            columns = columns.filter(pa.array([True]))
            encode_part(output_format, columns, np.zeros((1, 1), np.float32), {})
        except (pa.ArrowException, OSError) as error:
            raise _unsupported(name, schema[name], output_format, error) from error


def _unsupported(name: str, kind: Any, output_format: OutputFormat, error: Exception) -> InputError:  # noqa: ANN401
    reason = str(error).partition("\n")[0].rstrip(".")
    return InputError(
        f"the column {name!r} is {kind}, which {output_format} output cannot contain ({reason}): do not keep "
        "it, convert it, or use another output format"
    )


def _arrow_columns(vectors: Array | TokenVectors) -> dict[str, Any]:
    if not isinstance(vectors, TokenVectors):
        return {EMBEDDING: _fixed_size_lists(vectors)}
    offsets = pa.array(vectors.offsets)
    return {
        TOKEN_IDS: pa.ListArray.from_arrays(offsets, pa.array(vectors.ids)),
        TOKEN_VECTORS: pa.ListArray.from_arrays(offsets, _fixed_size_lists(vectors.vectors)),
    }


def _fixed_size_lists(vectors: Array) -> Any:  # noqa: ANN401 - pyarrow has no types
    components = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(components, vectors.shape[1])


def _json_lines(columns: Any, vectors: Array | TokenVectors) -> Iterator[bytes]:  # noqa: ANN401 - pyarrow has no types
    names = columns.column_names
    rows = zip(*(_json_column(name, columns[name]) for name in names), strict=True)
    for row, members in zip(rows, _json_members(vectors), strict=True):
        start = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, allow_nan=False)
        yield f"{start.removesuffix('}')}, {members}}}\n".encode()


def _json_column(name: str, column: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    try:
        return json_values(column)
    except (UnsupportedTypeError, pa.ArrowException) as error:
        raise _unsupported(name, column.type, "jsonl", error) from error


def _json_members(vectors: Array | TokenVectors) -> Iterator[str]:
    """Yield the members of the JSON object of each row."""
    if not isinstance(vectors, TokenVectors):
        for vector in _json_vectors(vectors):
            yield f'"{EMBEDDING}": {vector}'
        return
    written = _json_vectors(vectors.vectors)
    for start, end in pairwise(vectors.offsets.tolist()):
        of_text = ", ".join(islice(written, end - start))
        yield f'"{TOKEN_IDS}": {vectors.ids[start:end].tolist()}, "{TOKEN_VECTORS}": [{of_text}]'


def _json_vectors(vectors: Array) -> Iterator[str]:
    number = _JSON_FORMATS[vectors.dtype.name]
    form = f"[{', '.join([number] * vectors.shape[1])}]"
    return (form % tuple(vector.tolist()) for vector in vectors)
