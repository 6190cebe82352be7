"""A bundle that is opened, and all that answers calls for it, whatever carries them."""

import logging

from attnlens_server.bundle import Model, open_bundle
from attnlens_server.bundle.engine_checks import heed_engine_check
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.engine import Engine
from attnlens_server.grpc_api.calls import Calls
from attnlens_server.grpc_api.methods import EncoderService
from attnlens_server.grpc_api.model_info import ModelDescriber
from attnlens_server.grpc_api.responses import Responses, reply_costs
from attnlens_server.serving.service import ModelService
from attnlens_server.text import TextEncoder

logger = logging.getLogger(__name__)


class ServedModel:
    """The parts of a server behind its protocol. Nothing runs yet: `engine.start` comes next.

    Attributes:
        bundle: what was opened.
        model: what it says of its model.
        max_tokens: the longest input, special tokens included.
        engine: runs the graphs.
        service: answers jobs.
        calls: the life of calls.
        methods: answer messages.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Open and verify the bundle.

        Raises:
            StartupError: the bundle is refused, or the engine, or the engine for this bundle.
            ConfigError: an option does not fit it.
        """
        self.bundle = open_bundle(config.bundle, config.precision)
        self.model = self.bundle.model
        self.max_tokens = _max_tokens(self.model, config)
        logger.debug(
            "bundle verified",
            extra={"bundle": str(config.bundle), "model": self.model.name, "version": self.model.version},
        )
        self.engine = Engine(self.bundle, config)
        runtime = self.engine.runtime
        engine_check = (
            heed_engine_check(
                self.bundle,
                runtime.name,
                runtime.device,
                version=runtime.version,
                processor=runtime.processor,
            )
            if runtime.processor
            else None
        )
        path = self.bundle.tokenizer_path
        self.service = ModelService(
            self.bundle,
            config,
            self.engine,
            TextEncoder(path, self.max_tokens) if path else None,
            max_tokens=self.max_tokens,
            costs=reply_costs(config.max_message_bytes),
        )
        self.calls = Calls(
            self.service.admission,
            self.service.check_serving,
            self.service.workers,
            max_calls=config.max_calls,
            stall_timeout_s=config.stall_timeout_s,
            log_requests=config.log_requests,
        )
        self.methods = EncoderService(
            self.service,
            Responses(self.model.name, self.model.version, runtime.name, self.bundle.precision),
            ModelDescriber(self.bundle, config, self.engine, self.service, engine_check),
        )


def _max_tokens(model: Model, config: ServerConfig) -> int:
    if config.max_tokens is None:
        return model.max_tokens
    limit = model.max_positions
    if config.max_tokens > limit:
        raise ConfigError(
            f"max_tokens is {config.max_tokens}: it must be from 1 to {limit}, the positions of the model"
        )
    return config.max_tokens
