"""Handwritten attention maps with their tokens."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.maps import EncodedText, Head, TextMaps
from attnlens_server.text import Tokens, TokenSource

CLS, SEP = 101, 102


def made_maps(content: Sequence[int], weights: Sequence[npt.ArrayLike]) -> TextMaps:
    """Return maps of N heads for [CLS], single-character tokens and [SEP]."""
    ids = [CLS, *content, SEP]
    special, text = TokenSource.SPECIAL, TokenSource.TEXT
    places = [(0, 0), *((start, start + 1) for start in range(len(content))), (0, 0)]
    sources = [special, *[text] * len(content), special]
    tokens = Tokens(ids, [str(number) for number in ids], sources, places, places, [None] * len(ids))
    return TextMaps(tokens, np.asarray(weights, dtype=np.float32))


def pointing(targets: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return a map whose row i attends only to token targets[i]."""
    return np.eye(len(targets), dtype=np.float32)[list(targets)]


class WordSource:
    """Stands in for `MapSource`: every word is a token between [CLS] and [SEP], and weights are given."""

    def __init__(
        self, weights_of: Callable[[Sequence[str]], npt.NDArray[np.float32]], num_heads: int
    ) -> None:
        """Use a function from the words of a text to the weights (N, T, T), with T = number of words + 2."""
        self._weights_of = weights_of
        self.heads = tuple(Head(0, head) for head in range(num_heads))

    def encode(self, texts: Sequence[str]) -> list[EncodedText | None]:
        """Return one token per word, and None for the text "too long"."""
        return [None if text == "too long" else self._encoded(text.split(" ")) for text in texts]

    def of_texts(self, texts: Sequence[EncodedText]) -> Iterator[tuple[int, TextMaps]]:
        """Yield the texts in reverse order."""
        for index in reversed(range(len(texts))):
            tokens = texts[index].tokens
            yield index, TextMaps(tokens, self._weights_of(tokens.texts[1:-1]))

    def _encoded(self, words: Sequence[str]) -> EncodedText:
        starts = np.cumsum([0, *(len(word) + 1 for word in words)]).tolist()
        places = [(0, 0), *((start, start + len(word)) for start, word in zip(starts, words, strict=False))]
        places.append((0, 0))
        special, text = TokenSource.SPECIAL, TokenSource.TEXT
        sources = [special, *[text] * len(words), special]
        ids = [CLS, *range(1000, 1000 + len(words)), SEP]
        texts = ["[CLS]", *words, "[SEP]"]
        tokens = Tokens(ids, texts, sources, places, places, [None] * len(ids))
        return EncodedText(np.array(ids), tokens)
