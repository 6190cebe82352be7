"""Writing ONNX files whose weights lie at known, aligned places, so that two graphs can share them.

`onnx/model.onnx` is an ordinary self-contained ONNX file, except that every weight of 1 KiB or more begins at
a multiple of 64 bytes. `onnx/model_attentions.onnx` says of each of those weights: "external data, in
`model.onnx`, from this byte, so many bytes". The standard allows any file and any offset there. Where the
weights do not fit into one protobuf message (2 GiB), both graphs point into `onnx/model.onnx_data` instead.

The protobuf wire format is written by hand (attnlens.wire) for the outer fields only: a message with a length
in front, again and again. A `doc_string` of blanks in front of the raw
data moves them to the next multiple of 64; parsers take fields in any order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from attnlens.wire import start_field
from attnlens_export.errors import GraphError

ALIGNMENT = 64
# Smaller tensors are stored in both files.
SHARED_FROM_BYTES = 1024
# A protobuf message must stay below 2 GiB; the graph's structure takes far less than the difference.
MAX_EMBEDDED_BYTES = 2**31 - 2**24

MODEL_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
GRAPH_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
TENSOR_RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER

# So much of a weight is copied at a time.
_BLOCK_BYTES = 2**24

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Place:
    """Where a weight's bytes lie: the file beside the graph, and the range within it."""

    location: str
    offset: int
    length: int


def write_embedded(path: Path, proto: onnx.ModelProto, weights: Mapping[str, Array]) -> dict[str, Place]:
    """Write a self-contained ONNX file with aligned weights.

    Args:
        path: the file to write.
        proto: the model without initializers.
        weights: the initializers by name.

    Returns:
        The place of each weight of at least `SHARED_FROM_BYTES`.
    """
    envelope = onnx.ModelProto()
    envelope.CopyFrom(proto)
    envelope.ClearField("graph")
    model = envelope.SerializeToString()
    nodes = proto.graph.SerializeToString()
    # The graph's length stands before it in 1 to 5 bytes and, through the padding, depends on how many.
    for header_size in range(2, 7):
        graph_offset = len(model) + header_size
        end, headers = _lay_out(weights, graph_offset + len(nodes))
        start = model + start_field(MODEL_GRAPH, end - graph_offset)
        if len(start) == graph_offset:
            break
    places = {}
    with path.open("wb") as file:
        file.write(start + nodes)
        for name, header in headers.items():
            file.write(header)
            if weights[name].nbytes >= SHARED_FROM_BYTES:
                places[name] = Place(path.name, file.tell(), weights[name].nbytes)
            file.writelines(_blocks(weights[name]))
    return places


def write_data(path: Path, weights: Mapping[str, Array]) -> dict[str, Place]:
    """Write the weights of at least `SHARED_FROM_BYTES` to a file of their own and return their places."""
    places = {}
    with path.open("wb") as file:
        for name, array in weights.items():
            if array.nbytes >= SHARED_FROM_BYTES:
                file.write(bytes(-file.tell() % ALIGNMENT))
                places[name] = Place(path.name, file.tell(), array.nbytes)
                file.writelines(_blocks(array))
    return places


def write_referring(
    path: Path, proto: onnx.ModelProto, weights: Mapping[str, Array], places: Mapping[str, Place]
) -> None:
    """Write an ONNX file that refers to the weights in `places` and holds the others itself."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    for name, array in weights.items():
        place = places.get(name)
        tensor = model.graph.initializer.add()
        tensor.CopyFrom(_describe(name, array))
        if place is None:
            tensor.raw_data = b"".join(_blocks(array))
            continue
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", place.location), ("offset", place.offset), ("length", place.length)):
            tensor.external_data.add(key=key, value=str(value))
    path.write_bytes(model.SerializeToString())


def verify_places(directory: Path, weights: Mapping[str, Array], places: Mapping[str, Place]) -> None:
    """Read the files back and compare each shared weight bit for bit with what was to be written.

    Raises:
        GraphError: a weight is not aligned or its bytes differ.
    """
    for name, place in places.items():
        if place.offset % ALIGNMENT:
            raise GraphError(
                f"{place.location}: {name} begins at byte {place.offset}, not a multiple of {ALIGNMENT}"
            )
        if not _are_stored(directory / place.location, place.offset, weights[name]):
            raise GraphError(f"{place.location}: the bytes of {name} are not those of the parameter")


def _are_stored(path: Path, offset: int, array: Array) -> bool:
    with path.open("rb") as file:
        file.seek(offset)
        return all(file.read(len(block)) == block for block in _blocks(array))


def _lay_out(weights: Mapping[str, Array], position: int) -> tuple[int, dict[str, bytes]]:
    """Return the end of the last weight and, by name, the bytes that precede each weight's own."""
    headers = {}
    for name, array in weights.items():
        headers[name] = header = next(
            header
            for header in _headers(name, array)
            if array.nbytes < SHARED_FROM_BYTES or (position + len(header)) % ALIGNMENT == 0
        )
        position += len(header) + array.nbytes
    return position, headers


def _headers(name: str, array: Array) -> Iterator[bytes]:
    """Yield what may precede a weight's bytes, each with one blank of padding more."""
    tensor = _describe(name, array)
    raw = start_field(TENSOR_RAW_DATA, array.nbytes)
    # Twice the alignment, since a longer header may also lengthen the length before it.
    for blanks in range(2 * ALIGNMENT):
        tensor.doc_string = " " * blanks
        fields = tensor.SerializeToString() + raw
        yield start_field(GRAPH_INITIALIZER, len(fields) + array.nbytes) + fields


def _describe(name: str, array: Array) -> onnx.TensorProto:
    data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.TensorProto(name=name, dims=array.shape, data_type=data_type)


def _blocks(array: Array) -> Iterator[bytes]:
    """Yield the bytes of an array, some rows at a time."""
    little_endian = array.dtype.newbyteorder("<")
    rows = array if array.ndim else array[None]
    step = max(1, _BLOCK_BYTES * len(rows) // max(1, array.nbytes))
    for start in range(0, len(rows), step):
        yield rows[start : start + step].astype(little_endian, copy=False).tobytes()
