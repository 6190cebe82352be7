"""From a configuration to what runs the graphs."""

from attnlens_server.config import Precision, ServerConfig
from attnlens_server.engine.runtimes.runtime import Runtime


def choose_runtime(config: ServerConfig, precision: Precision) -> Runtime:
    """Return what was asked for. The other one is not even imported, for the sake of memory.

    Args:
        config: of the server.
        precision: of embeddings.

    Raises:
        StartupError: it is not installed, or has not what was asked for.
    """
    if config.engine == "openvino":
        from attnlens_server.engine.runtimes.openvino_runtime import OpenvinoRuntime  # noqa: PLC0415

        assert precision != "fp16"  # noqa: S101 - the configuration has refused it
        return OpenvinoRuntime(config.device, precision)
    from attnlens_server.engine.runtimes.onnx_runtime import OnnxRuntime  # noqa: PLC0415

    return OnnxRuntime(config.provider, config.device_id, precision)
