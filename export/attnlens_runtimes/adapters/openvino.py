"""OpenVINO on the CPU."""

from pathlib import Path

from attnlens_runtimes.runtime import PythonRuntime, Run


def open_graph(path: Path) -> Run:
    """Compile the graph for any shape."""
    import openvino  # noqa: PLC0415 - only in its own process

    # By default a CPU that has bfloat16 computes in it.
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feed: [*compiled(feed).values()]


RUNTIME = PythonRuntime("openvino", ("openvino",), open_graph)
