"""All operations on one model."""

from typing import Self

from attnlens_server.bundle import Bundle
from attnlens_server.config import ServerConfig
from attnlens_server.core.admission import Admission
from attnlens_server.core.execution import ItemRunner
from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.core.process import Process
from attnlens_server.core.reply_costs import ReplyCosts
from attnlens_server.engine import Engine
from attnlens_server.operations.classify import ClassifyOperation
from attnlens_server.operations.compare import CompareOperation
from attnlens_server.operations.embed import EmbedOperation
from attnlens_server.operations.encode import EncodeOperation
from attnlens_server.operations.encode_stream import EncodeStreamOperation
from attnlens_server.operations.explain import ExplainOperation
from attnlens_server.operations.score import ScoreOperation
from attnlens_server.operations.tokenize import TokenizeOperation
from attnlens_server.text import TextEncoder


class ModelService:
    """Operations on one model. Protocols pass requests and budgets, and serialize the results.

    Attributes:
        process: Process that runs them.
        model: The model.
        embed, encode, encode_stream, tokenize, explain, compare, score, classify: The operations.
    """

    def __init__(self, process: Process, model: LoadedModel) -> None:
        self.process = process
        self.model = model
        self.embed = EmbedOperation(process, model)
        self.encode = EncodeOperation(process, model)
        self.encode_stream = EncodeStreamOperation(process, model)
        self.tokenize = TokenizeOperation(process, model)
        self.explain = ExplainOperation(process, model)
        self.compare = CompareOperation(process, model)
        self.score = ScoreOperation(process, model)
        self.classify = ClassifyOperation(process, model)

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        config: ServerConfig,
        engine: Engine,
        text_encoder: TextEncoder | None,
        *,
        max_tokens: int,
        costs: ReplyCosts,
    ) -> Self:
        """Return the operations on a bundle, in a process of its own."""
        admission = Admission(
            config.max_concurrent_inputs,
            max(config.call_memory_limit, costs.least_memory_bytes),
            engine.retry_after_s,
            config.max_calls,
        )
        model = LoadedModel(
            spec=bundle.model,
            config=config,
            max_tokens=max_tokens,
            text_encoder=text_encoder,
            dense=bundle.dense,
            precision=bundle.precision,
            engine=engine,
            runner=ItemRunner(engine, admission),
            costs=costs,
        )
        return cls(Process(admission, config.worker_threads), model)
