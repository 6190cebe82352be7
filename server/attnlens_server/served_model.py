"""A model with everything that serves it, independent of the transport."""

import logging

from attnlens.v1.manifest_pb2 import EngineCheck
from attnlens_server.bundle import Bundle, Model
from attnlens_server.bundle.engine_checks import require_engine_check
from attnlens_server.config import ServerConfig
from attnlens_server.core.admission import RESERVED_SHARE
from attnlens_server.engine.runtimes.runtime import Runtime
from attnlens_server.errors import StartupError
from attnlens_server.grpc_api.calls import MAX_ARRIVING, Calls
from attnlens_server.grpc_api.methods import EncoderService
from attnlens_server.grpc_api.model_info import ModelDescriber
from attnlens_server.grpc_api.open_streams import MAX_REFLECTIONS
from attnlens_server.grpc_api.receiving import MAX_BRIEF, Receiver
from attnlens_server.grpc_api.responses import Responses, reply_costs
from attnlens_server.memory_budget import plan_memory
from attnlens_server.observing.access_log import AccessLog
from attnlens_server.observing.observer import Observer
from attnlens_server.opening import Opening, open_model
from attnlens_server.operations.service import ModelService
from attnlens_server.supervisor import Supervisor
from attnlens_server.text import TextEncoder, UntokenizableError

logger = logging.getLogger(__name__)

MIN_ARRIVING = 4
"""Minimum number of messages that may arrive at the same time, whatever the memory."""


class ServedModel:
    """A verified bundle with its engine and services. Call `start` before use.

    Attributes:
        bundle: Verified bundle.
        model: Model of the bundle.
        max_tokens: Maximum input length in tokens, including special tokens.
        engine: Runs the graphs.
        service: Answers typed requests.
        observer: Notified of each request.
        calls: Runs gRPC calls.
        methods: gRPC methods.
        supervisor: Supervisor of the model. The host runs it on its event loop.
    """

    def __init__(self, config: ServerConfig, opening: Opening | None = None) -> None:
        """Open and verify the bundle.

        Args:
            config: Configuration.
            opening: Thread that opens the bundle. If None, this thread does.

        Raises:
            StartupError: The bundle is invalid, or the engine is unavailable or failed its check.
            ConfigError: An option does not fit the bundle.
        """
        self._opening = opening
        opened = open_model(config) if opening is None else opening.model()
        self.bundle, self.max_tokens, self.engine = opened
        self.model = self.bundle.model
        runtime = self.engine.runtime
        engine_check = _engine_check(self.bundle, runtime)
        self.service = ModelService.of(
            self.bundle,
            config,
            self.engine,
            _text_encoder(self.bundle, self.max_tokens, config),
            max_tokens=self.max_tokens,
            costs=reply_costs(config.max_response_bytes),
        )
        access = config.access_log_selection
        self.observer = Observer(None if access.mode == "off" else AccessLog(access))
        self.calls = Calls(
            self.service.process.admission,
            self.service.process.check_serving,
            self.service.process.workers,
            stall_timeout_s=config.stall_timeout_s,
            observer=self.observer,
        )
        self.supervisor = Supervisor(self.service, self.engine, config.stuck_timeout_s)
        self._config = config
        self.methods = EncoderService(
            self.service,
            _responses(self.bundle, runtime.name),
            ModelDescriber(self.bundle, config, self.engine, self.service, engine_check),
        )

    def start(self) -> float:
        """Start the engine, limit the memory of calls, and return the seconds that the engine took.

        Raises:
            StartupError: A graph cannot be opened, or the memory limit of the process is too low.
        """
        if self._opening is not None:
            self._opening.wait()
        seconds = self.engine.start(self.max_tokens)
        admission, config = self.service.process.admission, self._config
        budget = plan_memory(
            self.bundle,
            self.engine,
            limit_bytes=config.max_memory_bytes,
            calls_bytes=admission.memory.limit,
            min_calls_bytes=reply_costs(config.max_response_bytes).least_memory_bytes,
        )
        num_arriving = MAX_ARRIVING
        if config.max_memory_bytes is not None:
            num_arriving = budget.arriving_bytes // config.request_limit - MAX_BRIEF - MAX_REFLECTIONS
            num_arriving = max(MIN_ARRIVING, min(num_arriving, MAX_ARRIVING))
        self.calls.receiver = Receiver(num_arriving, config.request_timeout_s)
        admission.memory.resize(budget.calls_bytes * RESERVED_SHARE // (RESERVED_SHARE + 1))
        logger.info("%s", budget)
        return seconds


def _responses(bundle: Bundle, engine: str) -> Responses:
    model = bundle.model
    is_classifier = model.classifier is not None
    return Responses(model.name, model.version, engine, bundle.precision, is_classifier=is_classifier)


def _engine_check(bundle: Bundle, runtime: Runtime) -> EngineCheck | None:
    """Return the check of the engine on this processor, or None if the engine needs none.

    Raises:
        StartupError: The engine failed its check.
    """
    if not runtime.processor:
        return None
    return require_engine_check(
        bundle, runtime.name, runtime.device, version=runtime.version, processor=runtime.processor
    )


def _text_encoder(bundle: Bundle, max_tokens: int, config: ServerConfig) -> TextEncoder | None:
    """Return the tokenizer of a bundle, or None if it has none.

    Raises:
        StartupError: It does not fit the model, or leaves no room for texts.
    """
    path, model = bundle.tokenizer_path, bundle.model
    if path is None:
        return None
    text_encoder = TextEncoder(path, max_tokens, model.chat_template)
    try:
        text_encoder.check_ids(model.vocab_size, model.type_vocab_size)
        _check_default_prompt(text_encoder, model, config)
    except UntokenizableError as error:
        raise StartupError(f"{path} is unusable: a short text {error}") from error
    return text_encoder


def _check_default_prompt(text_encoder: TextEncoder, model: Model, config: ServerConfig) -> None:
    """Check that the default prompt leaves room for a text, or the server would reject every text.

    Raises:
        StartupError: It has too many bytes, or too many tokens.
    """
    prompt = model.prompts.get(model.default_prompt_name, "")
    num_bytes, limit = len(prompt.encode()), config.max_text_bytes
    remedy = "export the bundle again with a shorter prompt"
    if num_bytes >= limit:
        raise StartupError(
            f"the default prompt has {num_bytes} bytes, but the limit of a text with its prompt is {limit}: "
            f"start the server with a larger --max-text-bytes, or {remedy}"
        )
    num_tokens = text_encoder.encode([("",)], prompt=prompt, truncate=False)[0].num_tokens
    if prompt and num_tokens >= text_encoder.max_tokens:
        raise StartupError(
            f"the default prompt has {num_tokens} tokens, but the limit is {text_encoder.max_tokens}: "
            f"{remedy}"
        )
