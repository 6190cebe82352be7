"""Rerank APIs of TEI, Weaviate, Cohere, Jina, Voyage, vLLM and Infinity.

Several APIs have a route `/rerank`, and differ in the names of the fields: TEI sends `texts`, Weaviate sends
`property`. See docs/http.md for the differences between the APIs and attnlens.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from attnlens.classifiers import ScoreActivation
from attnlens.explanations import ExplainLevel, relevant_spans
from attnlens_server.bundle import Model
from attnlens_server.engine import Engine
from attnlens_server.errors import RequestError
from attnlens_server.http_api import tei
from attnlens_server.http_api.exchange import (
    SCORE,
    BodyParser,
    Dialect,
    HttpError,
    HttpRequest,
    HttpResponse,
    Route,
    rename_fields,
)
from attnlens_server.http_api.json_bodies import (
    choose,
    invalid,
    json_response,
    num_tokens,
    read_body,
    text_inputs,
    truncation,
)
from attnlens_server.http_api.known_options import RERANK
from attnlens_server.http_api.vllm import HeadOptions
from attnlens_server.operations.documents import LongDocuments, ScoreRequest
from attnlens_server.operations.explanations import Explanation, words_of_document
from attnlens_server.operations.score import ScoreResult
from attnlens_server.operations.service import ModelService

_TRUNCATED_SIDE = "right"  # of documents, with all tokenizers
_RESULT_BYTES = 100  # a result without its document
_SPAN_BYTES = 64  # per token of a document with relevant spans
Count = Annotated[int, msgspec.Meta(ge=0)]
_SPAN_THRESHOLD = 0.1  # Cohere's default


class Document(msgspec.Struct):
    """A document as an object. Other keys are ignored."""

    text: str


class RelevantSpans(msgspec.Struct):
    """Request for the relevant parts of each document."""

    mode: Literal["enabled", "disabled"] | None = None
    threshold: float | None = None
    max_spans: Count | None = None


class RerankOptions(HeadOptions, kw_only=True):
    """Fields of all APIs but TEI's and Weaviate's. Unknown keys are ignored.

    Attributes:
        query: Query.
        model: Name of the served model.
        top_n: Number of results to return. 0 for all.
        top_k: Voyage's name for `top_n`.
        return_documents: Whether to return the text of each document.
        max_tokens_per_doc: Maximum number of tokens of a document. 0 for the limit of the model.
        truncate: Whether to truncate long documents instead of rejecting them.
        truncation: Voyage's name for `truncate`.
        relevant_spans: Whether and how to return the relevant parts of each document.
    """

    query: str | Document
    model: str | None = None
    top_n: Count | None = None
    top_k: Count | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None
    truncate: bool | None = None
    truncation: bool | None = None
    relevant_spans: RelevantSpans | None = None

    @property
    def truncates(self) -> bool:
        """Whether to truncate long documents."""
        return choose(self, "truncate", "truncation") is not False

    @property
    def side(self) -> tuple[str, str | None]:
        """Field with the side of long texts to truncate, and the side. None if any."""
        return "truncation_side", self.truncation_side if self.truncates else None

    @property
    def returns_documents(self) -> bool:
        """Whether to return the text of each document."""
        return bool(self.return_documents)

    @property
    def has_spans(self) -> bool:
        """Whether to return the relevant parts of each document."""
        return self.relevant_spans is not None and self.relevant_spans.mode != "disabled"

    @property
    def is_voyage(self) -> bool:
        """Whether the client must be one of Voyage."""
        return self.truncation is not None or self.top_k is not None

    @property
    def is_infinity(self) -> bool:
        """Whether the client may be one of Infinity, which reads documents as strings."""
        return self.raw_scores is not None


class DocumentsBody(RerankOptions, kw_only=True):
    """Body of `/v1/rerank` and `/v2/rerank`."""

    documents: list[str | Document]


class RerankBody(RerankOptions, kw_only=True):
    """Body of `/rerank`: `texts` of TEI, `documents` and `property` of Weaviate, or `documents` of others.

    Attributes:
        documents: Documents. Either `documents` or `texts` is set.
        texts: TEI's documents.
        return_text: TEI's name for `return_documents`.
        truncation_direction: TEI's side of a long text to remove. Only the end of documents can be removed.
        weaviate_property: Name of a property of Weaviate's objects, which is returned.
    """

    documents: list[str | Document] | None = None
    texts: list[str] | None = None
    return_text: bool | None = None
    truncation_direction: tei.Direction | None = None
    weaviate_property: str | None = msgspec.field(name="property", default=None)

    @property
    def side(self) -> tuple[str, str | None]:
        """Field with the side of long texts to truncate, and the side. None if any."""
        if self.truncation_direction is None:
            return super().side
        return "truncation_direction", self.truncation_direction.lower() if self.truncates else None

    @property
    def returns_documents(self) -> bool:
        """Whether to return the text of each document."""
        return bool(choose(self, "return_documents", "return_text"))


_FIELDS = {"inputs": "documents", "max_tokens_per_document": "max_tokens_per_doc"}
DIALECT = Dialect(
    lambda error: {"message": error.message, "detail": error.message},  # of Cohere, and of Jina and Voyage
    fields=_FIELDS,
    schema=dict[str, str],
    truncation="omit truncate and truncation",
)
SHARED_DIALECT = replace(
    tei.DIALECT,
    body=lambda error: {**tei.error_body(error), "message": error.message, "detail": error.message},
    fields=_FIELDS,
    truncation="omit truncate and truncation",
)
"""Errors of TEI with further keys, which clients of the other APIs read."""
_DOCUMENTS, _ANY = BodyParser(DocumentsBody, RERANK), BodyParser(RerankBody, RERANK)


@dataclass(frozen=True, slots=True)
class RerankRoutes:
    """Rerank routes of one model."""

    service: ModelService
    model: Model
    engine: Engine

    def routes(self) -> list[Route]:
        """Return the routes. A reranker also has `POST /`, as in TEI."""
        ranked = dict[str, Any]
        routes = [
            Route(
                "POST",
                "/rerank",
                self.rerank,
                SHARED_DIALECT,
                SCORE,
                body=_ANY.body_type,
                response=ranked | list[dict[str, Any]],
            ),
            Route(
                "POST",
                "/v1/rerank",
                self.rerank_documents,
                DIALECT,
                SCORE,
                body=_DOCUMENTS.body_type,
                response=ranked,
            ),
            Route(
                "POST",
                "/v2/rerank",
                self.rerank_documents_v2,
                DIALECT,
                SCORE,
                body=_DOCUMENTS.body_type,
                response=ranked,
            ),
        ]
        classifier = self.model.classifier
        if classifier is not None and classifier.is_reranker:
            routes.append(routes[0]._replace(path="/"))
        return routes

    async def rerank(self, request: HttpRequest) -> HttpResponse:
        """Return the relevance of each document to a query, in the API that the fields belong to."""
        started = time.monotonic()
        body, converted = await read_body(self.service, request, _ANY, self._any_request)
        field, side = body.side
        try:
            with truncation(self.service, field, side, _TRUNCATED_SIDE):
                result = await self.service.score(converted, request.budget)
        except RequestError as error:
            if body.texts is not None:
                rename_fields(error, {"documents": "texts"})
            raise
        if body.texts is not None:
            response = await self._respond(request, result, partial(_tei_reply, body, result))
            return tei.with_costs(response, request, converted, started, self.engine)
        if body.weaviate_property is not None:
            return await self._respond(request, result, partial(_weaviate_reply, body, result))
        return await self._respond(request, result, partial(self._reply, body, result, has_data=True))

    async def rerank_documents(self, request: HttpRequest) -> HttpResponse:
        """Return the relevance of each document to a query, for clients of Cohere, Jina, Voyage and vLLM."""
        return await self._rerank_documents(request, has_data=True)

    async def rerank_documents_v2(self, request: HttpRequest) -> HttpResponse:
        """Return the relevance of each document to a query, for clients of Cohere."""
        return await self._rerank_documents(request, has_data=False)

    async def _rerank_documents(self, request: HttpRequest, *, has_data: bool) -> HttpResponse:
        body, converted = await read_body(self.service, request, _DOCUMENTS, self._documents_request)
        field, side = body.side
        with truncation(self.service, field, side, _TRUNCATED_SIDE):
            result = await self.service.score(converted, request.budget)
        return await self._respond(request, result, partial(self._reply, body, result, has_data=has_data))

    def _any_request(self, body: RerankBody) -> ScoreRequest:
        if (body.texts is None) == (body.documents is None):
            raise invalid("documents", "is missing, or texts is set as well: set one of them")
        if body.texts == []:
            raise HttpError(400, "EMPTY", "texts is empty: send at least one")
        request = self._request(body, "documents" if body.texts is None else "texts")
        if body.has_spans and (body.texts is not None or body.weaviate_property is not None):
            raise invalid("relevant_spans", "is not part of the APIs of TEI and Weaviate: omit it")
        if body.weaviate_property is not None and request.activation is ScoreActivation.SIGMOID:
            return replace(request, activation=None)  # as the containers of Weaviate
        return request

    def _documents_request(self, body: DocumentsBody) -> ScoreRequest:
        return self._request(body, "documents")

    def _request(self, body: RerankOptions, field: str) -> ScoreRequest:
        body.check_limit(self.service)
        _, side = body.side
        truncates = body.truncates and side in (None, _TRUNCATED_SIDE)
        return ScoreRequest(
            model=body.model or "",
            query=_text(body.query),
            inputs=text_inputs(
                [_text(each) for each in getattr(body, field)], self.service.model.max_inputs, field
            ),
            top_n=choose(body, "top_n", "top_k") or 0,
            long_documents=LongDocuments.TRUNCATE if truncates else LongDocuments.REJECT,
            max_tokens_per_document=body.max_tokens_per_doc or 0,
            activation=body.function(ScoreActivation.SIGMOID),
            explanation_level=ExplainLevel.WORDS if body.has_spans else None,
        )

    async def _respond(
        self, request: HttpRequest, result: ScoreResult, build: Callable[[], Any]
    ) -> HttpResponse:
        explained = (each.explanation for each in result.scores if each.explanation is not None)
        size = len(result.scores) * _RESULT_BYTES + len(request.body)  # it may contain the documents
        size += _SPAN_BYTES * sum(len(text.tokens.ids) for text in explained)
        return await json_response(self.service, size, build, result.usages)

    def _reply(
        self, body: DocumentsBody | RerankBody, result: ScoreResult, *, has_data: bool
    ) -> dict[str, Any]:
        """Return a reply with the keys of all APIs, since their clients ignore keys of other APIs.

        Args:
            body: Body of the request.
            result: Its result.
            has_data: Whether to add the results as `data` with documents as strings, as Voyage does.
        """
        total, documents = num_tokens(result), body.documents or ()
        results: list[dict[str, Any]] = [
            {"index": score.index, "relevance_score": score.score} for score in result.scores
        ]
        if body.relevant_spans is not None:
            for ranked, score in zip(results, result.scores, strict=True):
                if score.explanation is not None:
                    ranked["relevant_spans"] = _spans(body.relevant_spans, score.explanation)
        data = [ranked.copy() for ranked in results]
        if body.returns_documents:
            for ranked, voyages in zip(results, data, strict=True):
                text = voyages["document"] = _text(documents[ranked["index"]])
                ranked["document"] = text if body.is_infinity else {"text": text}
        reply = {
            "id": secrets.token_hex(16),
            "object": "list" if body.is_voyage else "rerank",
            "model": self.model.name,
            "results": results,
            "usage": {"prompt_tokens": total, "total_tokens": total},
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": total}},
        }
        if has_data or body.is_voyage:
            reply["data"] = data
        return reply


def _text(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


def _tei_reply(body: RerankBody, result: ScoreResult) -> list[dict[str, Any]]:
    texts = body.texts or ()
    return [
        {
            "index": score.index,
            **({"text": texts[score.index]} if body.returns_documents else {}),
            "score": score.score,
        }
        for score in result.scores
    ]


def _weaviate_reply(body: RerankBody, result: ScoreResult) -> dict[str, Any]:
    """Return a reply with the scores in the order of the documents."""
    scores = sorted(result.scores, key=lambda score: score.index)
    documents = body.documents or ()
    return {
        "query": _text(body.query),
        "property": body.weaviate_property,
        "scores": [{"document": _text(documents[score.index]), "score": score.score} for score in scores],
    }


def _spans(options: RelevantSpans, explanation: Explanation) -> list[dict[str, Any]]:
    """Return the relevant parts of a document, as code points."""
    threshold = _SPAN_THRESHOLD if options.threshold is None else options.threshold
    found = relevant_spans(*words_of_document(explanation), threshold=threshold, max_spans=options.max_spans)
    return [{"start": span.start, "end": span.end, "score": span.score} for span in found]
