"""Chooses the head and token that a page opens with.

Many heads attend to special tokens, to adjacent tokens or uniformly to all tokens. The page opens with the
head that attends most to distant words of the text, and with the visible token whose row shows this best.

Shapes: T tokens, L layers, H heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_viewer.page import ViewedText, ViewedToken

_NEARBY_WORDS = 2
_VISIBLE_WORDS = 16  # words that every view displays without scrolling


@dataclass(frozen=True, slots=True)
class InitialView:
    """Selected head and token row of a page."""

    layer: int
    head: int
    row: int


def initial_view(text: ViewedText) -> InitialView:
    """Return the head with the most salient attention between distant words, and its most salient row.

    The salience of a weight is its excess over the column mean, so heads that always attend to the same word
    score low. Texts without distant words open with the first head and token.
    """
    words = np.array([token.word for token in text.tokens])
    is_content = np.array([_is_word(token) for token in text.tokens])
    is_distant = np.abs(words[:, None] - words[None, :]) > _NEARBY_WORDS
    selected = is_distant & is_content[:, None] & is_content[None, :]  # (T, T)
    if not selected.any():
        return InitialView(0, 0, 0)
    salience = np.array([_row_salience(_weights(maps), selected) for maps in text.maps])  # (L, H, T)
    means = salience.mean(axis=-1)
    layer, head = (int(index) for index in np.unravel_index(means.argmax(), means.shape))
    rows = salience[layer, head]
    visible = np.where(words < _VISIBLE_WORDS, rows, 0)
    return InitialView(layer, head, int((visible if visible.any() else rows).argmax()))


def _row_salience(weights: npt.NDArray[Any], selected: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Return the largest excess over the column mean in each row of (H, T, T) maps: (H, T)."""
    excess = weights - weights.mean(axis=-2, keepdims=True)
    return np.asarray((excess * selected).max(axis=-1))


def _is_word(token: ViewedToken) -> bool:
    return not token.is_special and any(letter.isalnum() for letter in token.shown)


def _weights(maps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.square(maps / np.float32(255)) if maps.dtype == np.uint8 else maps
