"""Runs the graphs of a bundle in other ONNX runtimes, each in a separate process.

To add a runtime, add a module to `attnlens_runtimes.adapters`. This package imports neither torch nor a
runtime. A runtime is imported in the process started by `GraphProcess`, so a crash or a timeout is reported
as an error.
"""

from attnlens_runtimes.process import GraphProcess, RuntimeFailureError
from attnlens_runtimes.registry import RUNTIMES, UnknownRuntimeError, runtime_named
from attnlens_runtimes.runtime import FP32, Installed, NotInstalledError, PythonRuntime, Runtime, Settings

__all__ = [
    "FP32",
    "RUNTIMES",
    "GraphProcess",
    "Installed",
    "NotInstalledError",
    "PythonRuntime",
    "Runtime",
    "RuntimeFailureError",
    "Settings",
    "UnknownRuntimeError",
    "runtime_named",
]
