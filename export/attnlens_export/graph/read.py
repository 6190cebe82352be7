"""Reading an ONNX file without reading its weights.

The outer fields of the file are walked by hand, as `graph.write` writes them: see attnlens.wire.
"""

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
    """Read an ONNX file, but of every weight of 1 KiB or more only where it is.

    Returns:
        The model; such a weight, even one inside the file, is external data: location, offset and length.

    Raises:
        GraphError: the file is not an ONNX model.
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
    # Protobuf's own error is a ValueError, as is that of an empty file.
    except (OSError, ValueError, IndexError) as error:
        raise GraphError(f"{path} is not valid ONNX: {error}") from error
    return model


def check_valid(path: Path) -> None:
    """Check a file with ONNX's own checker, which would read all of it into memory, twice.

    Raises:
        GraphError: the file is not an ONNX model, a weight has another length than its shape says, or the
            weights are behind a link that ONNX Runtime does not follow.
        onnx.checker.ValidationError: as the checker says.
    """
    structure = read_structure(path)
    for tensor in _external(structure):
        info = external_data_helper.ExternalDataInfo(tensor)
        size = math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        if info.length != size:
            raise GraphError(f"{path}: {tensor.name} has {info.length} bytes instead of {size}")
    locations = _locations(structure)
    for location in locations:
        _check_link(path, location)
    with tempfile.TemporaryDirectory() as name:
        _write_stand_ins(locations, path.parent, Path(name))
        graph = Path(name) / f"{path.name}.structure"
        graph.write_bytes(structure.SerializeToString())
        onnx.checker.check_model(graph)


def _write_stand_ins(locations: Iterable[str], source: Path, directory: Path) -> None:
    """Make files as long as those with the weights, taking no space on the disk.

    The length is all that the checker looks at. Of the files themselves it would refuse links, symbolic and
    hard ones: bundles in a cache of downloads, and bundles that a layout was made from.
    """
    for location in locations:
        # The checker has a word for what is elsewhere, or missing.
        if location == Path(location).name and (source / location).is_file():
            with (directory / location).open("wb") as stand_in:
                stand_in.truncate((source / location).stat().st_size)


def _check_link(path: Path, location: str) -> None:
    """Refuse what ONNX Runtime refuses: weights that are neither in the graph's directory nor where it is.

    Raises:
        GraphError: a symbolic link leads elsewhere.
    """
    found = (path.parent / location).resolve()
    if not any(found.is_relative_to(each) for each in (path.parent.resolve(), path.resolve().parent)):
        raise GraphError(
            f"{path} has its weights in {location}, a symbolic link to {found}, and ONNX Runtime follows "
            "none out of a directory: copy the bundle with `cp -rL`"
        )


def external_files(path: Path) -> list[Path]:
    """Return the other files that hold weights of the graph in `path`, sorted.

    Raises:
        GraphError: the file is not an ONNX model.
    """
    return sorted(path.parent / name for name in _locations(read_structure(path)) if name != path.name)


def _locations(structure: onnx.ModelProto) -> set[str]:
    return {external_data_helper.ExternalDataInfo(tensor).location for tensor in _external(structure)}


def _external(structure: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    return filter(external_data_helper.uses_external_data, structure.graph.initializer)


def locate_weights(structure: onnx.ModelProto, directory: Path) -> Path:
    """Replace the locations of weights by paths without links, relative to a folder.

    ONNX Runtime maps the weights of a graph without a file of its own from that folder, and follows no link
    out of it.

    Args:
        structure: Graph that refers to its weights.
        directory: Directory that its locations are relative to.

    Returns:
        The folder.
    """
    files = {location: (directory / location).resolve() for location in _locations(structure)}
    folder = Path(os.path.commonpath([path.parent for path in files.values()] or [directory.resolve()]))
    for tensor in _external(structure):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = files[entry.value].relative_to(folder).as_posix()
    return folder


def read_weight(directory: Path, tensor: onnx.TensorProto) -> Array:
    """Return an initializer of a structure, mapped from its file in `directory` where it is external."""
    if not external_data_helper.uses_external_data(tensor):
        return numpy_helper.to_array(tensor).copy()
    info = external_data_helper.ExternalDataInfo(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).newbyteorder("<")
    shape = tuple(tensor.dims)
    # Copy on write, as above: PyTorch takes no array that can't be written to.
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
