"""Ollama's embeddings API: `/api/embed`."""

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from attnlens_server.http_api.exchange import (
    EMBED,
    BodyParser,
    Dialect,
    HttpRequest,
    HttpResponse,
    Route,
)
from attnlens_server.http_api.json_bodies import (
    Dimensions,
    Texts,
    check_max_tokens,
    embed,
    num_tokens,
    text_inputs,
)
from attnlens_server.http_api.known_options import OLLAMA_EMBED
from attnlens_server.operations.embed import EmbedRequest, EmbedResult
from attnlens_server.operations.service import ModelService


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Options of a model. Those of the generation of texts are ignored.

    Attributes:
        num_ctx: Number of tokens to truncate to, at least the limit of the model.
    """

    num_ctx: int | None = None


class OllamaBody(msgspec.Struct, kw_only=True):
    """Body of `/api/embed`. Other keys, such as `keep_alive`, are ignored.

    Attributes:
        input: One text or several.
        model: Name of the served model, which may end in `:latest`.
        truncate: Whether to truncate long texts.
        dimensions: Number of leading components to keep.
        options: Options of the model.
    """

    input: Texts
    model: str | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    options: OllamaOptions | None = None


DIALECT = Dialect(lambda error: {"error": error.message}, fields={"inputs": "input"}, schema=dict[str, str])


_PARSER = BodyParser(OllamaBody, OLLAMA_EMBED)


@dataclass(frozen=True, slots=True)
class OllamaRoutes:
    """Routes of Ollama's API for one model."""

    service: ModelService

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("POST", "/api/embed", self.embed, DIALECT, EMBED, body=OllamaBody, response=dict[str, Any])
        ]

    async def embed(self, request: HttpRequest) -> HttpResponse:
        """Return one embedding of length 1 for each text."""
        started = time.monotonic()

        def reply(body: OllamaBody, result: EmbedResult) -> dict[str, Any]:
            return {
                "model": body.model or "",
                "embeddings": np.ascontiguousarray(result.embeddings),
                "total_duration": round(1e9 * (time.monotonic() - started)),
                "load_duration": 0,
                "prompt_eval_count": num_tokens(result),
            }

        return await embed(self.service, request, _PARSER, self._embed_request, reply)

    def _embed_request(self, body: OllamaBody) -> EmbedRequest:
        options = body.options or OllamaOptions()
        check_max_tokens("options.num_ctx", options.num_ctx, self.service)
        return EmbedRequest(
            model=(body.model or "").removesuffix(":latest"),
            inputs=text_inputs(body.input, self.service.model.max_inputs, "input"),
            truncate=body.truncate is not False,
            normalize=True,
            dimensions=body.dimensions or 0,
        )
