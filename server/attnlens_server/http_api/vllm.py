"""vLLM's `/score`, `/v1/score` and `/classify`. `/rerank` is in `rerank`."""

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnlens.classifiers import ScoreActivation
from attnlens_server.bundle import Model
from attnlens_server.errors import FieldViolation, InvalidFieldsError, RequestError
from attnlens_server.http_api import openai
from attnlens_server.http_api.exchange import (
    CLASSIFY,
    SCORE,
    BodyParser,
    Dialect,
    HttpRequest,
    HttpResponse,
    Route,
)
from attnlens_server.http_api.json_bodies import (
    Texts,
    TokenLimit,
    check_count,
    choose,
    invalid,
    json_response,
    num_tokens,
    read_body,
    text_inputs,
    truncation,
)
from attnlens_server.http_api.known_options import VLLM_CLASSIFY, VLLM_SCORE
from attnlens_server.operations.classify import ClassifyRequest, ClassifyResult
from attnlens_server.operations.documents import LongDocuments, ScoreRequest
from attnlens_server.operations.score import ScoreResult
from attnlens_server.operations.service import ModelService
from attnlens_server.text import Input, TextPair

_FIRST, _SECOND = ("text_1", "data_1", "queries"), ("text_2", "data_2", "documents", "items")
_RESULT_BYTES = 60


class HeadOptions(TokenLimit, kw_only=True):
    """Options for models with a head, such as rerankers.

    Attributes:
        raw_scores: Whether to return logits. TEI's and Infinity's opposite of `use_activation`.
        use_activation: Whether to return scores from 0 to 1 instead of logits.
        activation: An earlier name of `use_activation`.
        softmax: An earlier name of `use_activation`.
    """

    raw_scores: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None

    def function(self, usual: ScoreActivation) -> ScoreActivation:
        """Return the function from logits to scores.

        Raises:
            BodyError: The options contradict each other.
        """
        is_used = choose(self, "use_activation", "activation", "softmax")
        if is_used is not None and is_used == self.raw_scores:
            raise invalid("raw_scores", "contradicts use_activation: send one of them")
        return ScoreActivation.IDENTITY if self.raw_scores or is_used is False else usual


class ScoreBody(HeadOptions, kw_only=True):
    """Body of `/score`: one text and several others, or pairs of texts with the same index.

    Attributes:
        text_1: First text of all pairs, or of each.
        data_1: Same as `text_1`.
        queries: Same as `text_1`.
        text_2: Second text of each pair.
        data_2: Same as `text_2`.
        documents: Same as `text_2`.
        items: Same as `text_2`.
        model: Name of the served model.
    """

    text_1: Texts | None = None
    data_1: Texts | None = None
    queries: Texts | None = None
    text_2: Texts | None = None
    data_2: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    model: str | None = None

    def choice(self, names: Sequence[str]) -> tuple[str, Texts]:
        """Return the name and the value of the only field that is set.

        Raises:
            InvalidFieldsError: No field is set, or several are.
        """
        found = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        if len(found) != 1:
            raise invalid(names[0], f"is missing, or set twice: set one of {', '.join(names)}")
        return found[0]


class ClassifyBody(HeadOptions, kw_only=True):
    """Body of `/classify`.

    Attributes:
        input: One text or several.
        model: Name of the served model.
        truncate: Whether to truncate long texts instead of rejecting them. Not part of vLLM's API.
    """

    input: Texts
    model: str | None = None
    truncate: bool | None = None

    @property
    def truncates(self) -> bool | None:
        """Whether to truncate long texts. None for the default of the server."""
        return True if self.truncate is None and self.truncate_prompt_tokens is not None else self.truncate


DIALECT = Dialect(
    openai.error_body,
    fields={"inputs": "input"},
    schema=openai.ErrorResponse,
    truncation="set truncate_prompt_tokens to -1",
)
_SCORE, _CLASSIFY = BodyParser(ScoreBody, VLLM_SCORE), BodyParser(ClassifyBody, VLLM_CLASSIFY)
_TRUNCATED_SIDE = "right"  # of the second text, with all tokenizers


@dataclass(frozen=True, slots=True)
class VllmRoutes:
    """Routes of one model."""

    service: ModelService
    model: Model

    def routes(self) -> list[Route]:
        """Return the routes."""
        score: dict[str, Any] = {"body": _SCORE.body_type, "response": dict[str, Any]}
        return [
            Route("POST", "/score", self.score, DIALECT, SCORE, **score),
            Route("POST", "/v1/score", self.score, DIALECT, SCORE, **score),
            Route(
                "POST",
                "/classify",
                self.classify,
                DIALECT,
                CLASSIFY,
                body=_CLASSIFY.body_type,
                response=dict[str, Any],
            ),
        ]

    async def score(self, request: HttpRequest) -> HttpResponse:
        """Return the relevance of texts to other texts, in the order of the request."""
        body, converted = await read_body(self.service, request, _SCORE, self._score_request)
        try:
            with truncation(self.service, "truncation_side", body.truncation_side, _TRUNCATED_SIDE):
                result = await self.service.score(converted, request.budget)
        except RequestError as error:
            _rename_pairs(error, body)
            raise
        size = len(result.scores) * _RESULT_BYTES
        return await json_response(self.service, size, lambda: self._scores(result), result.usages)

    async def classify(self, request: HttpRequest) -> HttpResponse:
        """Return the probabilities of all labels for each text, and the label with the highest one."""
        body, converted = await read_body(self.service, request, _CLASSIFY, self._classify_request)
        with truncation(self.service, "truncation_side", body.truncation_side if body.truncates else None):
            result = await self.service.classify(converted, request.budget)
        size = result.scores.nbytes + len(result.usages) * _RESULT_BYTES
        return await json_response(self.service, size, lambda: self._labels(result), result.usages)

    def _score_request(self, body: ScoreBody) -> ScoreRequest:
        body.check_limit(self.service)
        first_name, first = body.choice(_FIRST)
        second_name, second = body.choice(_SECOND)
        firsts = [first] if isinstance(first, str) else first
        seconds = [second] if isinstance(second, str) else second
        check_count(seconds, self.service.model.max_inputs, second_name)
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            problem = (
                f"has {len(firsts)} texts, but {second_name} has {len(seconds)}: send 1 or {len(seconds)}"
            )
            raise invalid(first_name, problem)
        pairs = zip(firsts, seconds, strict=True)
        is_supported = body.truncation_side in (None, _TRUNCATED_SIDE)
        return ScoreRequest(
            model=body.model or "",
            inputs=[Input(text_pair=TextPair(*pair)) for pair in pairs],
            long_documents=LongDocuments.TRUNCATE if is_supported else LongDocuments.REJECT,
            activation=body.function(ScoreActivation.SIGMOID),
        )

    def _classify_request(self, body: ClassifyBody) -> ClassifyRequest:
        body.check_limit(self.service)
        classifier = self.model.classifier
        usual = classifier.activation if classifier else ScoreActivation.SOFTMAX
        is_supported = body.truncation_side in (None, self.service.model.truncation_side)
        return ClassifyRequest(
            model=body.model or "",
            inputs=text_inputs(body.input, self.service.model.max_inputs, "input"),
            truncate=body.truncates if is_supported else False,
            activation=body.function(usual),
        )

    def _scores(self, result: ScoreResult) -> dict[str, Any]:
        return self._reply(
            result, [{"index": each.index, "object": "score", "score": each.score} for each in result.scores]
        )

    def _labels(self, result: ClassifyResult) -> dict[str, Any]:
        best = result.logits.argmax(axis=1).tolist()
        rows = np.ascontiguousarray(result.scores)
        return self._reply(
            result,
            [
                {"index": index, "label": result.labels[label], "probs": row, "num_classes": len(row)}
                for index, (label, row) in enumerate(zip(best, rows, strict=True))
            ],
        )

    def _reply(self, result: ScoreResult | ClassifyResult, data: list[dict[str, Any]]) -> dict[str, Any]:
        total = num_tokens(result)
        return {
            "id": secrets.token_hex(16),
            "object": "list",
            "created": int(time.time()),
            "model": self.model.name,
            "data": data,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }


def _rename_pairs(error: RequestError, body: ScoreBody) -> None:
    """Replace `pairs[1].first` by the name of the field, such as `text_1[1]`."""
    if not error.violations:
        return
    names = {"first": body.choice(_FIRST), "second": body.choice(_SECOND)}

    def field(match: re.Match[str]) -> str:
        name, value = names[match["side"] or "second"]
        index = match["index"] if isinstance(value, list) and len(value) > 1 else None
        return f"{name}[{index}]" if index else name

    violations = [
        FieldViolation(re.sub(_PAIR, field, each.field), each.description) for each in error.violations
    ]
    error.violations, error.message = tuple(violations), InvalidFieldsError(violations).message


_PAIR = re.compile(r"^pairs(\[(?P<index>\d+)\])?(\.(?P<side>first|second))?")
