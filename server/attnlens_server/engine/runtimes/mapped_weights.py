"""Rewrites a graph in memory so that ONNX Runtime maps its weights from the file instead of copying them.

An export stores the weights of the main graph inside the ONNX file, at aligned offsets, so that other graphs
can use them as external data. The rewritten graph uses them the same way, so that ONNX Runtime neither parses
nor copies them. Only its rearranged copies of matrices remain in the memory of a session.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

from attnlens.wire import LENGTH_DELIMITED, VARINT, Field, read_fields, start_field, write_varint

MIN_BYTES = 1024  # the export aligns weights of at least this size
ALIGNMENT = 64
# Field numbers of onnx.proto.
_GRAPH, _INITIALIZER = 7, 5
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14
_KEY, _VALUE = 1, 2
_EXTERNAL = 1


def with_mapped_weights(graph: Path) -> bytes | None:
    """Return the graph with its aligned weights as external data in its own file, or None if it has none.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not an ONNX model.
        IndexError: The file is not an ONNX model.
    """
    with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        parts: list[bytes] = []
        is_changed = False
        for field in read_fields(data, 0, len(data)):
            if field.number != _GRAPH or field.wire_type != LENGTH_DELIMITED:
                parts.append(data[field.start : field.end])
                continue
            fields = list(_graph_fields(data, field, graph.name))
            content = b"".join(part for part, _ in fields)
            parts += [start_field(_GRAPH, len(content)), content]
            is_changed = is_changed or any(is_mapped for _, is_mapped in fields)
    return b"".join(parts) if is_changed else None


def _graph_fields(data: mmap.mmap, graph: Field, location: str) -> Iterator[tuple[bytes, bool]]:
    """Yield the fields of a graph, and whether the field is a weight that is mapped."""
    for field in read_fields(data, graph.content, graph.end):
        if field.number == _INITIALIZER and field.end - field.content >= MIN_BYTES:
            tensor = _external(data, field, location)
            if tensor is not None:
                yield start_field(_INITIALIZER, len(tensor)) + tensor, True
                continue
        yield data[field.start : field.end], False


def _external(data: mmap.mmap, tensor: Field, location: str) -> bytes | None:
    """Return a tensor whose bytes are external data in the same file, or None if it cannot be mapped."""
    fields = list(read_fields(data, tensor.content, tensor.end))
    raw = [field for field in fields if field.number == _RAW_DATA]
    if len(raw) != 1 or raw[0].content % ALIGNMENT or raw[0].end - raw[0].content < MIN_BYTES:
        return None
    [weights] = raw
    entries = {"location": location, "offset": weights.content, "length": weights.end - weights.content}
    return b"".join(
        [
            *(data[field.start : field.end] for field in fields if field is not weights),
            *(_entry(key, str(value)) for key, value in entries.items()),
            write_varint(_DATA_LOCATION << 3 | VARINT),
            write_varint(_EXTERNAL),
        ]
    )


def _entry(key: str, value: str) -> bytes:
    texts = (key.encode(), value.encode())
    content = b"".join(
        start_field(number, len(text)) + text for number, text in zip((_KEY, _VALUE), texts, strict=True)
    )
    return start_field(_EXTERNAL_DATA, len(content)) + content
