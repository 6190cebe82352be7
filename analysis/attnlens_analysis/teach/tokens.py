"""The tokens of a text: their labels, and how to find one."""

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

# A page with tables of more tokens is not read.
MAX_TOKENS = 256

_NUMBER = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True)
class Sentence:
    """A text as the model reads it. T tokens.

    Attributes:
        text: as it was given.
        input_ids: (1, T) int64, special tokens included.
        tokens: what the tokenizer says of them.
    """

    text: str
    input_ids: npt.NDArray[np.int64]
    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens.texts)

    @property
    def labels(self) -> list[str]:
        """The tokens as the tokenizer spells them, made safe to show."""
        return [shown(text) for text in self.tokens.texts]

    @property
    def is_special(self) -> npt.NDArray[np.bool_]:
        """(T,): where a token is none of the text."""
        return np.array([source == TokenSource.SPECIAL for source in self.tokens.sources])

    def words(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each word of the text with the numbers of its tokens."""
        places = enumerate(self.tokens.words)
        for word, group in groupby(places, lambda place: place[1]):
            rows = [row for row, _ in group]
            if word is not None and not self.is_special[rows[0]]:
                start, end = self.tokens.chars[rows[0]][0], self.tokens.chars[rows[-1]][1]
                yield shown(self.text[start:end].strip()), rows

    def written_words(self) -> list[tuple[str, int]]:
        """Return each word of the text and the punctuation around it, with their numbers of tokens."""
        words = list(_spans(self.text))
        counts = [0] * len(words)
        for row, (start, end) in enumerate(self.tokens.chars):
            for place, (first, last) in enumerate(words):
                if not self.is_special[row] and start < last and end > first:
                    counts[place] += 1
                    break
        return [(shown(self.text[slice(*word)]), count) for word, count in zip(words, counts, strict=True)]

    def find(self, wanted: str) -> int:
        """Return the number of the one token that `wanted` names: its spelling, its word, or its number.

        Raises:
            UnknownTokenError: there is none, or there are several.
        """
        folded = wanted.casefold()
        rows = [row for row, text in enumerate(self.tokens.texts) if text.casefold() == folded]
        if not rows:
            rows = [word[0] for label, word in self.words() if label.casefold() == folded]
        if not rows and _NUMBER.fullmatch(wanted) and -len(self) <= int(wanted) < len(self):
            rows = [int(wanted) % len(self)]
        if len(rows) == 1:
            return rows[0]
        if rows:
            places = ", ".join(map(str, rows))
            raise UnknownTokenError(f"{shown(wanted)} stands at {places}: give one of these numbers")
        raise UnknownTokenError(f"no token or word {shown(wanted)!r} among: {' '.join(self.labels)}")


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each word, and of the punctuation before and after it."""
    for found in re.finditer(r"\S+", text):
        inner = [place for place in range(*found.span()) if unicodedata.category(text[place])[0] not in "PS"]
        edges = [found.start(), *((inner[0], inner[-1] + 1) if inner else ()), found.end()]
        yield from ((start, end) for start, end in pairwise(edges) if start < end)


def read_sentence(bundle: Bundle, text: str) -> Sentence:
    """Tokenize a text as the bundle's server does, without a prompt.

    Raises:
        TextError: the bundle has no tokenizer, or the text has too many tokens.
    """
    if bundle.tokenizer_path is None:
        raise TextError(f"{bundle.directory} has no tokenizer.json: export it again with --tokenizer")
    limit = min(MAX_TOKENS, bundle.model.max_tokens)
    encoder = TextEncoder(Path(bundle.tokenizer_path), bundle.model.max_tokens)
    [encoded] = encoder.encode([(text,)], with_record=True, truncate=False)
    if not 1 <= encoded.num_tokens <= limit:
        raise TextError(f"TEXT has {encoded.num_tokens} tokens, not 1 to {limit}: give another one")
    return Sentence(text, encoded.input_ids[None], encoder.describe(encoded))


def shown(text: str) -> str:
    r"""Return `text` with escapes such as `\x1b` in place of characters that can't be shown."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def largest(weights: npt.NDArray[np.float64], among: npt.NDArray[np.bool_]) -> Sequence[int]:
    """Return the places (T,) of `among`, the largest weight first."""
    order: list[int] = np.argsort(-weights, kind="stable").tolist()
    return [place for place in order if among[place]]
