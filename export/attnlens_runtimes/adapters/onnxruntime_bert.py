"""ONNX Runtime on the CPU, after its transformer optimizer with `model_type="bert"`."""

from pathlib import Path

from attnlens_runtimes.one_file import write_one_file
from attnlens_runtimes.runtime import Opened, PythonRuntime


def open_graph(path: Path) -> Opened:
    """Optimize the graph with the optimizer's defaults and open a session."""
    import onnxruntime  # noqa: PLC0415 - only in its own process
    from onnxruntime.transformers.optimizer import optimize_model  # noqa: PLC0415

    write_one_file(path, Path("bert.onnx"))
    optimized = optimize_model("bert.onnx", model_type="bert").model.SerializeToString()
    session = onnxruntime.InferenceSession(optimized, providers=["CPUExecutionProvider"])
    return Opened(lambda feed: session.run(None, feed))


RUNTIME = PythonRuntime(
    "onnxruntime-bert", ("onnxruntime", "onnxruntime-gpu"), open_graph, also=("onnx", "sympy")
)
