"""Inputs of rerankers: a query and each of its documents.

The tokenizer encodes both texts of a pair on their own, and then adds special tokens. For most tokenizers, a
query can therefore be encoded once and joined with each of its documents. `PairEncoder` verifies this, and
encodes whole pairs with other tokenizers.

Shapes: T tokens of an input, D tokens of a document.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import tokenizers

from attnlens_server.text.tokenizer import TextEncoder, UntokenizableError
from attnlens_server.text.tokens import EncodedInput, Tokens

Ids = npt.NDArray[np.int64]

_SAMPLES = (
    ("a", "b"),
    ("Who wrote it?", "It was written in 1813, by an author whose name isn't known."),
    (" two  spaces ", "\n tabs\t"),
    ("naïve café", "北京 Straße 😀"),
    ("", "only a document"),
    ("only a query", ""),
)


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens of an input around its document.

    Attributes:
        before_ids: Ids of the special tokens and the query before the document.
        before_types: Types of these tokens.
        after_ids: Ids of the special tokens after the document.
        after_types: Types of these tokens.
        document_type: Type of the document's tokens.
    """

    before_ids: Ids
    before_types: Ids
    after_ids: Ids
    after_types: Ids
    document_type: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an input with an empty document."""
        return len(self.before_ids) + len(self.after_ids)


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """A tokenized query and document, without truncation.

    Attributes:
        frame: Tokens around the document.
        document_ids: Ids of the document's tokens (D,).
    """

    frame: Frame
    document_ids: Ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return self.frame.num_tokens + len(self.document_ids)

    def arrays(self, start: int, end: int) -> tuple[Ids, Ids]:
        """Return the ids and types (T,) of an input with a part of the document."""
        frame, part = self.frame, self.document_ids[start:end]
        types = np.full(len(part), frame.document_type, np.int64)
        return (
            np.concatenate((frame.before_ids, part, frame.after_ids)),
            np.concatenate((frame.before_types, types, frame.after_types)),
        )


class PairEncoder:
    """Encodes pairs of a query and a document.

    Attributes:
        joins: Whether queries and documents are encoded separately and joined.
        truncation_side: Side of a long document that truncation removes, "left" or "right".
    """

    def __init__(self, text_encoder: TextEncoder) -> None:
        self._text_encoder = text_encoder
        self._template = _template(text_encoder)
        self.joins = self._template is not None
        self.truncation_side = text_encoder.truncation_side

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair]:
        """Encode pairs. Equal queries are encoded once.

        Raises:
            UntokenizableError: The tokenizer fails, or the normalized texts are too long.
        """
        if self._template is None:
            return [_split(encoding) for encoding in self._text_encoder.encode_pairs(pairs)]
        queries = list(dict.fromkeys(query for query, _ in pairs))
        encoded = self._text_encoder.encode_alone([*queries, *(document for _, document in pairs)])
        frames = dict(zip(queries, map(self._template.frame, encoded), strict=False))
        return [
            EncodedPair(frames[query], np.asarray(ids, np.int64))
            for (query, _), ids in zip(pairs, encoded[len(queries) :], strict=True)
        ]

    def describe(
        self, query: str, document: str, prompt: str, part: tuple[int, int]
    ) -> tuple[EncodedInput, Tokens]:
        """Return the input with a part of the document, and its tokens.

        Args:
            query: Query without the prompt.
            document: Whole document.
            prompt: Prompt that precedes the query.
            part: Start and end of the part in the tokens of the document.

        Raises:
            UntokenizableError: See `encode`.
        """
        [whole] = self._text_encoder.encode(
            [(query, document)], prompt=prompt, with_record=True, truncate=False
        )
        assert whole.record is not None  # noqa: S101 - requested
        sources = whole.record.encoding.sequence_ids
        first = sources.index(1) if 1 in sources else 0  # the tokens of a document are contiguous
        kept = range(first + part[0], first + part[1])
        rows = [row for row, source in enumerate(sources) if source != 1 or row in kept]
        del sources
        types = whole.token_type_ids
        encoded = EncodedInput(
            whole.input_ids[rows], len(rows), token_type_ids=None if types is None else types[rows]
        )
        return encoded, self._text_encoder.describe(whole).select(rows)


@dataclass(frozen=True, slots=True)
class _Template:
    """Special tokens of a pair and the types of all tokens, as lists of ids and types."""

    first: Frame
    between_ids: Ids
    between_types: Ids
    query_type: int

    def frame(self, query: Sequence[int]) -> Frame:
        """Return the tokens around the documents of a query, given by its ids."""
        first = self.first
        ids = (first.before_ids, np.asarray(query, np.int64), self.between_ids)
        types = (first.before_types, np.full(len(query), self.query_type, np.int64), self.between_types)
        return Frame(
            np.concatenate(ids),
            np.concatenate(types),
            first.after_ids,
            first.after_types,
            first.document_type,
        )


def _template(text_encoder: TextEncoder) -> _Template | None:
    """Return the template of pairs, or None if joined texts differ from encoded pairs."""
    try:
        encoded = text_encoder.encode_pairs(_SAMPLES)
        alone = text_encoder.encode_alone([text for pair in _SAMPLES for text in pair])
    except UntokenizableError:
        return None
    sources = encoded[0].sequence_ids
    if {*sources} != {0, 1, None} and {*sources} != {0, 1}:
        return None
    query, document = (
        range(sources.index(number), len(sources) - sources[::-1].index(number)) for number in (0, 1)
    )
    if query.stop > document.start:
        return None
    ids, types = np.asarray(encoded[0].ids, np.int64), np.asarray(encoded[0].type_ids, np.int64)
    template = _Template(
        Frame(
            ids[: query.start],
            types[: query.start],
            ids[document.stop :],
            types[document.stop :],
            int(types[document.start]),
        ),
        ids[query.stop : document.start],
        types[query.stop : document.start],
        int(types[query.start]),
    )
    for whole, first, second in zip(encoded, alone[::2], alone[1::2], strict=True):
        joined = EncodedPair(template.frame(first), np.asarray(second, np.int64))
        ids, types = joined.arrays(0, len(second))
        if ids.tolist() != whole.ids or types.tolist() != whole.type_ids:
            return None
    return template


def _split(encoding: tokenizers.Encoding) -> EncodedPair:
    """Separate the document from the other tokens of an encoded pair."""
    ids, types = np.asarray(encoding.ids, np.int64), np.asarray(encoding.type_ids, np.int64)
    sources = encoding.sequence_ids
    start = sources.index(1) if 1 in sources else len(sources)
    end = len(sources) - sources[::-1].index(1) if 1 in sources else len(sources)
    document_type = int(types[start]) if start < end else 0
    frame = Frame(ids[:start], types[:start], ids[end:], types[end:], document_type)
    return EncodedPair(frame, ids[start:end])


def parts_of(num_tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of consecutive parts of a document. An empty document has one part."""
    for start in range(0, max(num_tokens, 1), size):
        yield start, min(start + size, num_tokens)
