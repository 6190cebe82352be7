"""Aggregates attention between tokens to attention between words.

Follows Clark et al. 2019, "What Does BERT Look At?" (https://arxiv.org/abs/1906.04341), section 4.1:
attention to a word is the sum over its tokens, attention from a word is the mean over its tokens. This
preserves row sums.

Shapes: N heads, T tokens, W words.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NO_WORD = -1


def words_of_tokens(forms: Sequence[str], offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.intp]:
    """Return the word index of each token, (T,), or `NO_WORD`.

    A token belongs to the word in which it starts.

    Args:
        forms: Words of a sentence whose text separates them with single spaces.
        offsets: Start and end of each token in the text. Tokens with empty spans belong to no word.
    """
    ends = np.cumsum([len(form) + 1 for form in forms])  # offset after the space that follows each word
    indices = np.full(len(offsets), NO_WORD, dtype=np.intp)
    for token, (start, end) in enumerate(offsets):
        if end > start:
            indices[token] = np.searchsorted(ends, start, side="right")
    return indices


def word_level(
    weights: npt.NDArray[np.float32], token_words: npt.NDArray[np.intp], num_words: int
) -> npt.NDArray[np.float32]:
    """Aggregate weights between tokens, (N, T, T), to weights between words, (N, W, W).

    Rows and columns of words without tokens are 0.
    """
    membership = (token_words[:, None] == np.arange(num_words)).astype(np.float32)  # (T, W)
    row_weights = membership / np.maximum(membership.sum(axis=0), 1)
    result: npt.NDArray[np.float32] = row_weights.T @ (weights @ membership)
    return result
