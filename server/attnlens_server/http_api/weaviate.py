"""API of the inference containers of Weaviate's module text2vec-transformers."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from attnlens.pooling import Pooling
from attnlens_server.bundle import Model
from attnlens_server.http_api.exchange import (
    EMBED,
    HEALTH,
    MODELS,
    BodyParser,
    Dialect,
    HttpRequest,
    HttpResponse,
    Route,
    encode_json,
)
from attnlens_server.http_api.json_bodies import embed, invalid, text_inputs
from attnlens_server.http_api.prompts import PromptChoice
from attnlens_server.operations.embed import EmbedRequest, EmbedResult
from attnlens_server.operations.service import ModelService


class VectorsConfig(msgspec.Struct):
    """Options.

    Attributes:
        pooling_strategy: Ignored if it is `masked_mean`, which Weaviate sends by default: the model has its
            own pooling. `cls` is rejected unless it is the pooling of the model.
        task_type: Purpose of the texts, `query` or `passage`, which selects the prompt.
        dimensions: Number of leading components to keep.
    """

    pooling_strategy: Literal["masked_mean", "cls"] | None = None
    task_type: str | None = None
    dimensions: int | None = None


class VectorsBody(msgspec.Struct):
    """Body of `/vectors`: one text, or several. Weaviate sends more keys, which are ignored."""

    text: str | None = None
    texts: list[str] | None = None
    config: VectorsConfig | None = None


DIALECT = Dialect(
    lambda error: {"error": error.message},
    fields={"inputs": "texts", "prompt.name": "config.task_type", "dimensions": "config.dimensions"},
    schema=dict[str, str],
)


_PARSER = BodyParser(VectorsBody)


@dataclass(frozen=True, slots=True)
class WeaviateRoutes:
    """Routes of Weaviate's inference containers for one model."""

    service: ModelService
    model: Model
    prompts: PromptChoice

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                "POST", "/vectors", self.vectors, DIALECT, EMBED, body=VectorsBody, response=dict[str, Any]
            ),
            Route("POST", "/vectors/", self.vectors, DIALECT, EMBED),
            Route("GET", "/meta", self.meta, DIALECT, MODELS, response=dict[str, Any]),
            Route("GET", "/.well-known/live", self.live, DIALECT, HEALTH, media_type=""),
            Route("GET", "/.well-known/ready", self.ready, DIALECT, HEALTH, media_type=""),
        ]

    async def vectors(self, request: HttpRequest) -> HttpResponse:
        """Return one embedding for each text."""
        return await embed(self.service, request, _PARSER, self._embed_request, _reply)

    def _embed_request(self, body: VectorsBody) -> EmbedRequest:
        if (body.text is None) == (body.texts is None):
            raise invalid("text", "is missing, or texts is set as well: set one of them")
        config = body.config or VectorsConfig()
        if config.pooling_strategy == "cls" and self.model.pooling is not Pooling.CLS:
            pooling = self.model.pooling.name.lower()
            problem = f"is cls, but the model uses {pooling}"
            raise invalid("config.pooling_strategy", f"{problem}: use masked_mean, or omit it")
        return EmbedRequest(
            inputs=text_inputs(
                body.text if body.text is not None else body.texts or [],
                self.service.model.max_inputs,
                "texts",
            ),
            prompt=self.prompts.for_purpose(config.task_type or None, "config.task_type"),
            truncate=True,
            dimensions=config.dimensions or 0,
        )

    async def meta(self, _: HttpRequest) -> HttpResponse:
        """Return the model, which Weaviate shows with its modules."""
        return HttpResponse(encode_json({"model": self.model.name, "model_version": self.model.version}))

    async def live(self, _: HttpRequest) -> HttpResponse:
        """Return 204."""
        return HttpResponse(status=204, content_type="")

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """Return 204 while the server accepts requests and is healthy."""
        self.service.process.check_healthy()
        return await self.live(request)


def _reply(body: VectorsBody, result: EmbedResult) -> dict[str, Any]:
    rows = np.ascontiguousarray(result.embeddings)
    sizes = {"dim": rows.shape[1], "dims": rows.shape[1]}  # of containers and of Weaviate
    if body.texts is not None:
        return {"vectors": rows, **sizes}
    return {"text": body.text, "vector": rows[0], **sizes}
