"""Description of the model and the server in GetModel and ListModels."""

from importlib.metadata import PackageNotFoundError, version

from attnlens.bundle import find_graph
from attnlens.v1.explanation_pb2 import ExplainMethod, PairMatrix
from attnlens.v1.manifest_pb2 import EngineCheck, GraphPurpose, Similarity
from attnlens.v1.model_pb2 import Limits, Model, ModelState
from attnlens_server.bundle import Bundle
from attnlens_server.bundle.manifest import PRECISIONS, is_known
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine
from attnlens_server.operations.attention import MAX_QUERIES
from attnlens_server.operations.service import ModelService


class ModelDescriber:
    """Builds `attnlens.v1.Model`."""

    def __init__(
        self,
        bundle: Bundle,
        config: ServerConfig,
        engine: Engine,
        service: ModelService,
        engine_check: EngineCheck | None = None,
    ) -> None:
        self._engine = engine
        manifest = bundle.manifest
        versions = {f"export/{name}": text for name, text in manifest.tool_versions.items()}
        versions |= {"attnlens": own_version(), engine.runtime.name: engine.runtime.version}
        outputs = find_graph(manifest, GraphPurpose.GRAPH_PURPOSE_ATTENTION).outputs
        self._model = Model(
            name=manifest.model_name,
            version=bundle.model.version,
            source=manifest.source,
            source_revision=manifest.source_revision,
            weights_license=manifest.weights_license,
            architecture=manifest.architecture,
            pooling=manifest.pooling,
            max_tokens=service.model.max_tokens,
            embedding_size=bundle.model.embedding_size,
            similarity=Similarity.ValueType(0 if bundle.model.classifier else bundle.model.similarity),
            prompts=manifest.prompts,
            default_prompt_name=manifest.default_prompt_name,
            supports_text_pairs=service.model.takes_pairs,
            precision=PRECISIONS[config.precision],
            outputs=[output for output in outputs if is_known(output)],
            parity=manifest.parity,
            explain_methods=[ExplainMethod.ValueType(method) for method in service.explain.methods],
            pair_matrices=[PairMatrix.ValueType(matrix) for matrix in service.compare.matrices],
            faithfulness=manifest.faithfulness,
            limits=Limits(
                max_inputs_per_request=config.inputs_limit,
                max_text_bytes=config.max_text_bytes,
                max_concurrent_inputs=config.max_concurrent_inputs,
                max_response_bytes=config.max_response_bytes,
                max_request_text_bytes=config.request_text_limit,
                max_request_bytes=config.request_limit,
                max_attention_queries=MAX_QUERIES,
                max_computed_tokens=config.max_computed_tokens,
            ),
            versions=versions,
            engine=engine.runtime.name,
            engine_check=engine_check,
            is_default=True,
            tokenizer_choice=manifest.tokenizer_choice,
            classifier=manifest.classifier if manifest.HasField("classifier") else None,
            publisher=manifest.publisher if manifest.HasField("publisher") else None,
            chat_template=manifest.chat_template if manifest.HasField("chat_template") else None,
        )

    def model(self) -> Model:
        """Return the description with the current state, device and limits."""
        is_degraded = not self._engine.can_run_attention
        self._model.state = ModelState.MODEL_STATE_DEGRADED if is_degraded else ModelState.MODEL_STATE_READY
        self._model.device = self._engine.runtime.device
        self._model.execution_providers[:] = self._engine.execution_providers
        self._model.limits.max_batch_tokens = self._engine.max_batch_tokens
        return self._model


def own_version() -> str:
    """Return the version of the installed package. A source tree on `sys.path` has none."""
    try:
        return version("attnlens")
    except PackageNotFoundError:
        return "unknown"
