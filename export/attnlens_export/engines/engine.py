"""An engine: graphs in processes of their own, compiled with the properties that the server has for them."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from attnlens import openvino_settings
from attnlens.openvino_settings import OpenvinoPrecision, compile_properties
from attnlens.processor import multiplies_bf16
from attnlens_export.errors import EngineError
from attnlens_export.graph.names import EMBEDDINGS_PATH
from attnlens_export.int8.result import INT8_PATH
from attnlens_export.runtimes.graph import ProcessGraph
from attnlens_export.runtimes.measure import DEFAULT_TIMEOUT_S
from attnlens_model import EncoderConfig
from attnlens_runtimes import (
    FP32,
    RUNTIMES,
    GraphProcess,
    Installed,
    NotInstalledError,
    PythonRuntime,
    RuntimeFailureError,
    Settings,
)

OPENVINO = openvino_settings.PACKAGE
PRECISIONS: tuple[OpenvinoPrecision, ...] = ("fp32", "bf16", "int8")
CPU = "CPU"

GRAPHS: dict[OpenvinoPrecision, str] = {"fp32": EMBEDDINGS_PATH, "bf16": EMBEDDINGS_PATH, "int8": INT8_PATH}
"""The graph that embeddings in a precision are computed with."""


@dataclass(frozen=True)
class EngineOptions:
    """What may be chosen about the check of an engine.

    Attributes:
        precisions: those to measure; none: all that the bundle and the processor have.
        device: where to run, by the engine's own name for it.
        timeout_s: how long it may take to open a graph, and for each answer, in seconds.
    """

    precisions: Sequence[OpenvinoPrecision] = ()
    device: str = CPU
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass(frozen=True)
class NotMeasured:
    """A precision that can't be measured here.

    Attributes:
        precision: which.
        reason: why, as half a sentence.
    """

    precision: str
    reason: str


@dataclass(frozen=True)
class Engine:
    """OpenVINO on a device.

    Attributes:
        version: of its package.
        options: as they were chosen.
    """

    version: str
    options: EngineOptions
    _runtime: PythonRuntime

    def open(
        self,
        directory: Path,
        path: str,
        config: EncoderConfig,
        processes: ExitStack,
        precision: OpenvinoPrecision = "fp32",
        max_streams: int = 1,
    ) -> ProcessGraph:
        """Open a graph of the bundle, with a thread for each core.

        Args:
            directory: the bundle.
            path: the graph's place in it.
            config: the encoder's.
            processes: what ends the graph's process.
            precision: what embeddings are computed in.
            max_streams: of what threads are divided into: a server has several for batches side by side, and
                one for a batch alone. No more than there are threads.

        Raises:
            RuntimeFailureError: the engine refuses the graph, or computes in something else.
        """
        threads = len(os.sched_getaffinity(0))
        device = self.options.device
        properties = compile_properties(
            device, precision, threads=threads, num_streams=min(max_streams, threads)
        )
        command = self._runtime.command(Settings(properties, device))
        installed = Installed(OPENVINO, self.version, command)
        process = processes.enter_context(GraphProcess(installed, directory / path, self.options.timeout_s))
        expected = precision if precision == "bf16" else FP32
        if process.precision != expected:
            raise RuntimeFailureError(f"computes in {process.precision} where {expected} was asked for")
        return ProcessGraph(path, process, config)

    def choose(self, directory: Path) -> tuple[list[OpenvinoPrecision], list[NotMeasured]]:
        """Return the precisions to measure and, where none was chosen by name, those that can't be.

        Raises:
            EngineError: one was chosen that the bundle or the processor does not have.
        """
        named = self.options.precisions
        reasons = {precision: self._obstacle(directory, precision) for precision in named or PRECISIONS}
        chosen = [precision for precision, reason in reasons.items() if not reason]
        missing = [NotMeasured(precision, reason) for precision, reason in reasons.items() if reason]
        if named and missing:
            raise EngineError(
                f"{missing[0].precision} can't be measured: {missing[0].reason}; choose another --precision"
            )
        return chosen, missing

    def _obstacle(self, directory: Path, precision: OpenvinoPrecision) -> str:
        """Return why a precision can't be measured; empty where it can."""
        if precision == "int8" and not (directory / INT8_PATH).is_file():
            return "the bundle has no graph in int8"
        if precision == "bf16" and self.options.device == CPU and multiplies_bf16() is False:
            return "this processor has no instructions for bf16 (avx512_bf16 or amx_bf16 in /proc/cpuinfo)"
        return ""


def find_engine(options: EngineOptions | None = None) -> Engine:
    """Return OpenVINO as it is installed.

    Raises:
        NotInstalledError: it is not.
    """
    runtime = RUNTIMES[OPENVINO]
    assert isinstance(runtime, PythonRuntime)  # noqa: S101 - its adapter says so
    try:
        installed = runtime.find(None)
    except NotInstalledError as error:
        raise NotInstalledError(
            "--engine openvino needs openvino, which is not installed: pip install 'attnlens[openvino]'"
        ) from error
    return Engine(installed.version, options or EngineOptions(), runtime)
