"""How near the vectors of a program are to those of our fp32, and the tier that this puts it in.

Speed is compared within a tier: a program that rounds more is faster, and is not the better one for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

R = TypeVar("R", bound=Mapping[str, Any])


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Cosines of a program's vectors with ours in fp32, text by text.

    Attributes:
        mean_cosine: over the texts.
        min_cosine: of the text that is furthest off.
        texts: how many were compared.
    """

    mean_cosine: float
    min_cosine: float
    texts: int


@dataclass(frozen=True, slots=True)
class Tier:
    """What vectors must keep to be compared by speed.

    Attributes:
        name: as the tables have it.
        mean_cosine: at least.
        min_cosine: at least.
    """

    name: str
    mean_cosine: float
    min_cosine: float

    def holds(self, accuracy: Accuracy) -> bool:
        """Tell whether vectors are in this tier, or in a better one."""
        return accuracy.mean_cosine >= self.mean_cosine and accuracy.min_cosine >= self.min_cosine


FP32 = Tier("fp32", 1 - 1e-6, 1 - 1e-6)  # another order of the same sums
NEAR_LOSSLESS = Tier("near-lossless", 0.9999, 0.9998)
STRICT_INT8 = Tier("int8 at 0.9998", 0.9998, 0.995)
INT8 = Tier("int8", 0.999, 0.995)  # the gate of `attnlens export --precision int8`
BELOW = Tier("misses the int8 gate", -1.0, -1.0)
TIERS = (FP32, NEAR_LOSSLESS, STRICT_INT8, INT8, BELOW)


def compare(vectors: npt.ArrayLike, expected: npt.ArrayLike) -> Accuracy:
    """Compare two arrays of vectors, (texts, D) each.

    Raises:
        ValueError: they differ in shape, or a vector is not finite or has no length.
    """
    one, other = np.asarray(vectors, np.float64), np.asarray(expected, np.float64)
    if one.shape != other.shape:
        raise ValueError(f"expected vectors of shape {other.shape}, got {one.shape}")
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    if not np.isfinite(cosines).all():
        raise ValueError("a vector is not finite, or all zeros")
    return Accuracy(float(cosines.mean()), float(cosines.min()), len(cosines))


def tier_of(accuracy: Accuracy) -> Tier:
    """Return the best tier that vectors are in."""
    return next((tier for tier in TIERS if tier.holds(accuracy)), BELOW)


def as_json(accuracy: Accuracy) -> dict[str, Any]:
    """Return the figures and the name of the tier."""
    return asdict(accuracy) | {"tier": tier_of(accuracy).name}


def of_row(row: Mapping[str, Any]) -> Accuracy | None:
    """Return what `as_json` wrote into a row; None where the row has no vectors."""
    found = row.get("accuracy")
    return found and Accuracy(found["mean_cosine"], found["min_cosine"], found["texts"])


def rank(row: Mapping[str, Any]) -> int:
    """Return the place of a row's tier, the nearest to fp32 first; a row without vectors is last."""
    accuracy = of_row(row)
    return len(TIERS) if accuracy is None else TIERS.index(tier_of(accuracy))


def in_tier(rows: Sequence[R], tier: Tier) -> list[R]:
    """Return the rows whose vectors are at least as near as the tier asks for."""
    return [row for row in rows if (accuracy := of_row(row)) is not None and tier.holds(accuracy)]
