"""API of Text Embeddings Inference (TEI) 1.9, which clients of Hugging Face use. `/rerank` is in `rerank`.

See docs/http.md for the differences from TEI.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from attnlens.classifiers import ScoreActivation
from attnlens.pooling import FloatArray
from attnlens_server.bundle import Model
from attnlens_server.config import ServerConfig
from attnlens_server.engine import Engine
from attnlens_server.errors import NotSupportedError, RequestError
from attnlens_server.grpc_api.model_info import own_version
from attnlens_server.http_api.exchange import (
    CLASSIFY,
    EMBED,
    ENCODE,
    HEALTH,
    MODELS,
    TOKENIZE,
    BodyParser,
    Dialect,
    HttpError,
    HttpRequest,
    HttpResponse,
    Route,
    encode_json,
)
from attnlens_server.http_api.json_bodies import (
    Dimensions,
    Inputs,
    Texts,
    check_count,
    inputs_of,
    invalid,
    json_response,
    read_body,
    serialize,
    text_inputs,
    truncation,
)
from attnlens_server.http_api.known_options import TEI_EMBED, TEI_EMBED_ALL
from attnlens_server.operations.classify import ClassifyRequest, ClassifyResult
from attnlens_server.operations.embed import EmbedRequest
from attnlens_server.operations.encode import EncodeRequest
from attnlens_server.operations.inputs import Prompt, Request
from attnlens_server.operations.service import ModelService
from attnlens_server.operations.tokenize import TokenizedText, TokenizeRequest
from attnlens_server.text import Input, TextPair, Tokens, TokenSource

_DATA_TYPES = {"fp32": "float32", "fp16": "float16", "int8": "int8", "bf16": "bfloat16"}
_VECTORS, _TOKENS = list[list[float]], list[list[dict[str, Any]]]
_TOKEN_BYTES = 400  # a token as a Python dictionary
_PREDICTION_BYTES = 240  # the same for a label and its score
_TYPES = {
    "EMPTY": "Empty",
    "OVERLOADED": "Overloaded",
    "RATE_LIMITED": "Overloaded",
    "NOT_READY": "Unhealthy",
    "SHUTTING_DOWN": "Unhealthy",
}
_BACKEND_TYPES = ("NOT_SUPPORTED", "GRAPH_UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED")
_REASONS_422 = ("INVALID_FIELD", "INPUT_TOO_LONG", "RESPONSE_TOO_LARGE", "REQUEST_TOO_EXPENSIVE")
_FUNCTIONS = {
    "none": ScoreActivation.IDENTITY,
    "sigmoid": ScoreActivation.SIGMOID,
    "softmax": ScoreActivation.SOFTMAX,
}
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Direction = Literal["Left", "Right", "left", "right"]
"""Side of a text to remove."""


class TruncationOptions(msgspec.Struct, kw_only=True):
    """Options of all routes that run the model.

    Attributes:
        truncate: Whether to truncate long texts. Unlike in the other APIs of attnlens, the default is True.
        truncation_direction: Side of a text to remove. If None, the side that the model's tokenizer uses.
    """

    truncate: bool | None = None
    truncation_direction: Direction | None = None

    @property
    def side(self) -> str | None:
        """Side to truncate on. None for the side of the model, or if texts are not truncated."""
        direction = self.truncation_direction
        return None if direction is None or self.truncate is False else direction.lower()


class EmbedOptions(TruncationOptions, kw_only=True):
    """Options of embedding routes.

    Attributes:
        prompt_name: Name of one of the model's prompts. If None, the default prompt of the model.
    """

    prompt_name: str | None = None


class EmbedAllBody(EmbedOptions, kw_only=True):
    """Body of `/embed_all`."""

    inputs: Inputs


class EmbedBody(EmbedAllBody, kw_only=True):
    """Body of `/embed`."""

    normalize: bool | None = None
    dimensions: Dimensions | None = None


class PredictParameters(msgspec.Struct):
    """Parameters of Hugging Face's client, which TEI ignores.

    Attributes:
        top_k: Number of labels to return.
        function_to_apply: Function from logits to scores.
    """

    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None


class PredictBody(TruncationOptions, kw_only=True):
    """Body of `/predict`.

    Attributes:
        inputs: A text, or a list of one or two texts, which is one input: a text or a pair. A list of such
            lists is a batch.
        raw_scores: Whether to return logits instead of probabilities.
        parameters: Parameters of Hugging Face's client, which expects a batch in the response.
    """

    inputs: str | list[str | list[str]]
    raw_scores: bool | None = None
    parameters: PredictParameters | None = None

    @property
    def is_batch(self) -> bool:
        """Whether the response is a list of results."""
        is_list = isinstance(self.inputs, list) and any(isinstance(each, list) for each in self.inputs)
        return is_list or self.parameters is not None


class Prediction(msgspec.Struct):
    """Score of a label."""

    score: float
    label: str


class SimilarityInputs(msgspec.Struct):
    """A sentence, and the sentences to compare it with."""

    source_sentence: str
    sentences: list[str]


class SimilarityBody(msgspec.Struct):
    """Body of `/similarity`."""

    inputs: SimilarityInputs
    parameters: EmbedOptions | None = None


class TokenizeBody(msgspec.Struct):
    """Body of `/tokenize`."""

    inputs: Texts
    add_special_tokens: bool | None = None
    prompt_name: str | None = None


class DecodeBody(msgspec.Struct):
    """Body of `/decode`: the token ids of one text, or of several."""

    ids: list[TokenId | list[TokenId]]
    skip_special_tokens: bool | None = None


_EMBED, _SIMILARITY = BodyParser(EmbedBody, TEI_EMBED), BodyParser(SimilarityBody)
_EMBED_ALL = BodyParser(EmbedAllBody, TEI_EMBED_ALL)
_PREDICT = BodyParser(PredictBody)
_TOKENIZE, _DECODE = BodyParser(TokenizeBody), BodyParser(DecodeBody)


def error_body(error: RequestError) -> dict[str, str]:
    """Return the body of an error."""
    default = "Backend" if error.reason in _BACKEND_TYPES else "Validation"
    return {"error": error.message, "error_type": _TYPES.get(error.reason, default)}


DIALECT = Dialect(
    error_body,
    statuses={"NOT_SUPPORTED": 424, **dict.fromkeys(_REASONS_422, 422)},
    fields={"inputs": "inputs", "prompt.name": "prompt_name"},
    schema=dict[str, str],
)
DECODE_DIALECT = replace(DIALECT, fields={"inputs": "ids"})


@dataclass(frozen=True, slots=True)
class TeiRoutes:
    """Routes of TEI's API for one model."""

    service: ModelService
    model: Model
    config: ServerConfig
    engine: Engine

    def routes(self) -> list[Route]:
        """Return the routes. `GET /` is the page of the viewer."""
        predictions = list[Prediction | list[Prediction]]
        predict = Route(
            "POST", "/predict", self.predict, DIALECT, CLASSIFY, body=PredictBody, response=predictions
        )
        embed = Route("POST", "/embed", self.embed, DIALECT, EMBED, body=_EMBED.body_type, response=_VECTORS)
        classifier = self.model.classifier
        default = [(embed if classifier is None else predict)._replace(path="/")]
        if classifier is not None and classifier.is_reranker:
            default = []  # `RerankRoutes` has it
        return [
            *default,
            embed,
            predict,
            Route(
                "POST",
                "/embed_all",
                self.embed_all,
                DIALECT,
                ENCODE,
                body=_EMBED_ALL.body_type,
                response=list[list[list[float]]],
            ),
            Route(
                "POST",
                "/similarity",
                self.similarity,
                DIALECT,
                EMBED,
                body=SimilarityBody,
                response=list[float],
            ),
            Route("POST", "/tokenize", self.tokenize, DIALECT, TOKENIZE, body=TokenizeBody, response=_TOKENS),
            Route(
                "POST", "/decode", self.decode, DECODE_DIALECT, TOKENIZE, body=DecodeBody, response=list[str]
            ),
            Route("GET", "/info", self.info, DIALECT, MODELS, response=dict[str, Any]),
            Route("GET", "/health", self.health, DIALECT, HEALTH, media_type=""),
            Route("GET", "/ping", self.health, DIALECT, HEALTH, media_type=""),
            Route("POST", "/embed_sparse", self.embed_sparse, DIALECT, EMBED),
        ]

    async def embed(self, request: HttpRequest) -> HttpResponse:
        """Return one embedding for each text."""
        return await self._embed(request, _EMBED, self._embed_request, lambda rows: rows)

    async def similarity(self, request: HttpRequest) -> HttpResponse:
        """Return the cosine similarity of a sentence with each other sentence."""
        return await self._embed(request, _SIMILARITY, self._similarity_request, _similarities)

    async def _embed(
        self,
        request: HttpRequest,
        parser: BodyParser,
        convert: Callable[[Any], EmbedRequest],
        build: Callable[[FloatArray], FloatArray],
    ) -> HttpResponse:
        started = time.monotonic()
        body, converted = await read_body(self.service, request, parser, convert)
        with self._truncation(body):
            result = await self.service.embed(converted, request.budget)
        rows = np.ascontiguousarray(result.embeddings)
        response = await json_response(self.service, rows.nbytes, lambda: build(rows), result.usages)
        return with_costs(response, request, converted, started, self.engine)

    async def embed_all(self, request: HttpRequest) -> HttpResponse:
        """Return the vectors of all tokens of each text."""
        started = time.monotonic()
        body, converted = await read_body(self.service, request, _EMBED_ALL, self._encode_request)
        with self._truncation(body):
            result = await self.service.encode(converted, request.budget)
        vectors = [text.last_hidden_state for text in result.texts]
        size = sum(array.nbytes for array in vectors if array is not None)
        usages = [text.usage for text in result.texts]
        response = await json_response(self.service, size, lambda: vectors, usages)
        return with_costs(response, request, converted, started, self.engine)

    async def predict(self, request: HttpRequest) -> HttpResponse:
        """Return the score of each label for a text, a pair of texts, or a batch of them."""
        started = time.monotonic()
        body, converted = await read_body(self.service, request, _PREDICT, self._classify_request)
        num_labels = len(self.model.classifier.labels) if self.model.classifier else 0
        size = _PREDICTION_BYTES * len(converted.inputs) * num_labels
        request.budget.memory.grow(size)
        with self._truncation(body):
            result = await self.service.classify(converted, request.budget)
        build = partial(_predictions, result, body)
        response = await json_response(self.service, size, build, result.usages)
        return with_costs(response, request, converted, started, self.engine)

    async def embed_sparse(self, _: HttpRequest) -> HttpResponse:
        """Reject a request that needs a sparse model."""
        raise NotSupportedError("/embed_sparse needs a sparse model, which attnlens does not serve")

    async def tokenize(self, request: HttpRequest) -> HttpResponse:
        """Return the tokens of each text with their byte offsets."""
        body, converted = await read_body(self.service, request, _TOKENIZE, self._tokenize_request)
        prompt = self.model.prompts.get(body.prompt_name or self.model.default_prompt_name, "")
        lists, texts = [], iter(converted.inputs)
        async with aclosing(self.service.tokenize(converted, request.budget)) as portions:
            async for portion in portions:  # not all at once, since dictionaries are far larger than tokens
                size = _TOKEN_BYTES * sum(len(text.tokens.ids) for text in portion)
                sources = [prompt + (text.text or "") for text in islice(texts, len(portion))]
                has_special = body.add_special_tokens is not False
                build = partial(_token_lists, portion, sources, len(prompt), has_special)
                lists.append((await serialize(self.service, size, build))[1:-1])

        def join() -> bytes:
            return b"[" + b",".join(lists) + b"]"

        return HttpResponse(await self.service.process.workers.run_if(len(lists) > 1, join))

    async def decode(self, request: HttpRequest) -> HttpResponse:
        """Return the text of token ids."""
        body, converted = await read_body(self.service, request, _DECODE, self._decode_request)
        texts = await self.service.tokenize.decode(
            converted, request.budget, skip_special_tokens=body.skip_special_tokens is not False
        )
        return await json_response(self.service, sum(map(len, texts)), lambda: texts, ())

    async def info(self, _: HttpRequest) -> HttpResponse:
        """Return the model and the limits of the server."""
        config, model, service = self.config, self.model, self.service
        return HttpResponse(
            encode_json(
                {
                    "model_id": model.name,
                    "model_sha": model.version,
                    "model_dtype": _DATA_TYPES[config.precision],
                    "served_model_name": model.name,
                    "model_type": _model_type(model),
                    "max_concurrent_requests": config.max_concurrent_inputs,
                    "max_input_length": service.model.max_tokens,
                    "max_batch_tokens": self.engine.max_batch_tokens,
                    "max_client_batch_size": config.inputs_limit,
                    "auto_truncate": True,
                    "tokenization_workers": config.worker_threads,
                    "version": own_version(),
                }
            )
        )

    async def health(self, _: HttpRequest) -> HttpResponse:
        """Return 200 while the server accepts requests and is healthy."""
        self.service.process.check_healthy()
        return HttpResponse(content_type="")

    def _embed_request(self, body: EmbedBody) -> EmbedRequest:
        return EmbedRequest(
            inputs=_not_empty(inputs_of(body.inputs, self.service.model.max_inputs, "inputs")),
            prompt=_prompt(body.prompt_name),
            truncate=self._truncates(body),
            normalize=body.normalize is not False,
            dimensions=body.dimensions or 0,
        )

    def _encode_request(self, body: EmbedAllBody) -> EncodeRequest:
        return EncodeRequest(
            inputs=_not_empty(inputs_of(body.inputs, self.service.model.max_inputs, "inputs")),
            prompt=_prompt(body.prompt_name),
            truncate=self._truncates(body),
            last_hidden_state=True,
        )

    def _similarity_request(self, body: SimilarityBody) -> EmbedRequest:
        options = body.parameters or EmbedOptions()
        given, limit = body.inputs.sentences, self.service.model.max_inputs
        sentences = _not_empty(text_inputs(given, limit, "inputs.sentences"))
        return EmbedRequest(
            inputs=[Input(text=body.inputs.source_sentence), *sentences],
            prompt=_prompt(options.prompt_name),
            truncate=self._truncates(options),
            normalize=True,
        )

    def _classify_request(self, body: PredictBody) -> ClassifyRequest:
        inputs = _not_empty(_predict_inputs(body.inputs, self.service.model.max_inputs))
        classifier = self.model.classifier
        function = body.parameters.function_to_apply if body.parameters else None
        activation = ScoreActivation.SOFTMAX
        if body.raw_scores:
            activation = ScoreActivation.IDENTITY
        elif function is not None:
            activation = _FUNCTIONS[function]
        elif classifier is not None and classifier.is_reranker:
            activation = ScoreActivation.SIGMOID
        return ClassifyRequest(inputs=inputs, truncate=self._truncates(body), activation=activation)

    def _tokenize_request(self, body: TokenizeBody) -> TokenizeRequest:
        return TokenizeRequest(
            inputs=_not_empty(text_inputs(body.inputs, self.service.model.max_inputs, "inputs")),
            prompt=_prompt(body.prompt_name),
        )

    def _decode_request(self, body: DecodeBody) -> TokenizeRequest:
        return TokenizeRequest(inputs=_not_empty(inputs_of(body.ids, self.service.model.max_inputs, "ids")))

    def _truncates(self, options: TruncationOptions) -> bool:
        return options.truncate is not False and options.side in (None, self.service.model.truncation_side)

    def _truncation(self, body: TruncationOptions | SimilarityBody) -> AbstractContextManager[None]:
        options = body.parameters if isinstance(body, SimilarityBody) else body
        side = options.side if options else None
        return truncation(self.service, "truncation_direction", side)


def with_costs(
    response: HttpResponse, request: HttpRequest, converted: Request, started: float, engine: Engine
) -> HttpResponse:
    """Return the response with TEI's headers: sizes of the input, and durations in milliseconds."""
    metrics = request.budget.metrics
    total = f"{1000 * (time.monotonic() - started):.0f}"
    inputs = (*converted.inputs, *converted.other_inputs)
    headers = {
        "X-Compute-Type": "cpu" if engine.runtime.is_on_cpu else "gpu",
        "X-Compute-Time": total,
        "X-Compute-Characters": str(sum(len(text) for each in inputs for text in each.texts)),
        "X-Compute-Tokens": str(metrics.num_tokens),
        "X-Total-Time": total,
        "X-Tokenization-Time": f"{1000 * metrics.tokenize_s:.0f}",
        "X-Queue-Time": f"{1000 * metrics.queue_s:.0f}",
        "X-Inference-Time": f"{1000 * metrics.compute_s:.0f}",
    }
    return replace(response, headers={**response.headers, **headers})


def _model_type(model: Model) -> dict[str, Any]:
    classifier = model.classifier
    if classifier is None:
        return {"embedding": {"pooling": model.pooling.name.lower()}}
    labels = list(enumerate(classifier.labels))
    names = {
        "id2label": {str(number): label for number, label in labels},
        "label2id": {label: number for number, label in labels},
    }
    return {"reranker" if classifier.is_reranker else "classifier": names}


def _not_empty(inputs: list[Input]) -> list[Input]:
    if not inputs:
        raise HttpError(400, "EMPTY", "the list of inputs is empty: send at least one")
    return inputs


def _predict_inputs(values: str | list[str | list[str]], max_inputs: int) -> list[Input]:
    """Return the inputs of `/predict`.

    Raises:
        InvalidFieldsError: There are too many inputs, or one is neither a text nor a pair.
    """
    if isinstance(values, str):
        return [Input(text=values)]
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        if len(texts) < len(values):
            raise invalid("inputs", "mixes texts with lists: send a text, a pair, or a list of lists")
        return [_text_or_pair("inputs", texts)]
    check_count(values, max_inputs, "inputs")
    return [_text_or_pair(f"inputs[{index}]", list(value)) for index, value in enumerate(values)]


def _text_or_pair(field: str, texts: list[str]) -> Input:
    match texts:
        case [text]:
            return Input(text=text)
        case [first, second]:
            return Input(text_pair=TextPair(first, second))
    problem = f"is one input with {len(texts)} texts: send one or two, and several inputs as a list of lists"
    raise invalid(field, problem)


def _predictions(
    result: ClassifyResult, body: PredictBody
) -> list[dict[str, Any]] | list[list[dict[str, Any]]]:
    """Return the labels of each input by descending score."""
    top_k = body.parameters.top_k if body.parameters else None
    orders = np.argsort(-result.logits, axis=1, kind="stable")[:, :top_k]  # (N, C)
    texts = [
        [{"score": scores[index], "label": result.labels[index]} for index in order]
        for scores, order in zip(result.scores.tolist(), orders.tolist(), strict=True)
    ]
    return texts if body.is_batch else texts[0]


def _prompt(name: str | None) -> Prompt | None:
    return None if name is None else Prompt(name=name)


def _similarities(rows: FloatArray) -> FloatArray:
    """Return the cosine (N,) of the first of N + 1 vectors of length 1 with each other one."""
    return np.asarray(rows[1:].astype(np.float64) @ rows[0], dtype=np.float32)


def _token_lists(
    texts: Sequence[TokenizedText], sources: Sequence[str], prompt_chars: int, with_special: bool
) -> list[list[dict[str, Any]]]:
    """Return the tokens of each text. Offsets are UTF-8 bytes of the prompt and the text together."""
    lists = [_tokens(text.tokens, source, prompt_chars) for text, source in zip(texts, sources, strict=True)]
    return [[token for token in tokens if with_special or not token["special"]] for tokens in lists]


def _tokens(tokens: Tokens, source: str, prompt_chars: int) -> Iterator[dict[str, Any]]:
    prompt_bytes = len(source[:prompt_chars].encode())
    for index, kind in enumerate(tokens.sources):
        token_id, is_text = tokens.ids[index], kind is TokenSource.TEXT
        if kind is TokenSource.SPECIAL:
            yield {"id": token_id, "text": tokens.texts[index], "special": True}
            continue
        first, last = (prompt_chars * is_text + offset for offset in tokens.chars[index])
        start, stop = (prompt_bytes * is_text + offset for offset in tokens.bytes[index])
        yield {"id": token_id, "text": source[first:last], "special": False, "start": start, "stop": stop}
