"""Requests of Score, and the tokens and parts of their documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from attnlens.classifiers import ScoreActivation
from attnlens.explanations import ExplainLevel
from attnlens_server.core.usage import Usage
from attnlens_server.errors import FieldViolation, InputTooLongError, InvalidFieldsError
from attnlens_server.operations.inputs import Request
from attnlens_server.text import (
    EncodedInput,
    EncodedPair,
    Input,
    PairEncoder,
    Tokens,
    UntokenizableError,
    parts_of,
)


class LongDocuments(IntEnum):
    """Handling of documents that are too long. The values are those of `attnlens.v1.LongDocuments`."""

    TRUNCATE = 1
    SPLIT = 2
    REJECT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(Request):
    """Request for the relevance of documents to a query.

    Attributes:
        query: Query. `inputs` are its documents, as texts. If None, `inputs` are pairs.
        top_n: Number of results to return. 0 means all.
        long_documents: What to do with documents that are too long.
        max_tokens_per_document: Maximum number of tokens of a document. 0 means as many as fit.
        activation: Function from logits to scores. None means that of the classifier.
        explanation_level: Unit of the contributions to each returned logit. None means no explanations.
    """

    query: str | None = None
    top_n: int = 0
    long_documents: LongDocuments = LongDocuments.TRUNCATE
    max_tokens_per_document: int = 0
    activation: ScoreActivation | None = None
    explanation_level: ExplainLevel | None = None

    @property
    def other_inputs(self) -> Sequence[Input]:
        """The query."""
        return () if self.query is None else (Input(text=self.query),)


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
