"""Which head and which token a page opens with.

Many heads look at special tokens, at neighbours, or at all tokens alike. The page opens with the head that
looks most from words of the text to words further away, and with the token that does it most clearly, among
those that can be seen without scrolling.

Letters: T tokens, H heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_viewer.page import ViewedText, ViewedToken

_NEAR = 2  # words
_VISIBLE = 16  # words that each view shows without scrolling


@dataclass(frozen=True, slots=True)
class Place:
    """A head, and a token whose row is shown."""

    layer: int
    head: int
    row: int


def telling_place(text: ViewedText) -> Place:
    """Return the head whose rows stand out most between words that are far apart, and its clearest row.

    A weight stands out by how far it is above the mean of its column: a head that always looks at one word
    tells less.

    Where the text has no such words, it is the first head and the first token.
    """
    words = np.array([token.word for token in text.tokens])
    is_content = np.array([_is_word(token) for token in text.tokens])
    far = np.abs(words[:, None] - words[None, :]) > _NEAR
    wanted = far & is_content[:, None] & is_content[None, :]  # (T, T)
    if not wanted.any():
        return Place(0, 0, 0)
    largest = np.array([_standing_out(_weights(maps), wanted) for maps in text.maps])  # (L, H, T)
    means = largest.mean(axis=-1)
    layer, head = (int(number) for number in np.unravel_index(means.argmax(), means.shape))
    rows = largest[layer, head]
    visible = np.where(words < _VISIBLE, rows, 0)
    return Place(layer, head, int((visible if visible.any() else rows).argmax()))


def _standing_out(weights: npt.NDArray[Any], wanted: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Return for each row of maps (H, T, T) its largest distance to the mean of a column: (H, T)."""
    above = weights - weights.mean(axis=-2, keepdims=True)
    return np.asarray((above * wanted).max(axis=-1))


def _is_word(token: ViewedToken) -> bool:
    return not token.is_special and any(letter.isalnum() for letter in token.shown)


def _weights(maps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.square(maps / np.float32(255)) if maps.dtype == np.uint8 else maps
