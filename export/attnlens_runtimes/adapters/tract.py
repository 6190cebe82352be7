"""The Python package of tract, an engine in Rust."""

from pathlib import Path

from attnlens_runtimes.runtime import Opened, PythonRuntime


def open_graph(path: Path) -> Opened:
    """Load the graph with symbolic axes and optimize it."""
    import tract  # noqa: PLC0415 - only in its own process

    runnable = tract.onnx().load(str(path)).into_model().into_runnable()
    return Opened(lambda feed: [tensor.to_numpy() for tensor in runnable.run([*feed.values()])])


RUNTIME = PythonRuntime("tract", ("tract",), open_graph)
