"""The runtimes that can open a bundle's graphs, each in a process of its own behind one protocol.

Adding a runtime means adding a module to `attnlens_runtimes.adapters`. Nothing here imports torch or a
runtime: that happens in the process that `GraphProcess` starts, whose crash or silence is an answer too.
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
