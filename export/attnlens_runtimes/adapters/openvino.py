"""OpenVINO on the CPU. By default it computes in bf16 where the CPU has it, else in fp32."""

from pathlib import Path

from attnlens_runtimes.runtime import FP32, Opened, PythonRuntime

_PRECISIONS = {"f32": FP32, "bf16": "bf16", "f16": "fp16"}


def open_graph(path: Path, hint: str | None = None) -> Opened:
    """Compile the graph for any shape."""
    import openvino  # noqa: PLC0415 - only in its own process

    options = {} if hint is None else {"INFERENCE_PRECISION_HINT": hint}
    compiled = openvino.Core().compile_model(path, "CPU", options)
    # What it took of the hint, or chose without one.
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    return Opened(lambda feed: [*compiled(feed).values()], _PRECISIONS.get(precision, precision))


def open_in_fp32(path: Path) -> Opened:
    """Compile the graph for any shape, in fp32."""
    return open_graph(path, "f32")


RUNTIME = PythonRuntime("openvino", ("openvino",), open_graph, open_in_fp32=open_in_fp32)
