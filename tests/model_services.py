"""Operations for tests: of an engine without a server, and of a model without an engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from attnlens_server.bundle import Bundle, Model
from attnlens_server.config import ServerConfig
from attnlens_server.core.loaded_model import LoadedModel
from attnlens_server.core.process import Process, State
from attnlens_server.core.reply_costs import ReplyCosts
from attnlens_server.engine import Engine
from attnlens_server.operations.service import ModelService
from attnlens_server.text import TextEncoder


def serve(
    bundle: Bundle, config: ServerConfig, engine: Engine, *, max_tokens: int, costs: ReplyCosts
) -> ModelService:
    """Return the operations on a bundle. The caller closes the workers of the process."""
    assert bundle.tokenizer_path is not None
    text_encoder = TextEncoder(bundle.tokenizer_path, max_tokens)
    service = ModelService.of(bundle, config, engine, text_encoder, max_tokens=max_tokens, costs=costs)
    service.process.state = State.SERVING
    return service


def plans_of(
    spec: Model, *, max_tokens: int = 8, takes_pairs: bool = True, side: str = "right", **options: Any
) -> ModelService:
    """Return operations that validate requests and cannot run them. `options` are those of the server."""
    text_encoder = SimpleNamespace(takes_pairs=takes_pairs, truncation_side=side)
    model = LoadedModel(
        spec=spec,
        config=ServerConfig(bundle=Path(), **options),
        max_tokens=max_tokens,
        text_encoder=cast("TextEncoder", text_encoder),
        dense=(),
        precision="fp32",
        engine=cast("Engine", SimpleNamespace(has_contributions=False)),
        runner=cast("Any", None),
        costs=ReplyCosts(1 << 20, 64, lambda _: 0, serialization_copies=2, sending_copies=1),
    )
    return ModelService(cast("Process", SimpleNamespace(workers=None)), model)
