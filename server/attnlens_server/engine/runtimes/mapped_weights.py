"""Rewrites a graph in memory so that ONNX Runtime maps its weights from the file instead of copying them.

An export stores the weights of the main graph inside the ONNX file, at aligned offsets, so that other graphs
can use them as external data. The rewritten graph uses them the same way, so that ONNX Runtime neither parses
nor copies them. Only its rearranged copies of matrices remain in the memory of a session.

ONNX Runtime rejects external data that a symbolic link locates outside the directory of the graph, as in the
cache of the Hugging Face hub. A rewritten graph names the files that the links point to.
"""

import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from attnlens.wire import LENGTH_DELIMITED, VARINT, Field, read_fields, start_field, write_varint
from attnlens_server.bundle.files import external_locations, read_entry
from attnlens_server.errors import StartupError

MIN_BYTES = 1024  # the export aligns weights of at least this size
ALIGNMENT = 64
# Field numbers of onnx.proto.
_GRAPH, _INITIALIZER = 7, 5
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14
_KEY, _VALUE = 1, 2
_EXTERNAL = 1


class LocatedGraph(NamedTuple):
    """A graph whose external data is in files of a folder."""

    content: bytes
    folder: Path


def locate_weights(graph: Path, *, is_mapped: bool) -> LocatedGraph | None:
    """Return the graph with the actual locations of its external data, or None if it needs no change.

    Args:
        graph: ONNX file.
        is_mapped: Whether its own aligned weights become external data in the same file.

    Raises:
        OSError: A file cannot be read.
        StartupError: The file is not an ONNX model.
        ValueError: The file is not an ONNX model.
        IndexError: The file is not an ONNX model.
    """
    files = {location: (graph.parent / location).resolve() for location in external_locations(graph)}
    folder = Path(os.path.commonpath([path.parent for path in (graph.resolve(), *files.values())]))
    locations = {location: path.relative_to(folder).as_posix() for location, path in files.items()}
    own = graph.resolve().relative_to(folder).as_posix()

    def change(data: mmap.mmap, tensor: Field) -> bytes | None:
        mapped = _external(data, tensor, own) if is_mapped else None
        return mapped or _moved(data, tensor, locations)

    content = _rewrite(graph, change)
    return None if content is None else LocatedGraph(content, folder)


def inline_weights(graph: Path) -> bytes | None:
    """Return the graph with its external data inside, or None if no link locates them in another directory.

    For runtimes that reject such links and cannot be told where the data are.

    Raises:
        OSError: A file cannot be read.
    """
    try:
        locations = external_locations(graph)
    except StartupError:  # the runtime reports it
        return None
    files = {location: (graph.parent / location).resolve() for location in locations}
    if all(path.is_relative_to(graph.parent.resolve()) for path in files.values()):
        return None

    with ExitStack() as stack:
        weights = {location: _map(path, stack) for location, path in files.items()}
        return _rewrite(graph, lambda data, tensor: _inlined(data, tensor, weights))


def _rewrite(graph: Path, change: Callable[[mmap.mmap, Field], bytes | None]) -> bytes | None:
    """Return the graph with changed initializers, or None if `change` returns None for each of them."""
    with ExitStack() as stack:
        data, parts, is_changed = _map(graph, stack), [], False
        for field in read_fields(data, 0, len(data)):
            if field.number != _GRAPH or field.wire_type != LENGTH_DELIMITED:
                parts.append(data[field.start : field.end])
                continue
            content = []
            for part in read_fields(data, field.content, field.end):
                tensor = change(data, part) if part.number == _INITIALIZER else None
                is_changed = is_changed or tensor is not None
                if tensor is None:
                    content.append(data[part.start : part.end])
                else:
                    content += [start_field(_INITIALIZER, len(tensor)), tensor]
            parts += [start_field(_GRAPH, sum(map(len, content))), *content]
    return b"".join(parts) if is_changed else None


def _map(path: Path, stack: ExitStack) -> mmap.mmap:
    file = stack.enter_context(path.open("rb"))
    return stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _external(data: mmap.mmap, tensor: Field, location: str) -> bytes | None:
    """Return a tensor whose bytes are external data in the same file, or None if it cannot be mapped."""
    if tensor.end - tensor.content < MIN_BYTES:
        return None
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


def _moved(data: mmap.mmap, tensor: Field, locations: Mapping[str, str]) -> bytes | None:
    """Return a tensor with the new location of its external data, or None if that is the old one."""
    parts, is_moved = [], False
    for field in read_fields(data, tensor.content, tensor.end):
        part = data[field.start : field.end]
        for old, new in locations.items():
            if field.number == _EXTERNAL_DATA and part == _entry("location", old) and old != new:
                part, is_moved = _entry("location", new), True
                break
        parts.append(part)
    return b"".join(parts) if is_moved else None


def _inlined(data: mmap.mmap, tensor: Field, weights: Mapping[str, mmap.mmap]) -> bytes | None:
    """Return a tensor that contains its external data, or None if it has none."""
    fields = list(read_fields(data, tensor.content, tensor.end))
    entries = dict(
        read_entry(data, field.content, field.end) for field in fields if field.number == _EXTERNAL_DATA
    )
    if b"location" not in entries:
        return None
    content = weights[entries[b"location"].decode()]
    start = int(entries.get(b"offset", 0))
    raw = content[start : start + int(entries.get(b"length", len(content)))]
    kept = (field for field in fields if field.number not in (_EXTERNAL_DATA, _DATA_LOCATION))
    return b"".join(
        [*(data[field.start : field.end] for field in kept), start_field(_RAW_DATA, len(raw)), raw]
    )


def _entry(key: str, value: str) -> bytes:
    texts = (key.encode(), value.encode())
    content = b"".join(
        start_field(number, len(text)) + text for number, text in zip((_KEY, _VALUE), texts, strict=True)
    )
    return start_field(_EXTERNAL_DATA, len(content)) + content
