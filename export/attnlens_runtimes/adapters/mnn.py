"""MNN: converts the graph to its own format, with int32 inputs and dynamic shapes."""

from pathlib import Path
from typing import Any

import numpy as np

from attnlens_runtimes.one_file import write_one_file
from attnlens_runtimes.runtime import Feed, Opened, PythonRuntime


def open_graph(path: Path) -> Opened:
    """Convert the graph and load it."""
    # `_tools` is the converter. Do not import its wrapper MNN.tools, which runs pip and reports conversions
    # to a server of the vendor.
    import _tools  # noqa: PLC0415 - only in its own process
    import MNN  # noqa: PLC0415

    graph = write_one_file(path, Path("mnn.onnx")).graph
    files = ["--modelFile", "mnn.onnx", "--MNNModel", "graph.mnn"]
    _tools.mnnconvert(["mnnconvert", "-f", "ONNX", *files, "--bizCode", "none"])
    names = [value.name for value in graph.input], [value.name for value in graph.output]
    module = MNN.nn.load_module_from_file("graph.mnn", *names)

    def run(feed: Feed) -> list[Any]:
        inputs = [
            MNN.expr.const(array.astype(np.int32), array.shape, MNN.expr.NCHW, MNN.expr.int)
            for array in feed.values()
        ]
        return [output.read() for output in module.forward(inputs)]

    return Opened(run)


RUNTIME = PythonRuntime("mnn", ("MNN",), open_graph, also=("onnx",))
