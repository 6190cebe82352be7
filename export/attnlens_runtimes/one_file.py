"""For the runtimes that take a graph as one message, or a single file, with its weights inside."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def load_graph(path: Path) -> "onnx.ModelProto":
    """Read a graph and its weights.

    Unlike `onnx.load` also where the file with the weights is a link, as in a cache of downloads or after
    `attnlens layout`, which makes hard links to it.
    """
    import onnx  # noqa: PLC0415 - only in the process of a runtime
    from onnx.external_data_helper import ExternalDataInfo, uses_external_data  # noqa: PLC0415

    model = onnx.load(path, load_external_data=False)
    for tensor in filter(uses_external_data, model.graph.initializer):
        place = ExternalDataInfo(tensor)
        with (path.parent / place.location).open("rb") as file:
            file.seek(place.offset or 0)
            tensor.raw_data = file.read(place.length or -1)
        tensor.ClearField("external_data")
        tensor.data_location = onnx.TensorProto.DEFAULT
    return model


def write_one_file(path: Path, target: Path) -> "onnx.ModelProto":
    """Write a graph to `target` with its weights inside and return it.

    Raises:
        ValueError: it is larger than the 2 GB of a protobuf message.
    """
    import onnx  # noqa: PLC0415 - only in the process of a runtime

    model = load_graph(path)
    onnx.save(model, target)
    return model
