"""Tokenized texts: token labels, words and token lookup."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnlens_analysis.errors import TextError, UnknownTokenError
from attnlens_server.bundle import Bundle
from attnlens_server.text import TextEncoder, Tokens, TokenSource

# Pages with more tokens are hard to read.
MAX_TOKENS = 256

_NUMBER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True)
class Sentence:
    """A tokenized text with T tokens.

    Attributes:
        text: Original text.
        input_ids: (1, T) int64, including special tokens.
        tokens: Token metadata.
    """

    text: str
    input_ids: npt.NDArray[np.int64]
    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens.texts)

    @property
    def labels(self) -> list[str]:
        """Token strings with non-printable characters escaped."""
        return [shown(text) for text in self.tokens.texts]

    @property
    def is_special(self) -> npt.NDArray[np.bool_]:
        """(T,) whether each token is a special token."""
        return np.array([source == TokenSource.SPECIAL for source in self.tokens.sources])

    def words(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each word of the text with the indices of its tokens."""
        indexed = enumerate(self.tokens.words)
        for word, group in groupby(indexed, lambda pair: pair[1]):
            rows = [row for row, _ in group]
            if word is not None and not self.is_special[rows[0]]:
                start, end = self.tokens.chars[rows[0]][0], self.tokens.chars[rows[-1]][1]
                yield shown(self.text[start:end].strip()), rows

    def written_words(self) -> list[tuple[str, int]]:
        """Return each word and punctuation mark of the text with its number of tokens."""
        words = list(_spans(self.text))
        counts = [0] * len(words)
        for row, (start, end) in enumerate(self.tokens.chars):
            for index, (first, last) in enumerate(words):
                if not self.is_special[row] and start < last and end > first:
                    counts[index] += 1
                    break
        return [(shown(self.text[slice(*word)]), count) for word, count in zip(words, counts, strict=True)]

    def find(self, query: str) -> int:
        """Return the index of a token, given its string, its word or its index.

        Raises:
            UnknownTokenError: No token or several tokens match.
        """
        folded = query.casefold()
        rows = [row for row, text in enumerate(self.tokens.texts) if text.casefold() == folded]
        if not rows:
            rows = [word[0] for label, word in self.words() if label.casefold() == folded]
        if not rows and _NUMBER.fullmatch(query) and -len(self) <= int(query) < len(self):
            rows = [int(query) % len(self)]
        if len(rows) == 1:
            return rows[0]
        if rows:
            indices = ", ".join(map(str, rows))
            raise UnknownTokenError(f"{shown(query)!r} is ambiguous. Use one of the token indices {indices}.")
        raise UnknownTokenError(f"no token or word {shown(query)!r} in: {' '.join(self.labels)}")


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each word, and of leading and trailing punctuation."""
    for match in re.finditer(r"\S+", text):
        inner = [index for index in range(*match.span()) if unicodedata.category(text[index])[0] not in "PS"]
        edges = [match.start(), *((inner[0], inner[-1] + 1) if inner else ()), match.end()]
        yield from ((start, end) for start, end in pairwise(edges) if start < end)


def read_sentence(bundle: Bundle, text: str) -> Sentence:
    """Tokenize a text like the server, without a prompt.

    Raises:
        TextError: The bundle has no tokenizer, or the text has too many tokens.
    """
    if bundle.tokenizer_path is None:
        raise TextError(f"{bundle.directory} has no tokenizer.json. Export it again with --tokenizer.")
    limit = min(MAX_TOKENS, bundle.model.max_tokens)
    encoder = TextEncoder(Path(bundle.tokenizer_path), bundle.model.max_tokens, bundle.model.chat_template)
    [encoded] = encoder.encode([(text,)], with_record=True, truncate=False)
    if not 1 <= encoded.num_tokens <= limit:
        raise TextError(f"TEXT has {encoded.num_tokens} tokens, but must have 1 to {limit}")
    return Sentence(text, encoded.input_ids[None], encoder.describe(encoded))


def shown(text: str) -> str:
    r"""Replace non-printable characters with escape sequences such as `\x1b`."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def largest(weights: npt.NDArray[np.float64], among: npt.NDArray[np.bool_]) -> Sequence[int]:
    """Return the indices selected by `among` (T,), in descending order of weight."""
    order: list[int] = np.argsort(-weights, kind="stable").tolist()
    return [index for index in order if among[index]]
