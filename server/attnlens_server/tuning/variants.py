"""Engines and precisions to compare, and selection of the ones to recommend."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from attnlens_server.config import EngineName, Precision


@dataclass(frozen=True, slots=True)
class Variant:
    """Engine and precision, named as in the options of `attnlens serve`."""

    engine: EngineName
    precision: Precision

    def __str__(self) -> str:
        """Return both names, for example "onnxruntime int8"."""
        return f"{self.engine} {self.precision}"


REFERENCE = Variant("onnxruntime", "fp32")
FP16 = Variant("onnxruntime", "fp16")  # CUDA only: a CPU computes it in fp32, with casts.
OTHERS = (
    Variant("onnxruntime", "int8"),
    Variant("openvino", "fp32"),
    Variant("openvino", "bf16"),
    Variant("openvino", "int8"),
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Cosine similarity between the embeddings of a variant and of `REFERENCE`."""

    mean_cosine: float
    smallest_cosine: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Speed of a variant in one round.

    Attributes:
        device: Device name reported by the engine.
        tokens_per_s: Throughput with many waiting texts, padding excluded.
        alone_ms: Latency of one short text on an idle machine.
    """

    device: str
    tokens_per_s: float
    alone_ms: float


@dataclass(frozen=True, slots=True)
class VariantResult:
    """Measurements of a variant with default settings.

    Attributes:
        variant: Engine and precision.
        turns: Speed in each round.
        accuracy: Accuracy of its embeddings.
        memory_bytes: Resident memory of a process that runs only this variant. None if it is unknown.
        is_checked: Whether the bundle records a comparison of this variant with PyTorch.
    """

    variant: Variant
    turns: tuple[Turn, ...]
    accuracy: Accuracy
    memory_bytes: int | None
    is_checked: bool

    @property
    def device(self) -> str:
        """Device name reported by the engine."""
        return self.turns[0].device

    @property
    def tokens_per_s(self) -> float:
        """Median throughput over all rounds."""
        return median(turn.tokens_per_s for turn in self.turns)

    @property
    def alone_ms(self) -> float:
        """Median latency over all rounds."""
        return median(turn.alone_ms for turn in self.turns)

    def speed_relative_to(self, other: "VariantResult") -> float:
        """Return the median over all rounds of this throughput divided by the throughput of `other`.

        A busy machine slows down both variants of a round, so these ratios vary less than the medians.
        """
        rounds = zip(self.turns, other.turns, strict=True)
        return median(turn.tokens_per_s / other_turn.tokens_per_s for turn, other_turn in rounds)


@dataclass(frozen=True, slots=True)
class Tier:
    """Named minimum accuracy."""

    name: str
    mean_cosine: float
    smallest_cosine: float

    def includes(self, accuracy: Accuracy) -> bool:
        """Return whether `accuracy` reaches the minimum."""
        return accuracy.mean_cosine >= self.mean_cosine and accuracy.smallest_cosine >= self.smallest_cosine


# The thresholds of `attnlens check` for bf16 and of `attnlens export` for int8, which measure more texts.
TIERS = (Tier("near-lossless", 0.9999, 0.9998), Tier("approximate", 0.999, 0.995))
EXACT = Tier("exact", 1.0, 1.0)
MIN_SPEEDUP = 1.03  # minimum speedup of a lower tier over all higher tiers


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A variant to serve with.

    Attributes:
        tier: Accuracy for which it is recommended. None for a variant listed only because the user chose it.
        result: Measurements of the variant.
        relative_speed: Throughput relative to `REFERENCE`.
    """

    tier: Tier | None
    result: VariantResult
    relative_speed: float


def variants_to_compare(chosen: Variant, *, with_fp16: bool) -> list[Variant]:
    """Return the variants to compare, including `chosen`, with `REFERENCE` first."""
    return list(dict.fromkeys([REFERENCE, *([FP16] if with_fp16 else []), *OTHERS, chosen]))


def measure_accuracy(embeddings: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> Accuracy:
    """Return the accuracy of `embeddings` relative to `reference`, both (N, E)."""
    vectors, expected = embeddings.astype(np.float64), reference.astype(np.float64)
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = np.minimum((vectors * expected).sum(axis=1) / np.maximum(norms, 1e-30), 1.0)
    # Further digits are below the resolution of fp32.
    return Accuracy(round(float(cosines.mean()), 9), round(float(cosines.min()), 9))


def recommend(results: Sequence[VariantResult], chosen: Variant) -> list[Recommendation]:
    """Return the reference, and the fastest variant of each lower tier that outperforms the tiers above it.

    Args:
        results: Measurements, with `REFERENCE` first.
        chosen: Variant that is added at the end unless it is already recommended.
    """
    reference = results[0]
    recommendations = [Recommendation(EXACT, reference, 1.0)]
    for tier in TIERS:
        eligible = [
            Recommendation(tier, result, result.speed_relative_to(reference))
            for result in results[1:]
            if tier.includes(result.accuracy)
        ]
        fastest = max(eligible, key=lambda each: each.relative_speed, default=None)
        if fastest and fastest.relative_speed >= MIN_SPEEDUP * recommendations[-1].relative_speed:
            recommendations.append(fastest)
    if chosen not in {each.result.variant for each in recommendations}:
        [result] = [result for result in results if result.variant == chosen]
        recommendations.append(Recommendation(None, result, result.speed_relative_to(reference)))
    return recommendations
