"""Which head and which token a page opens with.

Many heads look at special tokens, at neighbours, or at all tokens alike. The page opens with the head that looks the
most from words of the text to words further away, and with the token that does it most clearly.

Letters: T tokens, H heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attnlens_viewer.page import ViewedText

_NEAR = 2  # words


@dataclass(frozen=True, slots=True)
class Place:
    """A head, and a token whose row is shown."""

    layer: int
    head: int
    row: int


def telling_place(text: ViewedText) -> Place:
    """Return the head with the largest mean weight between words that are far apart, and its clearest row.

    Where the text has no such words, it is the first head and the first token.
    """
    words = np.array([token.word for token in text.tokens])
    is_content = np.array([not token.is_special for token in text.tokens])
    far = np.abs(words[:, None] - words[None, :]) > _NEAR
    wanted = far & is_content[:, None] & is_content[None, :]  # (T, T)
    if not wanted.any():
        return Place(0, 0, 0)
    means = np.array([_weights(maps)[:, wanted].mean(axis=-1) for maps in text.maps])  # (L, H)
    layer, head = (int(number) for number in np.unravel_index(means.argmax(), means.shape))
    largest = np.where(wanted, _weights(text.maps[layer])[head], 0).max(axis=-1)  # (T,)
    return Place(layer, head, int(largest.argmax()))


def _weights(maps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.square(maps / np.float32(255)) if maps.dtype == np.uint8 else maps
