"""What GetModel tells about the model and the server."""

from importlib.metadata import PackageNotFoundError, version

import onnxruntime

from attnlens.bundle import embedding_size
from attnlens.v1.encoder_service_pb2 import Limits, Model
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_server.bundle import DATA_TYPES
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine


class ModelDescriber:
    """Puts together everything that a client needs to know."""

    def __init__(self, manifest: Manifest, config: ServerConfig, engine: Engine, *, max_tokens: int) -> None:
        self._engine = engine
        versions = {f"export/{name}": text for name, text in manifest.tool_versions.items()}
        versions |= {"attnlens": _own_version(), "onnxruntime": onnxruntime.__version__}
        self._model = Model(
            name=manifest.model_name,
            source=manifest.source,
            weights_license=manifest.weights_license,
            architecture=manifest.architecture,
            pooling=manifest.pooling,
            max_tokens=max_tokens,
            limits=Limits(
                max_inputs_per_request=config.inputs_limit,
                max_text_bytes=config.max_text_bytes,
                max_queue=config.max_queue,
                max_message_bytes=config.max_message_bytes,
                max_request_text_bytes=config.request_text_limit,
                max_request_bytes=config.request_limit,
            ),
            parity=manifest.parity,
            versions=versions,
            embedding_size=embedding_size(manifest),
            prompts=manifest.prompts,
            default_prompt_name=manifest.default_prompt_name,
            precision=DATA_TYPES[config.precision],
        )

    def model(self) -> Model:
        """Return it as things are now."""
        self._model.execution_providers[:] = self._engine.embeddings.sessions.providers
        self._model.limits.max_batch_tokens = self._engine.max_batch_tokens
        return self._model


def _own_version() -> str:
    """Return the version of the installed package; a source tree on the path of Python has none."""
    try:
        return version("attnlens")
    except PackageNotFoundError:
        return "unknown"
