"""Score and Classify: validation, parts of documents, and scores of logits.

Shapes: N texts, C labels.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnlens.classifiers import ScoreActivation, scores_of
from attnlens_server.bundle import Classifier, Model
from attnlens_server.engine import ItemResult
from attnlens_server.errors import (
    FieldViolation,
    InputTooLongError,
    InvalidFieldsError,
    NotSupportedError,
)
from attnlens_server.serving.requests import (
    ClassifyRequest,
    LogitsPlan,
    LongDocuments,
    Prompt,
    Request,
    ScoreRequest,
)
from attnlens_server.serving.results import FloatArray, Score, Usage, check_finite
from attnlens_server.serving.validation import ExplanationValidator, InputValidator
from attnlens_server.text import (
    EncodedInput,
    EncodedPair,
    Input,
    PairEncoder,
    Tokens,
    UntokenizableError,
    parts_of,
)

_NO_PROMPT = Prompt(text="")
_SCORE_ACTIVATIONS = (ScoreActivation.IDENTITY, ScoreActivation.SIGMOID)


class ClassifierValidator:
    """Validates Score and Classify requests."""

    def __init__(
        self, model: Model, inputs: InputValidator, explanations: ExplanationValidator, *, can_score: bool
    ) -> None:
        """Initialize.

        Args:
            model: Model.
            inputs: Validator of inputs.
            explanations: Validator of explanations.
            can_score: Whether the model has a tokenizer and reads pairs.
        """
        self._model = model
        self._inputs = inputs
        self._explanations = explanations
        self._can_score = can_score

    def score(self, request: ScoreRequest) -> LogitsPlan:
        """Validate a Score request.

        Raises:
            NotSupportedError: The model is not a reranker, or does not support explanations.
            InvalidFieldsError: One or more fields are invalid.
        """
        classifier = self._classifier("Score")
        if not classifier.is_reranker:
            raise NotSupportedError(
                f"the model {self._model.name!r} has {len(classifier.labels)} labels, but Score needs a "
                "reranker, which has one: use Classify"
            )
        if not self._can_score:
            raise NotSupportedError(
                f"the bundle of {self._model.name!r} lacks a tokenizer for pairs of texts: use Classify with "
                "token_ids"
            )
        prompt, violations = self._score_texts(request)
        if request.top_n < 0:
            violations.append(FieldViolation("top_n", f"is {request.top_n}: use 1 or more, or 0 for all"))
        elif request.top_n and request.query is None:
            problem = "is set, but pairs are not sorted: omit it, or send one query with documents"
            violations.append(FieldViolation("top_n", problem))
        if (limit := request.max_tokens_per_document) < 0:
            problem = f"is {limit}: use 1 or more, or 0 for no limit"
            violations.append(FieldViolation("max_tokens_per_document", problem))
        activation = request.activation or classifier.activation
        if request.activation not in (None, *_SCORE_ACTIVATIONS):
            names = " or ".join(f"ACTIVATION_{each.name}" for each in _SCORE_ACTIVATIONS)
            problem = f"is ACTIVATION_{activation.name}: use {names}"
            violations.append(FieldViolation("activation", problem))
        if violations:
            raise InvalidFieldsError(violations)
        return LogitsPlan(prompt, activation, self._explanations.score(request, prompt))

    def classify(self, request: ClassifyRequest) -> LogitsPlan:
        """Validate a Classify request.

        Raises:
            NotSupportedError: The model is not a classifier.
            InvalidFieldsError: One or more fields are invalid.
        """
        classifier = self._classifier("Classify")
        prompt, violations = self._inputs.validate(request)
        if violations:
            raise InvalidFieldsError(violations)
        return LogitsPlan(prompt, request.activation or classifier.activation)

    def _classifier(self, method: str) -> Classifier:
        if self._model.classifier is None:
            raise NotSupportedError(
                f"the model {self._model.name!r} is not a classifier, which {method} needs: use Embed, "
                "or serve a classifier or reranker"
            )
        return self._model.classifier

    def _score_texts(self, request: ScoreRequest) -> tuple[str, list[FieldViolation]]:
        """Return the text of the prompt and the violations of the texts and of the protocol."""
        if request.query is None:
            prompt, found = self._inputs.validate(request)
            return prompt, _renamed(found, "pairs")
        query = Request(inputs=request.other_inputs, prompt=request.prompt, violations=request.violations)
        prompt, found = self._inputs.validate(query)
        violations = [
            replace(violation, field="query", input_index=None)
            if violation.field.startswith("inputs")
            else violation
            for violation in found
        ]
        if not request.query:
            violations.append(FieldViolation("query", "is empty: send some text"))
        _, found = self._inputs.validate(Request(inputs=request.inputs, prompt=_NO_PROMPT))
        return prompt, violations + _renamed(found, "documents")


def _renamed(violations: Sequence[FieldViolation], name: str) -> list[FieldViolation]:
    """Replace `inputs` in the paths of `InputValidator`: `documents[1]` for `inputs[1].text`."""
    renamed = []
    for violation in violations:
        field = violation.field
        if violation.input_index is not None:
            field = f"{name}[{violation.input_index}]"
        elif field == "inputs":
            field = name
        renamed.append(replace(violation, field=field))
    return renamed


# --- Documents ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    """Part of an input whose logit is explained.

    Attributes:
        index: Index of the input in the request.
        range: Start and end of the part in the tokens of the whole document.
        num_truncated: Number of tokens that were removed from the document.
    """

    index: int
    range: tuple[int, int]
    num_truncated: int


@dataclass(frozen=True, slots=True)
class ScoredInput:
    """A tokenized pair and the parts of its document to score.

    Attributes:
        pair: Pair, without the tokens that truncation removed.
        ranges: Start and end of each part in the document of `pair`. Each starts where the previous one ends.
        num_tokens_total: Number of tokens before truncation, the sum over the parts.
        num_skipped: Number of tokens that truncation removed from the beginning of the document.
    """

    pair: EncodedPair
    ranges: tuple[tuple[int, int], ...]
    num_tokens_total: int
    num_skipped: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all parts."""
        num_of_document = self.ranges[-1][1] - self.ranges[0][0]
        return len(self.ranges) * self.pair.frame.num_tokens + num_of_document

    def tokens_of_part(self, part: int) -> int:
        """Return the number of tokens of a part."""
        start, end = self.ranges[part]
        return self.pair.frame.num_tokens + end - start

    def explained(self, index: int, part: int) -> ExplainedPart:
        """Return a part to explain. `index` is that of the input in the request."""
        start, end = (self.num_skipped + place for place in self.ranges[part])
        return ExplainedPart(index, (start, end), self.num_tokens_total - self.num_tokens)

    @property
    def num_extra_tokens(self) -> int:
        """Number of tokens of all parts but the first."""
        return self.num_tokens - self.tokens_of_part(0)

    @property
    def usage(self) -> Usage:
        """Number of tokens of the input."""
        return Usage(self.num_tokens, self.num_tokens_total)


class DocumentEncoder:
    """Tokenizes the inputs of Score requests and cuts their documents. Runs in worker threads."""

    def __init__(self, pair_encoder: PairEncoder, max_tokens: int) -> None:
        self._pair_encoder = pair_encoder
        self._max_tokens = max_tokens

    @property
    def encodes_query_once(self) -> bool:
        """Whether a query is encoded only once for all documents."""
        return self._pair_encoder.joins

    def encode(self, request: ScoreRequest, indices: Sequence[int], prompt: str) -> list[ScoredInput]:
        """Encode the inputs with the given indices.

        Raises:
            InputTooLongError: A query leaves no token for a document, or a document is too long and may be
                neither truncated nor split.
            InvalidFieldsError: A text cannot be tokenized.
        """
        pairs = self._encode_pairs(request, indices, prompt)
        return [
            self._cut(request, index, pair, has_prompt=bool(prompt))
            for index, pair in zip(indices, pairs, strict=True)
        ]

    def describe(
        self, request: ScoreRequest, part: ExplainedPart, prompt: str
    ) -> tuple[EncodedInput, Tokens]:
        """Return a scored part of an input, and its tokens.

        Raises:
            InvalidFieldsError: The text cannot be tokenized.
        """
        query, document = _texts(request, part.index, prompt="")
        try:
            encoded, tokens = self._pair_encoder.describe(query, document, prompt, part.range)
        except UntokenizableError as error:
            field = document_field(request, part.index)
            raise InvalidFieldsError([FieldViolation(field, str(error), part.index)]) from None
        return replace(encoded, num_tokens_total=encoded.num_tokens + part.num_truncated), tokens

    def _encode_pairs(self, request: ScoreRequest, indices: Sequence[int], prompt: str) -> list[EncodedPair]:
        try:
            return self._pair_encoder.encode([_texts(request, index, prompt) for index in indices])
        except UntokenizableError as error:
            if len(indices) > 1 and not error.is_growth:  # find the text that fails
                return [pair for index in indices for pair in self._encode_pairs(request, [index], prompt)]
            field, index = document_field(request, indices[0]), indices[0]
            if not error.is_growth and not self._is_tokenizable(_texts(request, index, prompt)[0]):
                field = _query_field(request, index)
            violation = FieldViolation(field, str(error), None if field == "query" else index)
            raise InvalidFieldsError([violation]) from None

    def _is_tokenizable(self, query: str) -> bool:
        try:
            self._pair_encoder.encode([(query, "")])
        except UntokenizableError:
            return False
        return True

    def _cut(self, request: ScoreRequest, index: int, pair: EncodedPair, *, has_prompt: bool) -> ScoredInput:
        capacity = self._max_tokens - pair.frame.num_tokens
        if capacity < 1:
            raise InputTooLongError(
                _query_field(request, index),
                pair.frame.num_tokens,
                self._max_tokens - 1,
                has_prompt=has_prompt,
                input_index=None if request.query is not None else index,
                remedy="shorten it, since only documents are truncated",
                can_truncate=False,
            )
        limit = min(capacity, request.max_tokens_per_document or capacity)
        count = len(pair.document_ids)
        if count <= limit:
            return ScoredInput(pair, ((0, count),), pair.num_tokens)
        match request.long_documents:
            case LongDocuments.TRUNCATE:
                skipped = count - limit if self._pair_encoder.truncation_side == "left" else 0
                kept = replace(pair, document_ids=pair.document_ids[skipped : skipped + limit].copy())
                return ScoredInput(kept, ((0, limit),), pair.num_tokens, skipped)
            case LongDocuments.SPLIT:
                ranges = tuple(parts_of(count, limit))
                return ScoredInput(pair, ranges, len(ranges) * pair.frame.num_tokens + count)
            case LongDocuments.REJECT:
                raise InputTooLongError(
                    document_field(request, index),
                    count,
                    limit,
                    input_index=index,
                    remedy="shorten it, or let long documents be truncated or split",
                )


def _texts(request: ScoreRequest, index: int, prompt: str) -> tuple[str, str]:
    given = request.inputs[index]
    if given.text_pair is not None:
        return prompt + given.text_pair.first, given.text_pair.second
    return prompt + (request.query or ""), given.text or ""


def document_field(request: ScoreRequest, index: int) -> str:
    """Return the path of a document in the request."""
    return f"documents[{index}]" if request.query is not None else f"pairs[{index}].second"


def _query_field(request: ScoreRequest, index: int) -> str:
    return "query" if request.query is not None else f"pairs[{index}].first"


def distinct(inputs: Sequence[Input]) -> tuple[list[int], list[int]]:
    """Return the index of the first of equal inputs, for each distinct input, and the number of each input.

    >>> distinct([Input(text="a"), Input(text="b"), Input(text="a")])
    ([0, 1], [0, 1, 0])
    """
    numbers: dict[Input, int] = {}
    firsts: list[int] = []
    rows: list[int] = []
    for index, each in enumerate(inputs):
        number = numbers.setdefault(each, len(firsts))
        if number == len(firsts):
            firsts.append(index)
        rows.append(number)
    return firsts, rows


# --- Results --------------------------------------------------------------------------------------


def logits_of(results: Sequence[ItemResult]) -> FloatArray:
    """Return the logits (N, C) of all items."""
    return np.stack([result.arrays[0] for result in results])


def scores(
    request: ScoreRequest,
    plan: LogitsPlan,
    rows: Sequence[int],
    num_parts: Sequence[int],
    logits: FloatArray,
) -> list[Score]:
    """Return the scores of all inputs in the order of the response.

    Args:
        request: Request.
        plan: Plan of the request.
        rows: Number of the distinct input of each input.
        num_parts: Number of parts of each distinct input.
        logits: Logits of the parts of all distinct inputs, (P, 1).

    Raises:
        InvalidResultError: A logit is not finite.
    """
    starts = [0, *itertools.accumulate(num_parts[:-1])]
    best = list(_best_parts(logits[:, 0], starts, num_parts))
    fields = [""] * len(num_parts)
    for index in reversed(range(len(rows))):
        fields[rows[index]] = document_field(request, index)
    chosen = logits[np.add(starts, best)]  # (N, 1)
    check_finite(chosen, fields)
    activated = scores_of(chosen, plan.activation)[:, 0].tolist()
    values = chosen[:, 0].tolist()
    found = [
        Score(index, activated[row], values[row], num_parts[row], best[row]) for index, row in enumerate(rows)
    ]
    if request.query is None:
        return found
    found.sort(key=lambda score: -score.logit)  # stable, so equal logits stay in the order of the request
    return found[: request.top_n or None]


def _best_parts(logits: FloatArray, starts: Sequence[int], num_parts: Sequence[int]) -> Iterator[int]:
    for start, count in zip(starts, num_parts, strict=True):
        yield int(logits[start : start + count].argmax()) if count > 1 else 0  # the first NaN, if any
