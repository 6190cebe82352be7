"""What GetModel tells about the model and the server."""

from importlib.metadata import version

import onnxruntime

from attnlens.bundle import embedding_size
from attnlens.v1.encoder_service_pb2 import Limits, Model
from attnlens.v1.manifest_pb2 import Manifest
from attnlens_server.bundle import DATA_TYPES
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine


def describe_model(manifest: Manifest, config: ServerConfig, engine: Engine, *, max_tokens: int) -> Model:
    """Put together everything that a client needs to know."""
    versions = {f"export/{name}": text for name, text in manifest.tool_versions.items()}
    versions |= {"attnlens": version("attnlens"), "onnxruntime": onnxruntime.__version__}
    return Model(
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
            max_batch_tokens=engine.max_batch_tokens,
            max_message_bytes=config.max_message_bytes,
            max_request_text_bytes=config.request_text_limit,
        ),
        execution_providers=engine.embeddings.sessions.providers,
        parity=manifest.parity,
        versions=versions,
        embedding_size=embedding_size(manifest),
        prompts=manifest.prompts,
        default_prompt_name=manifest.default_prompt_name,
        precision=DATA_TYPES[config.precision],
    )
