"""For the runtimes that take a graph as a single file."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def write_one_file(path: Path, target: Path) -> "onnx.ModelProto":
    """Write a graph to `target` with its weights inside and return it.

    Raises:
        ValueError: it is larger than the 2 GB of a protobuf message.
    """
    import onnx  # noqa: PLC0415 - only in the process of a runtime

    model = onnx.load(path)
    onnx.save(model, target)
    return model
