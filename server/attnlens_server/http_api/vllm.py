"""vLLM's `/score`, `/v1/score` and `/classify`. `/rerank` is in `rerank`."""

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
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
    check_count,
    invalid,
    json_response,
    num_tokens,
    read_body,
    text_inputs,
)
from attnlens_server.serving.requests import ClassifyRequest, ScoreRequest
from attnlens_server.serving.results import ClassifyResult, ScoreResult
from attnlens_server.serving.service import ModelService
from attnlens_server.text import Input, TextPair

_FIRST, _SECOND = ("text_1", "data_1", "queries"), ("text_2", "data_2", "documents", "items")
_RESULT_BYTES = 60


class ScoreBody(msgspec.Struct, kw_only=True):
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
        use_activation: Whether to return scores from 0 to 1 instead of logits.
    """

    text_1: Texts | None = None
    data_1: Texts | None = None
    queries: Texts | None = None
    text_2: Texts | None = None
    data_2: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    model: str = ""
    use_activation: bool | None = None

    def choice(self, names: Sequence[str]) -> tuple[str, Texts]:
        """Return the name and the value of the only field that is set.

        Raises:
            InvalidFieldsError: No field is set, or several are.
        """
        found = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        if len(found) != 1:
            raise invalid(names[0], f"is missing, or set twice: set one of {', '.join(names)}")
        return found[0]


class ClassifyBody(msgspec.Struct, kw_only=True):
    """Body of `/classify`.

    Attributes:
        input: One text or several.
        model: Name of the served model.
        truncate: Whether to truncate long texts instead of rejecting them. Not part of vLLM's API.
        use_activation: Whether to return probabilities instead of logits.
    """

    input: Texts
    model: str = ""
    truncate: bool = False
    use_activation: bool | None = None


DIALECT = Dialect(openai.error_body, fields={"inputs": "input"}, schema=openai.ErrorResponse)
_SCORE, _CLASSIFY = BodyParser(ScoreBody), BodyParser(ClassifyBody)


@dataclass(frozen=True, slots=True)
class VllmRoutes:
    """Routes of one model."""

    service: ModelService
    model: Model

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("POST", "/score", self.score, DIALECT, SCORE, body=ScoreBody, response=dict[str, Any]),
            Route("POST", "/v1/score", self.score, DIALECT, SCORE, body=ScoreBody, response=dict[str, Any]),
            Route(
                "POST",
                "/classify",
                self.classify,
                DIALECT,
                CLASSIFY,
                body=ClassifyBody,
                response=dict[str, Any],
            ),
        ]

    async def score(self, request: HttpRequest) -> HttpResponse:
        """Return the relevance of texts to other texts, in the order of the request."""
        body, converted = await read_body(self.service, request, _SCORE, self._score_request)
        try:
            result = await self.service.score(converted, request.budget)
        except RequestError as error:
            _rename_pairs(error, body)
            raise
        size = len(result.scores) * _RESULT_BYTES
        return await json_response(self.service, request, size, lambda: self._scores(result))

    async def classify(self, request: HttpRequest) -> HttpResponse:
        """Return the probabilities of all labels for each text, and the label with the highest one."""
        _, converted = await read_body(self.service, request, _CLASSIFY, self._classify_request)
        result = await self.service.classify(converted, request.budget)
        size = result.scores.nbytes + len(result.usages) * _RESULT_BYTES
        return await json_response(self.service, request, size, lambda: self._labels(result))

    def _score_request(self, body: ScoreBody) -> ScoreRequest:
        first_name, first = body.choice(_FIRST)
        second_name, second = body.choice(_SECOND)
        firsts = [first] if isinstance(first, str) else first
        seconds = [second] if isinstance(second, str) else second
        check_count(seconds, self.service.max_inputs, second_name)
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        if len(firsts) != len(seconds):
            problem = (
                f"has {len(firsts)} texts, but {second_name} has {len(seconds)}: send 1 or {len(seconds)}"
            )
            raise invalid(first_name, problem)
        pairs = zip(firsts, seconds, strict=True)
        return ScoreRequest(
            model=body.model,
            inputs=[Input(text_pair=TextPair(*pair)) for pair in pairs],
            activation=_activation(ScoreActivation.SIGMOID, body.use_activation),
        )

    def _classify_request(self, body: ClassifyBody) -> ClassifyRequest:
        classifier = self.model.classifier
        usual = classifier.activation if classifier else ScoreActivation.SOFTMAX
        return ClassifyRequest(
            model=body.model,
            inputs=text_inputs(body.input, self.service.max_inputs),
            truncate=body.truncate,
            activation=_activation(usual, body.use_activation),
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


def _activation(usual: ScoreActivation, is_used: bool | None) -> ScoreActivation:
    return ScoreActivation.IDENTITY if is_used is False else usual


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
