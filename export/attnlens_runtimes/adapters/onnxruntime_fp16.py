"""ONNX Runtime on the CPU, with the graph that its own converter to fp16 makes."""

from pathlib import Path

from attnlens_runtimes.one_file import load_graph
from attnlens_runtimes.runtime import Opened, PythonRuntime


def open_graph(path: Path) -> Opened:
    """Convert the graph with the converter's defaults and open a session."""
    import onnxruntime  # noqa: PLC0415 - only in its own process
    from onnxruntime.transformers.float16 import convert_float_to_float16  # noqa: PLC0415

    converted = convert_float_to_float16(load_graph(path)).SerializeToString()
    session = onnxruntime.InferenceSession(converted, providers=["CPUExecutionProvider"])
    return Opened(lambda feed: session.run(None, feed), "fp16")


RUNTIME = PythonRuntime(
    "onnxruntime-fp16", ("onnxruntime", "onnxruntime-gpu"), open_graph, also=("onnx", "sympy")
)
