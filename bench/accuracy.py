"""Accuracy of embeddings relative to the fp32 engine, and accuracy tiers.

Speed is only compared within a tier, because lower precision trades accuracy for speed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

R = TypeVar("R", bound=Mapping[str, Any])


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Per-text cosine similarity to the fp32 reference vectors.

    Attributes:
        mean_cosine: Mean over the texts.
        min_cosine: Minimum over the texts.
        texts: Number of texts compared.
    """

    mean_cosine: float
    min_cosine: float
    texts: int


@dataclass(frozen=True, slots=True)
class Tier:
    """Accuracy thresholds of a group of comparable programs.

    Attributes:
        name: Name in the tables.
        mean_cosine: Smallest permitted mean cosine.
        min_cosine: Smallest permitted cosine of a single text.
    """

    name: str
    mean_cosine: float
    min_cosine: float

    def includes(self, accuracy: Accuracy) -> bool:
        """Return whether `accuracy` meets the thresholds of this tier."""
        return accuracy.mean_cosine >= self.mean_cosine and accuracy.min_cosine >= self.min_cosine


FP32 = Tier("fp32", 1 - 1e-6, 1 - 1e-6)  # differences in summation order
NEAR_LOSSLESS = Tier("near-lossless", 0.9999, 0.9998)
STRICT_INT8 = Tier("int8 at 0.9998", 0.9998, 0.995)
INT8 = Tier("int8", 0.999, 0.995)  # the gate of `attnlens export --precision int8`
BELOW = Tier("misses the int8 gate", -1.0, -1.0)
TIERS = (FP32, NEAR_LOSSLESS, STRICT_INT8, INT8, BELOW)


def compare(vectors: npt.ArrayLike, expected: npt.ArrayLike) -> Accuracy:
    """Compare two arrays of vectors, both of shape (texts, D).

    Raises:
        ValueError: If the shapes differ, or a vector is zero or non-finite.
    """
    one, other = np.asarray(vectors, np.float64), np.asarray(expected, np.float64)
    if one.shape != other.shape:
        raise ValueError(f"expected vectors of shape {other.shape}, got {one.shape}")
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    if not np.isfinite(cosines).all():
        raise ValueError("a vector is zero or not finite")
    return Accuracy(float(cosines.mean()), float(cosines.min()), len(cosines))


def tier_of(accuracy: Accuracy) -> Tier:
    """Return the most accurate tier that includes `accuracy`."""
    return next((tier for tier in TIERS if tier.includes(accuracy)), BELOW)


def as_json(accuracy: Accuracy) -> dict[str, Any]:
    """Return the accuracy and its tier name as JSON."""
    return asdict(accuracy) | {"tier": tier_of(accuracy).name}


def of_row(row: Mapping[str, Any]) -> Accuracy | None:
    """Return the accuracy of a row, or None if the row has no embeddings."""
    fields = row.get("accuracy")
    return fields and Accuracy(fields["mean_cosine"], fields["min_cosine"], fields["texts"])


def rank(row: Mapping[str, Any]) -> int:
    """Return the index of the row's tier, most accurate first. Rows without embeddings sort last."""
    accuracy = of_row(row)
    return len(TIERS) if accuracy is None else TIERS.index(tier_of(accuracy))


def in_tier(rows: Sequence[R], tier: Tier) -> list[R]:
    """Return the rows that meet the thresholds of `tier`."""
    return [row for row in rows if (accuracy := of_row(row)) is not None and tier.includes(accuracy)]
