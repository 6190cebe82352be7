"""Profiles the embedding graph of a bundle at several lengths."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnlens_analysis.profile.parts import ATTENTION, PARTS, Part
from attnlens_analysis.profile.trace import Run, trace_runs
from attnlens_server.bundle import Bundle

# The minimum over runs is used for each node, since other processes disturb some runs.
NUM_RUNS = 5
_HALF = 0.5
_MAX_SPREAD = 0.03  # maximum difference of a share between two halves of the runs


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """Run time and memory of one text.

    Attributes:
        length: Number of tokens.
        total_ms: Duration of the fastest run.
        part_ms: Time in the nodes of each part, with the fastest run of each node.
        largest_bytes: Size of the largest node output of each part.
        peak_bytes: Peak usage of the ONNX Runtime allocator, excluding parameters and inputs.
        share_spread: Largest difference of a part's share between one half of the runs and the other.
    """

    length: int
    total_ms: float
    part_ms: dict[Part, float]
    largest_bytes: dict[Part, int]
    peak_bytes: int
    share_spread: float = 0.0

    @property
    def shares(self) -> dict[Part, float]:
        """Share of each part in the time spent in nodes. The shares sum to 1."""
        total = sum(self.part_ms.values())
        return {part: self.part_ms[part] / total for part in PARTS}

    @property
    def attention_share(self) -> float:
        """Total share of scores, softmax and values."""
        return sum(self.shares[part] for part in ATTENTION)


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of a bundle at several lengths.

    Attributes:
        model_name: Model name.
        precision: Precision of the graph.
        mechanisms: Distinct attention mechanisms of the layers.
        threads: Number of ONNX Runtime threads.
        lengths: Profiles in ascending order of length.
    """

    model_name: str
    precision: str
    mechanisms: tuple[str, ...]
    threads: int
    lengths: tuple[LengthProfile, ...]

    @property
    def unreliable_lengths(self) -> tuple[int, ...]:
        """Lengths whose runs disagree because other processes compete for the CPU."""
        return tuple(each.length for each in self.lengths if each.share_spread > _MAX_SPREAD)

    @property
    def overtakes_at(self) -> int | None:
        """Length from which attention takes more than half of the time, or None if not reached.

        Interpolated between measured lengths on a logarithmic scale.
        """
        above = [each.attention_share > _HALF for each in self.lengths]
        if not above[-1]:
            return None
        first = max((index + 1 for index, is_above in enumerate(above) if not is_above), default=0)
        if first == 0:
            return self.lengths[0].length
        low, high = self.lengths[first - 1], self.lengths[first]
        fraction = (_HALF - low.attention_share) / (high.attention_share - low.attention_share)
        return round(math.exp((1 - fraction) * math.log(low.length) + fraction * math.log(high.length)))


def measure(
    bundle: Bundle,
    lengths: Sequence[int],
    *,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Profile:
    """Profile the embedding graph with one text of each length.

    Args:
        bundle: Bundle to profile.
        lengths: Numbers of tokens, up to the maximum of the model.
        threads: Number of ONNX Runtime threads.
        progress: Called with the number of completed lengths and the total.

    Raises:
        ImportError: `onnx` is not installed.
    """
    feeds = []
    for length in lengths:
        ids = np.full((1, length), bundle.model.vocab_size // 2, np.int64)
        feeds.append(
            {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        )
    traced = trace_runs(
        bundle.graph_path("embeddings"), feeds, NUM_RUNS, threads, lambda done: progress(done, len(lengths))
    )
    layers = bundle.manifest.architecture.layers
    return Profile(
        model_name=bundle.model.name,
        precision=bundle.precision,
        mechanisms=tuple(dict.fromkeys(layer.attention for layer in layers)),
        threads=threads,
        lengths=tuple(summary(length, runs) for length, runs in zip(lengths, traced, strict=True)),
    )


def summary(length: int, runs: Sequence[Run]) -> LengthProfile:
    """Summarize the runs of a length. The first run is a warm-up run and is not timed."""
    first, *timed = runs
    halves = [_part_ms(timed[start::2]) for start in (0, 1)]
    one, other = ({part: half[part] / sum(half.values()) for part in PARTS} for half in halves)
    return LengthProfile(
        length=length,
        total_ms=min(run.total_us for run in timed) / 1000,
        part_ms=_part_ms(timed),
        largest_bytes={part: first.largest_bytes.get(part, 0) for part in PARTS},
        peak_bytes=first.peak_bytes,
        share_spread=max(abs(one[part] - other[part]) for part in PARTS),
    )


def _part_ms(runs: Sequence[Run]) -> dict[Part, float]:
    """Return the time in the nodes of each part, with the fastest run of each node."""
    in_ms: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for same_node in zip(*(run.node_us for run in runs), strict=True):
        in_ms[same_node[0][0]] += min(duration for _, duration in same_node) / 1000
    return in_ms
