"""From attention between tokens to attention between words, as Clark et al. 2019 define it.

"What Does BERT Look At?" (https://arxiv.org/abs/1906.04341), section 4.1: attention to a word that was split
is the sum over its tokens, attention from it is the mean over them; so a row still sums to what it did.

Letters: N heads, T tokens, W words.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.treebank import Word

NO_WORD = -1


def words_of_tokens(words: Sequence[Word], places: Sequence[tuple[int, int]]) -> npt.NDArray[np.intp]:
    """Return for each token the number of its word, (T,); `NO_WORD`: it belongs to none.

    A token belongs to the word in which it begins.

    Args:
        words: of a sentence whose text has a space between each two of them.
        places: where each token stands in that text; an empty place belongs to no word.
    """
    ends = np.cumsum([len(word.form) + 1 for word in words])  # one past the space behind each word
    found = np.full(len(places), NO_WORD, dtype=np.intp)
    for token, (start, end) in enumerate(places):
        if end > start:
            found[token] = np.searchsorted(ends, start, side="right")
    return found


def word_level(
    weights: npt.NDArray[np.float32], token_words: npt.NDArray[np.intp], num_words: int
) -> npt.NDArray[np.float32]:
    """Return the weights between words, (N, W, W), of those between tokens, (N, T, T).

    A word without a token gives nothing and gets nothing.
    """
    belongs = (token_words[:, None] == np.arange(num_words)).astype(np.float32)  # (T, W)
    sources = belongs / np.maximum(belongs.sum(axis=0), 1)
    result: npt.NDArray[np.float32] = sources.T @ (weights @ belongs)
    return result
