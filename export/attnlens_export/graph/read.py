"""Reader of ONNX files that leaves the weights in the file. The outer fields are parsed by attnlens.wire."""

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import external_data_helper, helper, numpy_helper

from attnlens.wire import Field, read_fields
from attnlens_export.errors import GraphError
from attnlens_export.graph.write import GRAPH_INITIALIZER, MODEL_GRAPH, SHARED_FROM_BYTES, TENSOR_RAW_DATA

Array = npt.NDArray[np.generic]


def read_structure(path: Path) -> onnx.ModelProto:
    """Read an ONNX file without weights of 1 KiB or more.

    Returns:
        Model in which these weights are external data (location, offset and length), even if they are in the
        file itself.

    Raises:
        GraphError: The file is not an ONNX model.
    """
    model = onnx.ModelProto()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for field in read_fields(data, 0, len(data)):
                if field.number != MODEL_GRAPH:
                    model.MergeFromString(data[field.start : field.end])
                    continue
                for part in read_fields(data, field.content, field.end):
                    if part.number == GRAPH_INITIALIZER:
                        model.graph.initializer.append(_read_tensor(data, part, path.name))
                    else:
                        model.graph.MergeFromString(data[part.start : part.end])
    # Protobuf and mmap (for an empty file) raise ValueError.
    except (OSError, ValueError, IndexError) as error:
        raise GraphError(f"{path} is not valid ONNX: {error}") from error
    return model


def check_valid(path: Path) -> None:
    """Check a file with the ONNX checker, without loading its weights.

    The checker itself would load the whole file into memory, twice.

    Raises:
        GraphError: The file is not an ONNX model, or the size of a weight does not match its shape.
        onnx.checker.ValidationError: The checker found a problem.
    """
    structure = read_structure(path)
    for tensor in _external(structure):
        info = external_data_helper.ExternalDataInfo(tensor)
        size = math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        if info.length != size:
            raise GraphError(f"{path}: {tensor.name} has {info.length} bytes instead of {size}")
    locations = _locations(structure)
    with tempfile.TemporaryDirectory() as name:
        _write_stand_ins(locations, path.parent, Path(name))
        graph = Path(name) / f"{path.name}.structure"
        graph.write_bytes(structure.SerializeToString())
        onnx.checker.check_model(graph)


def _write_stand_ins(locations: Iterable[str], source: Path, directory: Path) -> None:
    """Create sparse files of the same size as the weight files.

    The checker only reads their size. It rejects symbolic and hard links, which bundles in a download cache
    and bundles that share files with a layout contain.
    """
    for location in locations:
        # The checker itself reports files that are missing or in another directory.
        if location == Path(location).name and (source / location).is_file():
            with (directory / location).open("wb") as stand_in:
                stand_in.truncate((source / location).stat().st_size)


def has_linked_weights(path: Path) -> bool:
    """Return whether links locate the weights of a graph in another directory, which ONNX Runtime rejects."""
    allowed = (path.parent.resolve(), path.resolve().parent)
    files = [(path.parent / location).resolve() for location in _locations(read_structure(path))]
    return not all(any(file.is_relative_to(each) for each in allowed) for file in files)


def external_files(path: Path) -> list[Path]:
    """Return the external weight files of a graph, sorted.

    Raises:
        GraphError: The file is not an ONNX model.
    """
    return sorted(path.parent / name for name in _locations(read_structure(path)) if name != path.name)


def _locations(structure: onnx.ModelProto) -> set[str]:
    return {external_data_helper.ExternalDataInfo(tensor).location for tensor in _external(structure)}


def _external(structure: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    return filter(external_data_helper.uses_external_data, structure.graph.initializer)


def locate_weights(structure: onnx.ModelProto, directory: Path) -> Path:
    """Replace the locations of external weights by paths without links, relative to a common directory.

    ONNX Runtime needs this directory to open the weights of an in-memory graph. It does not follow links that
    lead out of it.

    Args:
        structure: Graph with external weights.
        directory: Directory that the current locations are relative to.

    Returns:
        Common directory.
    """
    files = {location: (directory / location).resolve() for location in _locations(structure)}
    folder = Path(os.path.commonpath([path.parent for path in files.values()] or [directory.resolve()]))
    for tensor in _external(structure):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = files[entry.value].relative_to(folder).as_posix()
    return folder


def read_weight(directory: Path, tensor: onnx.TensorProto) -> Array:
    """Return an initializer as an array. External data is memory-mapped."""
    if not external_data_helper.uses_external_data(tensor):
        return numpy_helper.to_array(tensor).copy()
    info = external_data_helper.ExternalDataInfo(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).newbyteorder("<")
    shape = tuple(tensor.dims)
    # Copy-on-write, because PyTorch warns about read-only arrays.
    return np.memmap(directory / info.location, dtype, "c", info.offset or 0, shape)


def _read_tensor(data: mmap.mmap, field: Field, location: str) -> onnx.TensorProto:
    tensor, raw = onnx.TensorProto(), None
    for part in read_fields(data, field.content, field.end):
        if part.number == TENSOR_RAW_DATA and part.end - part.content >= SHARED_FROM_BYTES:
            raw = part
        else:
            tensor.MergeFromString(data[part.start : part.end])
    if raw is not None:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": location, "offset": raw.content, "length": raw.end - raw.content}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
    return tensor
