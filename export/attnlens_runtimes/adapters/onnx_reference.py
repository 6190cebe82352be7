"""The reference implementation of ONNX operators, in numpy."""

from pathlib import Path
from typing import Any

from attnlens_runtimes.one_file import load_graph
from attnlens_runtimes.runtime import Feed, Opened, PythonRuntime


def open_graph(path: Path) -> Opened:
    """Read the graph and its weights."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - only in its own process

    evaluator = ReferenceEvaluator(load_graph(path))

    def run(feed: Feed) -> list[Any]:
        return [*evaluator.run(None, dict(feed))]

    return Opened(run)


RUNTIME = PythonRuntime("onnx.reference", ("onnx",), open_graph)
