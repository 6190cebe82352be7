"""ONNX Runtime on a CPU or with CUDA."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

import onnxruntime as ort

from attnlens_server.bundle import Kind
from attnlens_server.config import EngineName, Precision, Provider
from attnlens_server.engine.runtimes.device import DeviceSession
from attnlens_server.engine.runtimes.onnx_session import CUDA, OnnxSession
from attnlens_server.engine.runtimes.runtime import Division, TimeLimit
from attnlens_server.errors import StartupError

# The value for CUDA has not been measured.
BATCH_TOKENS = {"cpu": 256, "cuda": 8192}
# fp16 tensor cores require multiples of 8, and fewer different shapes reduce memory fragmentation.
LENGTH_MULTIPLES = {"cpu": 1, "cuda": 8}
# Session class per graph. Attention weights that were not requested stay on the device.
SESSIONS: Mapping[Kind, dict[str, type[OnnxSession]]] = {
    "embeddings": {"cpu": OnnxSession, "cuda": OnnxSession},
    "attention": {"cpu": OnnxSession, "cuda": DeviceSession},
    "contributions": {"cpu": OnnxSession, "cuda": OnnxSession},
    "logits": {"cpu": OnnxSession, "cuda": OnnxSession},
}


class OnnxRuntime:
    """Opens graphs on one execution provider. Implements `Runtime`."""

    name: EngineName = "onnxruntime"
    version: str = ort.__version__
    processor = ""

    def __init__(self, requested: Provider, device_id: int, precision: Precision = "fp32") -> None:
        """Select the execution provider.

        Raises:
            StartupError: CUDA was requested, but this build does not include it or the precision is int8.
        """
        self.provider = resolve_provider(requested, precision)
        self.device = self.provider.upper()
        self.is_on_cpu = self.provider == "cpu"
        self.batch_tokens = BATCH_TOKENS[self.provider]
        self.length_multiple = LENGTH_MULTIPLES[self.provider]
        self.mixes_lengths = True
        self.batch_counts: Sequence[int] = ()
        self._requested = requested
        self._device_id = device_id

    def open(
        self, kind: Kind, graph: Path, division: Division, limit: TimeLimit | None = None
    ) -> OnnxSession:
        """Open a graph. Each batch uses `division.threads` threads."""
        session_class = SESSIONS[kind][self.provider]
        return session_class(
            graph, self.provider, threads=division.threads, device_id=self._device_id, limit=limit
        )

    def fallback(self) -> Self | None:
        """Return the CPU runtime if the provider `auto` resolved to CUDA."""
        if self._requested == "auto" and self.provider == "cuda":
            return type(self)("cpu", self._device_id)
        return None


def resolve_provider(provider: Provider, precision: Precision = "fp32") -> Literal["cpu", "cuda"]:
    """Resolve the provider `auto` for this build of ONNX Runtime and the precision.

    Raises:
        StartupError: CUDA was requested, but is not in this build or the precision is int8.
    """
    if precision == "int8":
        if provider == "cuda":
            raise StartupError(
                "precision int8 requires a CPU, because CUDA has no kernels for its products: "
                "use --provider cpu, or --precision fp16 or fp32"
            )
        return "cpu"
    has_cuda = CUDA in ort.get_available_providers()
    if provider == "cuda" and not has_cuda:
        raise StartupError(
            f"provider cuda was requested, but this build of ONNX Runtime has only "
            f"{', '.join(ort.get_available_providers())}: install attnlens[gpu] instead of "
            "attnlens[server], or use --provider cpu"
        )
    if provider == "auto":
        return "cuda" if has_cuda else "cpu"
    return provider
