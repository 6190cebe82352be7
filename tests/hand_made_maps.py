"""Handwritten attention maps with their tokens."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnlens_analysis.heads.maps import TextMaps
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
