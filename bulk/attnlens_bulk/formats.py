"""Output formats of a part: Parquet, Arrow, npy and JSON lines. Equal content results in equal bytes.

Shapes: N rows, D components (bytes for binary embeddings).
"""

import io
import json
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

OutputFormat: TypeAlias = Literal["parquet", "arrow", "npy", "jsonl"]

ROW, EMBEDDING = "row", "embedding"
OWN_COLUMNS = (ROW, "id", EMBEDDING)
"""Columns that the output adds."""

_METADATA_KEY = b"attnlens"
_JSON_FORMATS = {"float16": "%.5g", "float32": "%.9g", "int8": "%d", "uint8": "%d"}
_FLOAT_COMPRESSION = 1  # level of zstd: vectors hardly compress


def encode_part(
    output_format: OutputFormat,
    columns: Any,  # noqa: ANN401 - pyarrow has no types
    vectors: npt.NDArray[Any],
    metadata: Mapping[str, Any],
) -> memoryview:
    """Return the content of a part file.

    Args:
        output_format: Format.
        columns: Table (N rows) with the number of each row and the kept columns.
        vectors: Embeddings (N, D).
        metadata: Description of the vectors, stored in the schema of Parquet and Arrow.
    """
    if output_format == "npy":
        content = io.BytesIO()
        np.save(content, vectors, allow_pickle=False)
        return content.getbuffer()
    if output_format == "jsonl":
        return memoryview(_json_lines(columns, vectors).encode())
    components = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    lists = pa.FixedSizeListArray.from_arrays(components, vectors.shape[1])
    # One chunk, because the chunks depend on where reading has started, and determine the pages of the file.
    table = columns.combine_chunks().append_column(EMBEDDING, lists)
    table = table.replace_schema_metadata({_METADATA_KEY: json.dumps(metadata, sort_keys=True)})
    sink = pa.BufferOutputStream()
    if output_format == "arrow":
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        names = [field.name for field in table.schema if field.name != EMBEDDING]
        pq.write_table(
            table, sink, compression="zstd", compression_level=_FLOAT_COMPRESSION, use_dictionary=names
        )
    return memoryview(sink.getvalue())


def _json_lines(columns: Any, vectors: npt.NDArray[Any]) -> str:  # noqa: ANN401 - pyarrow has no types
    number = _JSON_FORMATS[vectors.dtype.name]
    lines = []
    for record, vector in zip(columns.to_pylist(), vectors.tolist(), strict=True):
        start = json.dumps(record, ensure_ascii=False, default=str).removesuffix("}")
        lines.append(f'{start}, "{EMBEDDING}": [{", ".join([number % value for value in vector])}]}}\n')
    return "".join(lines)
