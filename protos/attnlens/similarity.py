"""Functions that compare two embeddings."""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt


class Similarity(IntEnum):
    """Similarity functions, with the numbers of `attnlens.v1.Similarity`."""

    COSINE = 1
    DOT = 2

    @property
    def label(self) -> str:
        """Name for readers."""
        return "cosine" if self is Similarity.COSINE else "dot product"

    def of(self, first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
        """Return the similarity of two embeddings (E,) in float64. That of a zero vector is 0."""
        dot = float(np.dot(first.astype(np.float64), second.astype(np.float64)))
        lengths = 1.0 if self is Similarity.DOT else float(np.linalg.norm(first) * np.linalg.norm(second))
        return dot / lengths if lengths else 0.0
