"""ONNX Runtime on the CPU, after its own conversion to fp16."""

from pathlib import Path
from typing import Any

import numpy as np

from attnlens_runtimes.one_file import load_graph
from attnlens_runtimes.runtime import Feed, Opened, PythonRuntime


def open_graph(path: Path) -> Opened:
    """Convert the graph with the converter's defaults and open a session."""
    import onnxruntime  # noqa: PLC0415 - only in its own process
    from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415

    converted = convert_float_to_float16(load_graph(path)).SerializeToString()
    session = onnxruntime.InferenceSession(converted, providers=["CPUExecutionProvider"])
    halves = {value.name for value in session.get_inputs() if value.type == "tensor(float16)"}

    def run(feed: Feed) -> list[Any]:
        # The converter also changes the types of inputs.
        half = {name: array.astype(np.float16) for name, array in feed.items() if name in halves}
        outputs: list[Any] = session.run(None, {**feed, **half})
        return outputs

    return Opened(run, "fp16")


RUNTIME = PythonRuntime(
    "onnxruntime-fp16", ("onnxruntime", "onnxruntime-gpu"), open_graph, also=("onnx", "sympy")
)
