"""Cohere's embeddings API, version 2: `/v2/embed`."""

import secrets
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from attnlens.embedding_types import EmbeddingType, quantize
from attnlens_server.bundle import Model
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
    check_max_tokens,
    invalid,
    json_response,
    num_tokens,
    read_body,
    text_inputs,
    truncation,
)
from attnlens_server.http_api.known_options import COHERE_EMBED
from attnlens_server.http_api.prompts import PromptChoice
from attnlens_server.operations.embed import EmbedRequest, EmbedResult
from attnlens_server.operations.service import ModelService

_SIDES = {"START": "left", "END": "right"}


class CohereBody(msgspec.Struct, kw_only=True):
    """Body of `/v2/embed`.

    Attributes:
        texts: Texts.
        model: Name of the served model.
        input_type: Purpose of the texts, which selects the prompt.
        embedding_types: Types of the embeddings to return.
        output_dimension: Number of leading components to keep.
        truncate: Side of long texts to remove, or `NONE` to reject them. If None, the side that the model's
            tokenizer uses.
        max_tokens: Number of tokens to truncate to, at least the limit of the model.
    """

    texts: list[str] | None = None
    model: str | None = None
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    embedding_types: list[Literal["float", "int8", "uint8", "binary", "ubinary"]] | None = None
    output_dimension: Dimensions | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: int | None = None

    @property
    def types(self) -> list[str]:
        """Types of the embeddings to return, each once."""
        return list(dict.fromkeys(self.embedding_types or ["float"]))


DIALECT = Dialect(
    lambda error: {"message": error.message},
    fields={"inputs": "texts", "prompt.name": "input_type", "dimensions": "output_dimension"},
    schema=dict[str, str],
    truncation="omit truncate",
)


_PARSER = BodyParser(CohereBody, COHERE_EMBED)


@dataclass(frozen=True, slots=True)
class CohereRoutes:
    """Routes of Cohere's API for one model."""

    service: ModelService
    model: Model
    prompts: PromptChoice

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                "POST",
                "/v2/embed",
                self.embed,
                DIALECT,
                EMBED,
                body=_PARSER.body_type,
                response=dict[str, Any],
            )
        ]

    async def embed(self, request: HttpRequest) -> HttpResponse:
        """Return one embedding of each type for each text."""
        service = self.service
        body, converted = await read_body(service, request, _PARSER, self._embed_request)
        with truncation(service, "truncate", _SIDES.get(body.truncate or "")):
            result = await service.embed(converted, request.budget)
        size = len(body.types) * result.embeddings.nbytes + len(request.body)  # it contains the texts
        return await json_response(service, size, lambda: self._reply(body, result), result.usages)

    def _embed_request(self, body: CohereBody) -> EmbedRequest:
        check_max_tokens("max_tokens", body.max_tokens, self.service)
        if body.texts is None:
            raise invalid("texts", "is missing: set it")
        for name in body.types:
            if EmbeddingType[name.upper()].needs_ranges:
                self._check_ranges(body, name)
        return EmbedRequest(
            model=body.model or "",
            inputs=text_inputs(body.texts, self.service.model.max_inputs, "texts"),
            prompt=self.prompts.for_purpose(body.input_type, "input_type"),
            truncate=body.truncate != "NONE"
            and _SIDES.get(body.truncate or "") in (None, self.service.model.truncation_side),
            dimensions=body.output_dimension or 0,
        )

    def _check_ranges(self, body: CohereBody, name: str) -> None:
        """Check that the bundle has the ranges of the embeddings, which int8 and uint8 need."""
        problem = f"contains {name}, which needs the range of each component,"
        if self.model.embedding_ranges is None:
            remedy = "use binary, or export the model again"
            raise invalid("embedding_types", f"{problem} but this bundle lacks ranges: {remedy}")
        if body.output_dimension is not None:
            remedy = "omit output_dimension, or use binary"
            raise invalid("embedding_types", f"{problem} but ranges are only known for full size: {remedy}")

    def _reply(self, body: CohereBody, result: EmbedResult) -> dict[str, Any]:
        return {
            "id": secrets.token_hex(16),
            "embeddings": {name: self._quantized(name, result) for name in body.types},
            "texts": body.texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": num_tokens(result)},
            },
            "response_type": "embeddings_by_type",
        }

    def _quantized(self, name: str, result: EmbedResult) -> npt.NDArray[Any]:
        kind = EmbeddingType[name.upper()]
        ranges = self.model.embedding_ranges if kind.needs_ranges else None
        return np.ascontiguousarray(quantize(result.embeddings, kind, ranges))
