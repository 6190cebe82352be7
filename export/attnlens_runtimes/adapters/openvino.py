"""OpenVINO, by default on the CPU, where it computes in bf16 if the CPU supports it, otherwise in fp32."""

from pathlib import Path

from attnlens.openvino import store_weights_in_bf16
from attnlens_runtimes.runtime import FP32, Opened, PythonRuntime, Settings

_PRECISIONS = {"f32": FP32, "bf16": "bf16", "f16": "fp16"}
_FP32 = Settings({"INFERENCE_PRECISION_HINT": "f32"})


def open_graph(path: Path) -> Opened:
    """Compile the graph with dynamic shapes and default settings."""
    return open_with(path, Settings({}))


def open_with(path: Path, settings: Settings) -> Opened:
    """Compile the graph with dynamic shapes, and with the same weights as in a server."""
    import openvino  # noqa: PLC0415 - only in its own process

    core, device = openvino.Core(), settings.device or "CPU"
    model = core.read_model(path)
    if settings.properties.get("INFERENCE_PRECISION_HINT") == "bf16":
        store_weights_in_bf16(model)
    compiled = core.compile_model(model, device, dict(settings.properties))
    # The precision that OpenVINO uses may differ from the hint.
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    processor = core.get_property(device, "FULL_DEVICE_NAME")
    return Opened(
        lambda feed: [*compiled(feed).values()], _PRECISIONS.get(precision, precision), str(processor).strip()
    )


RUNTIME = PythonRuntime("openvino", ("openvino",), open_graph, open_with=open_with, fp32_settings=_FP32)
