"""Batch scheduling: a pure function of the lengths of the waiting texts.

A batch is padded to its longest text, or slightly longer if the runtime requires certain lengths. The
scheduler therefore groups texts of similar length. It limits the number of tokens of a batch, because time
and memory depend on it. The oldest text is always in the batch, so the number of batches that a text waits
for is at most the number of texts ahead of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a batch. A single text that exceeds a limit runs alone.

    Attributes:
        max_tokens: Maximum number of tokens including padding: number of texts x longest length.
        max_padding_share: Maximum share of padding among all tokens.
        max_square_tokens: Maximum of number of texts x squared longest length, which is proportional to the
            size of attention weights. None means no limit.
    """

    max_tokens: int
    max_padding_share: float = 0.05
    max_square_tokens: int | None = None

    def allow(self, num_texts: int, num_live_tokens: int, max_length: int) -> bool:
        """Return whether a batch of these sizes is within the limits."""
        num_tokens = num_texts * max_length
        if num_tokens > self.max_tokens:
            return False
        if self.max_square_tokens is not None and num_tokens * max_length > self.max_square_tokens:
            return False
        return num_tokens - num_live_tokens <= self.max_padding_share * num_tokens


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """Lengths to which batches are padded.

    Attributes:
        multiple: Each length is a multiple of this number, or `max_length`.
        max_length: Number of positions of the model.
    """

    multiple: int
    max_length: int

    def round_up(self, num_tokens: int) -> int:
        """Return the padded length of a batch whose longest text has `num_tokens` tokens."""
        rounded = math.ceil(num_tokens / self.multiple) * self.multiple
        return max(num_tokens, min(rounded, self.max_length))


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Chooses batches for the lanes of a graph.

    Attributes:
        limits: Limits of a batch.
        buckets: Lengths to which batches are padded. None pads to the longest text.
        counts: Allowed numbers of texts per batch, ascending from 1. Empty allows any number.
    """

    limits: BatchLimits
    buckets: LengthBuckets | None = None
    counts: Sequence[int] = ()

    def choose(self, lengths: Sequence[int], num_idle: int) -> list[int]:
        """Return the indices of the texts of the next batch.

        Args:
            lengths: Number of tokens of each waiting text, oldest first.
            num_idle: Number of idle lanes, including the calling one.
        """
        padded = [self.padded_length(length) for length in lengths]
        chosen = pack(padded, share(padded, self.limits, num_idle))  # the oldest comes first
        return chosen[: self._round_down(len(chosen))]

    def padded_length(self, num_tokens: int) -> int:
        """Return the padded length of a batch whose longest text has `num_tokens` tokens."""
        return self.buckets.round_up(num_tokens) if self.buckets else num_tokens

    def _round_down(self, num_texts: int) -> int:
        return max((count for count in self.counts if count <= num_texts), default=num_texts)


def share(lengths: Sequence[int], limits: BatchLimits, num_idle: int) -> BatchLimits:
    """Return the limits of a batch that leaves a fair share of the waiting texts to the other idle lanes.

    Args:
        lengths: Number of tokens of each waiting text.
        limits: Limits of a batch.
        num_idle: Number of idle lanes.
    """
    fair_tokens = math.ceil(sum(lengths) / num_idle)
    return replace(limits, max_tokens=min(limits.max_tokens, fair_tokens))


def pack(lengths: Sequence[int], limits: BatchLimits) -> list[int]:
    """Choose the texts of the next batch.

    Starting from the oldest text, add the text with the most similar length until the next shorter and the
    next longer text would both exceed a limit.

    Args:
        lengths: Number of tokens of each waiting text, oldest first. Must not be empty.
        limits: Limits of a batch.

    Returns:
        Indices into `lengths` in ascending order, always including 0.
    """
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    low = high = by_length.index(0)  # the batch is by_length[low : high + 1]
    live_tokens = max_length = lengths[0]
    while True:
        neighbors = []  # (index in by_length, longest length of the batch with this text)
        if low > 0:
            neighbors.append((low - 1, max_length))
        if high + 1 < len(by_length):
            neighbors.append((high + 1, lengths[by_length[high + 1]]))
        fitting = [
            (abs(lengths[by_length[position]] - lengths[0]), position, longest)
            for position, longest in neighbors
            if limits.allow(high - low + 2, live_tokens + lengths[by_length[position]], longest)
        ]
        if not fitting:
            return sorted(by_length[low : high + 1])
        _, position, max_length = min(fitting)
        live_tokens += lengths[by_length[position]]
        low, high = min(low, position), max(high, position)
