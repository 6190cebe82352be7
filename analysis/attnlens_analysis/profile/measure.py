"""A bundle's graph for embeddings at several lengths, part by part."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attnlens_analysis.profile.parts import ATTENTION, PARTS, Part
from attnlens_analysis.profile.trace import Run, trace_runs
from attnlens_server.bundle import Bundle

# Of each node the quickest of so many runs counts: what else runs on the machine disturbs some of them.
NUM_RUNS = 5
_HALF = 0.5
_MAX_SPREAD = 0.03  # of a share, between the halves of the runs


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """What one text of some length takes.

    Attributes:
        length: in tokens.
        total_ms: of the quickest run, from its start to its end.
        part_ms: in the nodes of each part, of each node the quickest run.
        largest_bytes: the largest value that a node of each part wrote.
        peak_bytes: the most memory in use for values, as ONNX Runtime's allocator counts it; parameters and
            inputs not counted.
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
        """Each part's share of the time in nodes; they sum to 1."""
        whole = sum(self.part_ms.values())
        return {part: self.part_ms[part] / whole for part in PARTS}

    @property
    def attention_share(self) -> float:
        """The share of scores, softmax and values."""
        return sum(self.shares[part] for part in ATTENTION)


@dataclass(frozen=True, slots=True)
class Profile:
    """A bundle at several lengths.

    Attributes:
        model_name: of the bundle.
        precision: of the graph.
        mechanisms: of the layers, each once.
        threads: of ONNX Runtime.
        lengths: the shortest first.
    """

    model_name: str
    precision: str
    mechanisms: tuple[str, ...]
    threads: int
    lengths: tuple[LengthProfile, ...]

    @property
    def unreliable_lengths(self) -> tuple[int, ...]:
        """The lengths whose runs disagree, because other processes compete for the CPU."""
        return tuple(each.length for each in self.lengths if each.share_spread > _MAX_SPREAD)

    @property
    def overtakes_at(self) -> int | None:
        """From which length on attention takes more than all else; None: at none that was measured.

        Between two measured lengths the logarithm of the length is interpolated.
        """
        above = [each.attention_share > _HALF for each in self.lengths]
        if not above[-1]:
            return None
        first = max((place + 1 for place, is_above in enumerate(above) if not is_above), default=0)
        if first == 0:
            return self.lengths[0].length
        low, high = self.lengths[first - 1], self.lengths[first]
        way = (_HALF - low.attention_share) / (high.attention_share - low.attention_share)
        return round(math.exp((1 - way) * math.log(low.length) + way * math.log(high.length)))


def measure(
    bundle: Bundle,
    lengths: Sequence[int],
    *,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Profile:
    """Profile the graph for embeddings, of one text of each length.

    Args:
        bundle: what is measured, in its precision.
        lengths: in tokens, none longer than the model takes.
        threads: of ONNX Runtime.
        progress: gets how many lengths are done, and of how many.

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
    """Summarize the runs of a length. The first one is not timed."""
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
    """Return the time in the nodes of each part, of each node the quickest run."""
    in_ms: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    for same_node in zip(*(run.node_us for run in runs), strict=True):
        in_ms[same_node[0][0]] += min(duration for _, duration in same_node) / 1000
    return in_ms
