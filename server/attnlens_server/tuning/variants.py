"""Which engines and precisions to compare, and which of them to offer. No clock and no engine in here."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from attnlens_server.config import EngineName, Precision


@dataclass(frozen=True, slots=True)
class Variant:
    """What computes embeddings, by the names of the options of `attnlens serve`."""

    engine: EngineName
    precision: Precision

    def __str__(self) -> str:
        """Return for instance "onnxruntime int8"."""
        return f"{self.engine} {self.precision}"


REFERENCE = Variant("onnxruntime", "fp32")
FP16 = Variant("onnxruntime", "fp16")  # for CUDA; on a CPU it is computed in fp32, with casts
OTHERS = (
    Variant("onnxruntime", "int8"),
    Variant("openvino", "fp32"),
    Variant("openvino", "bf16"),
    Variant("openvino", "int8"),
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far embeddings agree with those of `REFERENCE`, by the cosines of the two vectors of each text."""

    mean_cosine: float
    smallest_cosine: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What was measured of a variant in one round.

    Attributes:
        device: where it ran, in the engine's words.
        tokens_per_s: with many texts, padding not counted.
        alone_ms: milliseconds of one short text that has the machine alone.
    """

    device: str
    tokens_per_s: float
    alone_ms: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A variant that can't run here."""

    variant: Variant
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a variant with the settings that a server has by default.

    Attributes:
        variant: which.
        turns: of each round.
        accuracy: of its embeddings.
        memory_bytes: of a process with nothing else in it, after the texts of `accuracy`; None: the system
            does not tell.
        is_checked: whether the bundle says that the graphs were compared with PyTorch as they run here.
    """

    variant: Variant
    turns: tuple[Turn, ...]
    accuracy: Accuracy
    memory_bytes: int | None
    is_checked: bool

    @property
    def device(self) -> str:
        """Where it ran, in the engine's words."""
        return self.turns[0].device

    @property
    def tokens_per_s(self) -> float:
        """The median of the rounds."""
        return median(turn.tokens_per_s for turn in self.turns)

    @property
    def alone_ms(self) -> float:
        """The median of the rounds."""
        return median(turn.alone_ms for turn in self.turns)

    def speed_relative_to(self, other: "Measured") -> float:
        """Return the median of the ratios within each round.

        A machine that is slow for a while is slow for both: such a ratio is steadier than that of medians.
        """
        rounds = zip(self.turns, other.turns, strict=True)
        return median(mine.tokens_per_s / its.tokens_per_s for mine, its in rounds)


@dataclass(frozen=True, slots=True)
class Tier:
    """An accuracy that embeddings must have; see `Accuracy`."""

    name: str
    mean_cosine: float
    smallest_cosine: float

    def holds(self, accuracy: Accuracy) -> bool:
        """Return whether embeddings have it."""
        return accuracy.mean_cosine >= self.mean_cosine and accuracy.smallest_cosine >= self.smallest_cosine


# The gates of bf16 and of int8, which `attnlens check` and `attnlens export` measure on more texts.
TIERS = (Tier("near-lossless", 0.9999, 0.9998), Tier("approximate", 0.999, 0.995))
EXACT = Tier("exact", 1.0, 1.0)
WORTH_IT = 1.03  # what is less exact must be faster by this factor


@dataclass(frozen=True, slots=True)
class Offer:
    """What to serve with.

    Attributes:
        tier: where this accuracy is enough; None: it was asked for.
        measured: which variant, and what was measured of it.
        relative_speed: to the reference.
    """

    tier: Tier | None
    measured: Measured
    relative_speed: float


def variants_to_compare(asked: Variant, *, with_fp16: bool) -> list[Variant]:
    """Return all that may run, and `asked`; the reference is the first."""
    return list(dict.fromkeys([REFERENCE, *([FP16] if with_fp16 else []), *OTHERS, asked]))


def agreement(embeddings: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> Accuracy:
    """Compare embeddings with those of the reference, both (N, E), text by text."""
    mine, other = embeddings.astype(np.float64), reference.astype(np.float64)
    lengths = np.linalg.norm(mine, axis=1) * np.linalg.norm(other, axis=1)
    cosines = np.minimum((mine * other).sum(axis=1) / np.maximum(lengths, 1e-30), 1.0)
    return Accuracy(round(float(cosines.mean()), 9), round(float(cosines.min()), 9))  # fp32 has no more


def offers(rows: Sequence[Measured], asked: Variant) -> list[Offer]:
    """Return the reference, then the fastest of each lower accuracy where it is faster than those before it.

    Args:
        rows: of which the first is the reference.
        asked: comes last, if it is not one of the others.
    """
    reference = rows[0]
    offered = [Offer(EXACT, reference, 1.0)]
    for tier in TIERS:
        fitting = [
            Offer(tier, row, row.speed_relative_to(reference)) for row in rows[1:] if tier.holds(row.accuracy)
        ]
        fastest = max(fitting, key=lambda offer: offer.relative_speed, default=None)
        if fastest and fastest.relative_speed >= WORTH_IT * offered[-1].relative_speed:
            offered.append(fastest)
    if asked not in {offer.measured.variant for offer in offered}:
        [row] = [row for row in rows if row.variant == asked]
        offered.append(Offer(None, row, row.speed_relative_to(reference)))
    return offered
