"""IREE: compiles the graph with LLVM for the current CPU, with dynamic shapes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from attnlens_runtimes.one_file import write_one_file
from attnlens_runtimes.runtime import Feed, Opened, PythonRuntime


def open_graph(path: Path) -> Opened:
    """Compile the graph and load the module."""
    import iree.compiler.tools as compiler  # noqa: PLC0415 - only in its own process
    import iree.runtime as iree  # noqa: PLC0415

    model = write_one_file(path, Path("iree.onnx"))
    importer = [sys.executable, "-P", "-m", "iree.compiler.tools.import_onnx", "iree.onnx", "-o", "iree.mlir"]
    subprocess.run(importer, check=True)  # noqa: S603
    module = compiler.compile_file(
        "iree.mlir",
        target_backends=["llvm-cpu"],
        input_type="onnx",
        extra_args=["--iree-llvmcpu-target-cpu=host"],
    )
    context = iree.SystemContext(config=iree.Config("local-task"))
    context.add_vm_module(iree.VmModule.copy_buffer(context.instance, module))
    function = context.modules.module[model.graph.name]

    def run(feed: Feed) -> list[Any]:
        outputs = function(*feed.values())
        return [output.to_host() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]

    return Opened(run)


RUNTIME = PythonRuntime("iree", ("iree-base-runtime",), open_graph, also=("iree-base-compiler", "onnx"))
