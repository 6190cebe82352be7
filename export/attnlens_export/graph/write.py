"""Writer of ONNX files with aligned weights at known offsets, so that several graphs can share them.

`onnx/model.onnx` is a self-contained ONNX file in which each weight of 1 KiB or more starts at a multiple of
64 bytes. `onnx/model_attentions.onnx` refers to these weights as external data: file name, offset and length.
The ONNX standard allows any file and any offset. If the weights do not fit into one protobuf message (2 GiB),
both graphs refer to `onnx/model.onnx_data` instead.

Only the outer fields are encoded by hand (see attnlens.wire): nested messages with a length prefix. A
`doc_string` of spaces before the raw data of a weight aligns it. Parsers accept fields in any order.
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
# A protobuf message must be smaller than 2 GiB. The difference is sufficient for the structure of a graph.
MAX_EMBEDDED_BYTES = 2**31 - 2**24

MODEL_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
GRAPH_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
TENSOR_RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER

_BLOCK_BYTES = 2**24

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Place:
    """Location of a weight: file name in the directory of the graph, and byte range."""

    location: str
    offset: int
    length: int


def write_embedded(path: Path, proto: onnx.ModelProto, weights: Mapping[str, Array]) -> dict[str, Place]:
    """Write a self-contained ONNX file with aligned weights.

    Args:
        path: Output file.
        proto: Model without initializers.
        weights: Initializers by name.

    Returns:
        Location of each weight of at least `SHARED_FROM_BYTES`.
    """
    envelope = onnx.ModelProto()
    envelope.CopyFrom(proto)
    envelope.ClearField("graph")
    model = envelope.SerializeToString()
    nodes = proto.graph.SerializeToString()
    # The length prefix of the graph has 1 to 5 bytes. Its size affects the padding, which affects the length.
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
    """Write the weights of at least `SHARED_FROM_BYTES` to a separate file and return their locations."""
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
    """Write an ONNX file that refers to the weights in `places` and contains all others."""
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
    """Read the files and compare each shared weight with the original, bit for bit.

    Raises:
        GraphError: A weight is not aligned, or its bytes differ.
    """
    for name, place in places.items():
        if place.offset % ALIGNMENT:
            raise GraphError(
                f"{place.location}: {name} starts at byte {place.offset}, not at a multiple of {ALIGNMENT}"
            )
        if not _are_stored(directory / place.location, place.offset, weights[name]):
            raise GraphError(f"{place.location}: the bytes of {name} differ from the parameter")


def _are_stored(path: Path, offset: int, array: Array) -> bool:
    with path.open("rb") as file:
        file.seek(offset)
        return all(file.read(len(block)) == block for block in _blocks(array))


def _lay_out(weights: Mapping[str, Array], position: int) -> tuple[int, dict[str, bytes]]:
    """Return the end offset of the last weight and, by name, the bytes before the data of each weight."""
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
    """Yield possible headers of a weight, with an increasing number of padding bytes."""
    tensor = _describe(name, array)
    raw = start_field(TENSOR_RAW_DATA, array.nbytes)
    # Twice the alignment, because a longer header can also lengthen the length prefix.
    for blanks in range(2 * ALIGNMENT):
        tensor.doc_string = " " * blanks
        fields = tensor.SerializeToString() + raw
        yield start_field(GRAPH_INITIALIZER, len(fields) + array.nbytes) + fields


def _describe(name: str, array: Array) -> onnx.TensorProto:
    data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    return onnx.TensorProto(name=name, dims=array.shape, data_type=data_type)


def _blocks(array: Array) -> Iterator[bytes]:
    """Yield the bytes of an array in blocks of rows."""
    little_endian = array.dtype.newbyteorder("<")
    rows = array if array.ndim else array[None]
    step = max(1, _BLOCK_BYTES * len(rows) // max(1, array.nbytes))
    for start in range(0, len(rows), step):
        yield rows[start : start + step].astype(little_endian, copy=False).tobytes()
