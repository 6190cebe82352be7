"""OpenAI's embeddings API: `/v1/embeddings` and `/v1/models`."""

import base64
from typing import Any, Literal

import msgspec
import numpy as np

from attnlens_server.errors import ModelNotFoundError, RequestError
from attnlens_server.http_api.exchange import (
    EMBED,
    MODELS,
    BodyParser,
    Dialect,
    HttpRequest,
    HttpResponse,
    Route,
    encode_json,
)
from attnlens_server.http_api.json_bodies import (
    Dimensions,
    Inputs,
    TokenLimit,
    choose,
    inputs_of,
    invalid,
    json_response,
    num_tokens,
    read_body,
    truncation,
)
from attnlens_server.http_api.known_options import OPENAI_EMBEDDINGS
from attnlens_server.http_api.prompts import PromptChoice
from attnlens_server.operations.embed import EmbedRequest, EmbedResult
from attnlens_server.operations.inputs import Prompt
from attnlens_server.operations.service import ModelService
from attnlens_server.text import Input

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_SERVER_ERROR = 500
_IDS_REJECTED = (
    "has token ids, which are only valid for the tokenizer of this model: send texts (in LangChain, set "
    "check_embedding_ctx_length=False), or start the server with --http-token-ids if your client uses this "
    "model's tokenizer"
)


Format = Literal["float", "base64"]


class EmbeddingsBody(TokenLimit, kw_only=True):
    """Body of `/v1/embeddings`, also for clients of vLLM, Voyage and Jina. Unknown keys are ignored.

    Attributes:
        input: One text, several texts, the token ids of one text, or those of several texts.
        model: Name of the served model.
        encoding_format: `float` for lists (default), `base64` for little-endian float32.
        embedding_type: Jina's name for `encoding_format`.
        dimensions: Number of leading components to keep.
        output_dimension: Voyage's name for `dimensions`.
        truncate: Whether to truncate long texts instead of rejecting them. Not part of OpenAI's API.
        truncation: Voyage's name for `truncate`.
        normalize: Whether to scale embeddings to length 1. Defaults to that of the model. Not part of
            OpenAI's API.
        normalized: Jina's name for `normalize`.
        use_activation: vLLM's name for `normalize`.
        prompt_name: Name of one of the model's prompts. Not part of OpenAI's API.
        input_type: Purpose of the texts, such as `query` or `document`, which selects the prompt. Not part of
            OpenAI's API.
        task: Jina's name for `input_type`.
    """

    input: Inputs
    model: str | None = None
    encoding_format: Format | None = None
    embedding_type: Format | None = None
    dimensions: Dimensions | None = None
    output_dimension: Dimensions | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    normalize: bool | None = None
    normalized: bool | None = None
    use_activation: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    task: str | None = None

    @property
    def truncates(self) -> bool | None:
        """Whether to truncate long texts. None for the default of the server."""
        truncates: bool | None = choose(self, "truncate", "truncation")
        return True if truncates is None and self.truncate_prompt_tokens is not None else truncates


class Embedding(msgspec.Struct):
    """An embedding, as a list or in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(msgspec.Struct):
    """Number of tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(msgspec.Struct):
    """Response of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ServedModel(msgspec.Struct):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(msgspec.Struct):
    """Response of `/v1/models`."""

    object: Literal["list"]
    data: list[ServedModel]


class ErrorDetails(msgspec.Struct):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct):
    """Response to a request that failed."""

    error: ErrorDetails


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error."""
    kind = "server_error" if error.http_status >= _SERVER_ERROR else _TYPES.get(error.http_status)
    param = error.violations[0].field if error.violations else None
    code = error.reason.lower()
    if code == "input_too_long":
        code = "context_length_exceeded"
    return {
        "error": {
            "message": error.message,
            "type": kind or "invalid_request_error",
            "param": param,
            "code": code,
        }
    }


DIALECT = Dialect(
    error_body,
    fields={"inputs": "input", "prompt.name": "prompt_name"},
    schema=ErrorResponse,
    truncation=(
        'set truncate to true (in the openai package: extra_body={"truncate": True}), or start the server '
        "with --auto-truncate"
    ),
)


class OpenAIRoutes:
    """Routes of OpenAI's API.

    Args:
        service: Service of the model.
        model: Name of the model.
        created: Time when the server started, in seconds since the epoch.
        prompts: Selects prompts by the purpose of texts.
        accepts_token_ids: Whether clients may send token ids.
    """

    def __init__(
        self,
        service: ModelService,
        model: str,
        created: int,
        prompts: PromptChoice,
        *,
        accepts_token_ids: bool,
    ) -> None:
        self._service = service
        self._model = model
        self._created = created
        self._prompts = prompts
        self._accepts_token_ids = accepts_token_ids
        self._parser = BodyParser(EmbeddingsBody, OPENAI_EMBEDDINGS)

    def routes(self) -> list[Route]:
        """Return the routes."""
        embeddings: dict[str, Any] = {"body": self._parser.body_type, "response": EmbeddingsResponse}
        return [
            Route("POST", "/v1/embeddings", self.embeddings, DIALECT, EMBED, **embeddings),
            Route("POST", "/embeddings", self.embeddings, DIALECT, EMBED, **embeddings),
            Route("GET", "/v1/models", self.models, DIALECT, MODELS, response=ModelList),
            Route("GET", "/v1/models/*", self.model, DIALECT, MODELS, response=ServedModel),
        ]

    async def embeddings(self, request: HttpRequest) -> HttpResponse:
        """Return one embedding for each text."""
        service = self._service
        body, converted = await read_body(service, request, self._parser, self._embed_request)
        with truncation(service, "truncation_side", body.truncation_side if body.truncates else None):
            result = await service.embed(converted, request.budget)
        size = result.embeddings.nbytes
        return await json_response(service, size, lambda: self._reply(body, result), result.usages)

    def _embed_request(self, body: EmbeddingsBody) -> EmbedRequest:
        body.check_limit(self._service)
        choose(body, "encoding_format", "embedding_type")
        is_supported = body.truncation_side in (None, self._service.model.truncation_side)
        return EmbedRequest(
            model=body.model or "",
            inputs=self._inputs(body.input),
            prompt=self._prompt(body),
            truncate=body.truncates if is_supported else False,
            normalize=choose(body, "normalize", "normalized", "use_activation"),
            dimensions=choose(body, "dimensions", "output_dimension") or 0,
        )

    def _prompt(self, body: EmbeddingsBody) -> Prompt | None:
        field = "task" if body.input_type is None else "input_type"
        purpose = choose(body, "input_type", "task")
        if body.prompt_name is None:
            return self._prompts.for_purpose(purpose, field)
        if purpose is not None:
            raise invalid("prompt_name", f"is set in addition to {field}: send one of them")
        return Prompt(name=body.prompt_name)

    def _inputs(self, values: Inputs) -> list[Input]:
        """Convert the input.

        Raises:
            InvalidFieldsError: It contains token ids although they are not accepted.
        """
        inputs = inputs_of(values, self._service.model.max_inputs, "input")
        if not self._accepts_token_ids and any(each.token_ids is not None for each in inputs):
            raise invalid("input", _IDS_REJECTED)
        return inputs

    def _reply(self, body: EmbeddingsBody, result: EmbedResult) -> dict[str, Any]:
        rows, total = np.ascontiguousarray(result.embeddings), num_tokens(result)
        is_float = choose(body, "encoding_format", "embedding_type") != "base64"
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": row if is_float else base64.b64encode(row).decode(),
                }
                for index, row in enumerate(rows)
            ],
            "model": self._model,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }

    async def models(self, request: HttpRequest) -> HttpResponse:
        """List the model."""
        del request
        return HttpResponse(encode_json({"object": "list", "data": [self._description()]}))

    async def model(self, request: HttpRequest) -> HttpResponse:
        """Return the model, if the path names it."""
        if request.path != self._model:
            raise ModelNotFoundError(request.path, self._model)
        return HttpResponse(encode_json(self._description()))

    def _description(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "attnlens"}
