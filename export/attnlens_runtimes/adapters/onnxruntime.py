"""ONNX Runtime on the CPU with default options."""

from pathlib import Path

from attnlens_runtimes.runtime import Opened, PythonRuntime


def open_graph(path: Path) -> Opened:
    """Open a session."""
    import onnxruntime  # noqa: PLC0415 - only in its own process

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return Opened(lambda feed: session.run(None, feed))


RUNTIME = PythonRuntime("onnxruntime", ("onnxruntime", "onnxruntime-gpu"), open_graph)
