"""Files of a graph and detection of changes to them."""

import mmap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from attnlens.bundle import FileState, read_state
from attnlens.wire import LENGTH_DELIMITED, Field, read_fields
from attnlens_server.errors import StartupError, UnusableGraphError

# Fields of onnx.proto that can contain tensors, by message.
_MODEL = {7: "graph", 20: "training", 25: "function"}
_GRAPH = {1: "node", 5: "tensor", 15: "sparse"}
_NODE = {5: "attribute"}
_ATTRIBUTE = {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"}
_MESSAGES: dict[str, dict[int, str]] = {
    "model": _MODEL,
    "training": {1: "graph", 2: "graph"},
    "graph": _GRAPH,
    "function": {7: "node", 11: "attribute"},
    "node": _NODE,
    "attribute": _ATTRIBUTE,
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_KEY, _VALUE = 1, 2  # fields of an entry of TensorProto.external_data
_LOCATION, _OFFSET, _LENGTH = b"location", b"offset", b"length"


def external_locations(graph: Path) -> dict[str, int]:
    """Return the external weight files of an ONNX file with the end of the last tensor in each, in bytes.

    Reads the wire format directly, since the server does not depend on onnx.

    Raises:
        StartupError: The file is not an ONNX model.
    """
    ends: dict[str, int] = {}
    try:
        with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for location, end in _locations(data):
                ends[location] = max(end, ends.get(location, 0))
            return ends
    except (OSError, ValueError, IndexError) as error:
        raise StartupError(f"{graph} is not valid ONNX: {error}") from error


def _locations(data: mmap.mmap) -> Iterator[tuple[str, int]]:
    """Yield the file and the end of each external tensor."""
    waiting = [("model", 0, len(data))]
    while waiting:
        kind, position, end = waiting.pop()
        entries: dict[bytes, bytes] = {}
        for field in read_fields(data, position, end):
            part = _MESSAGES[kind].get(field.number)
            if part is None or field.wire_type != LENGTH_DELIMITED:
                continue
            if part == "entry":
                entries |= [read_entry(data, field.content, field.end)]
            else:
                waiting.append((part, field.content, field.end))
        if _LOCATION in entries:
            offset, length = (int(entries.get(key, b"0")) for key in (_OFFSET, _LENGTH))
            if offset < 0 or length < 0:
                raise ValueError("a tensor has a negative offset or length")
            yield entries[_LOCATION].decode("utf-8"), offset + length


def read_entry(data: mmap.mmap, position: int, end: int) -> tuple[bytes, bytes]:
    """Return key and value of an external_data entry. The last occurrence of a field wins, as in protobuf."""
    texts: dict[int, Field] = {field.number: field for field in read_fields(data, position, end)}
    key, value = (texts.get(number) for number in (_KEY, _VALUE))
    return (
        data[key.content : key.end] if key else b"",
        data[value.content : value.end] if value else b"",
    )


def graph_files(directory: Path, graph: str, listed: Collection[str]) -> frozenset[str]:
    """Return the paths of all files of a graph, including the graph itself.

    Raises:
        StartupError: A weight file is not listed in the manifest, or is too short.
    """
    locations = external_locations(directory / graph)
    paths = {location: str(PurePosixPath(graph).parent / location) for location in locations}
    for location in sorted(set(paths.values()) - set(listed)):
        raise StartupError(
            f"{directory / graph} has weights in {location!r}, which is not listed in the manifest: export "
            "the bundle again"
        )
    for location, end in locations.items():
        size = read_state(directory / paths[location]).size_bytes
        if end > size:
            raise StartupError(
                f"{directory / graph} has weights up to byte {end} of {paths[location]!r}, which has {size} "
                "bytes: export the bundle again"
            )
    return frozenset({graph, *paths.values()})


class MappedFiles:
    """Files that ONNX Runtime has mapped into memory. Writes to them would change results."""

    def __init__(self, states: Mapping[Path, FileState]) -> None:
        """Store the state of each file, read before its hash was verified."""
        self._states = states

    def check(self) -> None:
        """Compare the size and modification time of each file with its stored state.

        Removed and replaced files are ignored, since the mapped file is unchanged.

        Raises:
            UnusableGraphError: A file was altered.
        """
        for path, before in self._states.items():
            try:
                now = read_state(path)
            except OSError:
                continue
            is_same_file = (now.device, now.inode) == (before.device, before.inode)
            if is_same_file and (now.size_bytes, now.modified_ns) != (before.size_bytes, before.modified_ns):
                raise UnusableGraphError(
                    f"{path} was altered while in use: restore the bundle and restart the server. To replace "
                    "a bundle, write the new one to another path and rename it"
                )
