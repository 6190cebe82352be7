"""OpenVINO on a CPU. Intel GPUs have not been tested."""

import importlib.util
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from attnlens.openvino import (
    LENGTH_MULTIPLE,
    PACKAGE,
    OpenvinoPrecision,
    compile_properties,
    compute_precision,
    multiplies_bf16,
    store_weights_in_bf16,
)
from attnlens_server.bundle import Kind
from attnlens_server.config import EngineName
from attnlens_server.engine.runtimes.mapped_weights import inline_weights
from attnlens_server.engine.runtimes.openvino_session import OpenvinoSession
from attnlens_server.engine.runtimes.runtime import Division, TimeLimit
from attnlens_server.errors import StartupError

if TYPE_CHECKING:
    from openvino import CompiledModel, Core

CPU = "CPU"
# Tokens per batch, keyed by whether the device is the CPU. The value for GPUs has not been measured.
BATCH_TOKENS = {True: 512, False: 8192}
# OpenVINO compiles kernels for each batch shape, which takes milliseconds and about 1 MB. Use few shapes.
BATCH_COUNTS: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@cache
def openvino_core() -> "Core":
    """Return the process-wide core, which is never freed.

    For AMX, a core allocates a larger signal stack for the thread that compiles its first graph. If another
    thread freed the core, that stack would be freed with it, and the next Ctrl-C would crash the process.
    """
    import openvino  # noqa: PLC0415 - optional

    return openvino.Core()


class OpenvinoRuntime:
    """Opens graphs on one device. Implements `Runtime`."""

    name: EngineName = PACKAGE

    def __init__(self, device: str, precision: OpenvinoPrecision, main_kind: Kind = "embeddings") -> None:
        """Import OpenVINO and find the device.

        Args:
            device: Name of the device.
            precision: Precision of the main graph. Other graphs run in fp32.
            main_kind: Kind of the main graph.

        Raises:
            StartupError: OpenVINO is not installed, or the device does not exist or lacks the precision.
        """
        if importlib.util.find_spec(PACKAGE) is None:
            raise StartupError(
                "engine openvino was requested, but openvino is not installed: pip install "
                "'attnlens[openvino]', or use --engine onnxruntime"
            )
        import openvino  # noqa: PLC0415 - optional

        self._core = openvino_core()
        self.version: str = openvino.__version__.partition("-")[0]
        self.device = self._checked(device)
        self.processor = str(self._core.get_property(device, "FULL_DEVICE_NAME"))
        self.is_on_cpu = device == CPU
        self.batch_tokens = BATCH_TOKENS[self.is_on_cpu]
        self.length_multiple = LENGTH_MULTIPLE
        self.mixes_lengths = False
        self.batch_counts = BATCH_COUNTS
        self._precision = precision
        self._main_kind = main_kind
        # Each graph is read once. Its sessions share the weights, in the precision of the file or in bf16.
        self._models: dict[tuple[Path, OpenvinoPrecision], openvino.Model] = {}
        if precision == "bf16":
            self._check_bf16()

    def open(
        self, kind: Kind, graph: Path, division: Division, limit: TimeLimit | None = None
    ) -> OpenvinoSession:
        """Open a graph with one stream per concurrent batch."""
        precision = self._precision if kind == self._main_kind else "fp32"
        properties = compile_properties(
            self.device,
            precision,
            threads=division.threads * division.num_batches,
            num_streams=division.num_batches,
        )
        return OpenvinoSession(
            partial(self._compile, graph, precision), graph, self.device, properties, limit
        )

    def _compile(
        self, graph: Path, precision: OpenvinoPrecision, device: str, properties: dict[str, str]
    ) -> "CompiledModel":
        key = (graph, precision)
        if key not in self._models:
            model = self._core.read_model(inline_weights(graph) or graph)
            if compute_precision(self.device, precision) == "bf16":
                store_weights_in_bf16(model)
            self._models[key] = model
        return self._core.compile_model(self._models[key], device, properties)

    def fallback(self) -> Self | None:
        """Return None: OpenVINO is always requested explicitly."""
        return None

    def _checked(self, device: str) -> str:
        if device == CPU:  # always available; listing the others takes time and memory
            return device
        devices = self._core.available_devices
        found = {name.partition(".")[0] for name in devices} | {*devices}
        if device not in found:
            raise StartupError(
                f"device {device} was requested, but OpenVINO {self.version} finds only "
                f"{', '.join(devices)} on this machine: use one of them, or install the device's driver"
            )
        return device

    def _check_bf16(self) -> None:
        """Verify that the processor has bf16 instructions. OpenVINO also reports emulated precisions.

        Raises:
            StartupError: The processor lacks the instructions.
        """
        capabilities = self._core.get_property(self.device, "OPTIMIZATION_CAPABILITIES")
        if "BF16" in capabilities and (not self.is_on_cpu or multiplies_bf16() is not False):
            return
        raise StartupError(
            f"precision bf16 was requested, but {self.processor} ({self.device}) does not support it; "
            "Intel Xeon processors since Cooper Lake and Sapphire Rapids and AMD processors since Zen 4 do "
            "(avx512_bf16 or amx_bf16 in /proc/cpuinfo): use --precision fp32 or int8"
        )
