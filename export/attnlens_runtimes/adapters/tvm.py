"""Apache TVM: imports the graph into Relax and compiles it with LLVM, with dynamic shapes, without tuning."""

from pathlib import Path
from typing import Any

from attnlens_runtimes.one_file import load_graph
from attnlens_runtimes.runtime import Feed, Opened, PythonRuntime


def open_graph(path: Path) -> Opened:
    """Compile the graph."""
    import tvm  # noqa: PLC0415 - only in its own process
    from tvm import relax  # noqa: PLC0415
    from tvm.relax.frontend.onnx import from_onnx  # noqa: PLC0415

    module = relax.transform.LegalizeOps()(from_onnx(load_graph(path)))
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())

    def run(feed: Feed) -> list[Any]:
        outputs = machine["main"](*map(tvm.runtime.tensor, feed.values()))
        return [tensor.numpy() for tensor in ([outputs] if hasattr(outputs, "numpy") else outputs)]

    return Opened(run)


RUNTIME = PythonRuntime("tvm", ("apache-tvm",), open_graph, also=("onnx",))
