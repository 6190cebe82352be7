"""Conversion of graphs with external weights for runtimes that require a single message or file."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def load_graph(path: Path) -> "onnx.ModelProto":
    """Read a graph and its weights.

    Unlike `onnx.load`, this supports links to weight files, as in download caches and after `attnlens layout
    --link`.
    """
    import onnx  # noqa: PLC0415 - only imported in the process of a runtime
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data  # noqa: PLC0415

    model = onnx.load(path, load_external_data=False)
    for tensor in filter(uses_external_data, model.graph.initializer):
        location = ExternalDataInfo(tensor)
        with (path.parent / location.location).open("rb") as file:
            file.seek(location.offset or 0)
            tensor.raw_data = file.read(location.length or -1)
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.DEFAULT
    return model


def write_one_file(path: Path, target: Path) -> "onnx.ModelProto":
    """Write a graph with embedded weights to `target`, and return it.

    Raises:
        ValueError: The graph exceeds the 2 GB limit of protobuf messages.
    """
    import onnx  # noqa: PLC0415 - only imported in the process of a runtime

    model = load_graph(path)
    onnx.save(model, target)
    return model
