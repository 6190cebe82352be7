"""Which waiting texts run together: a pure function of their lengths.

A batch is padded to its longest text, or a little beyond it where the runtime wants certain lengths, so texts
of like length belong together; a batch has room for a number of tokens, because that is what time and memory
depend on. The oldest text is always in the batch, so none waits for more batches than there are texts before
it, whatever arrives later.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a batch may hold. A text beyond a limit by itself still runs, alone.

    Attributes:
        max_tokens: tokens, padding included: number of texts x longest length.
        max_padding_share: padding tokens / all tokens.
        max_square_tokens: number of texts x longest length squared, which is what attention weights
            take; None: no limit.
    """

    max_tokens: int
    max_padding_share: float = 0.05
    max_square_tokens: int | None = None

    def allow(self, num_texts: int, num_live_tokens: int, max_length: int) -> bool:
        """True where a batch of these sizes is within the limits."""
        num_tokens = num_texts * max_length
        if num_tokens > self.max_tokens:
            return False
        if self.max_square_tokens is not None and num_tokens * max_length > self.max_square_tokens:
            return False
        return num_tokens - num_live_tokens <= self.max_padding_share * num_tokens


@dataclass(frozen=True, slots=True)
class LengthBuckets:
    """The lengths that batches are padded to.

    Attributes:
        multiple: each length is a multiple of it, or `max_length`.
        max_length: the positions of the model.
    """

    multiple: int
    max_length: int

    def round_up(self, num_tokens: int) -> int:
        """Return the length of a batch whose longest text has `num_tokens`."""
        rounded = math.ceil(num_tokens / self.multiple) * self.multiple
        return max(num_tokens, min(rounded, self.max_length))


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Chooses batches for the lanes of a graph.

    Attributes:
        limits: what a batch may hold.
        buckets: what batches are padded to; None: to their longest text.
        counts: how many texts a batch may have, ascending from 1; empty: any number.
    """

    limits: BatchLimits
    buckets: LengthBuckets | None = None
    counts: Sequence[int] = ()

    def choose(self, lengths: Sequence[int], num_idle: int) -> list[int]:
        """Return which of the waiting texts a lane takes, `num_idle` lanes being idle, itself included."""
        padded = [self.padded_length(length) for length in lengths]
        chosen = pack(padded, share(padded, self.limits, num_idle))  # the oldest comes first
        return chosen[: self._round_down(len(chosen))]

    def padded_length(self, num_tokens: int) -> int:
        """Return the length of a batch whose longest text has `num_tokens`."""
        return self.buckets.round_up(num_tokens) if self.buckets else num_tokens

    def _round_down(self, num_texts: int) -> int:
        return max((count for count in self.counts if count <= num_texts), default=num_texts)


def share(lengths: Sequence[int], limits: BatchLimits, num_idle: int) -> BatchLimits:
    """Return the limits of a batch that leaves their part of what waits to the other idle lanes.

    Args:
        lengths: the number of tokens of each waiting text.
        limits: what a batch may hold.
        num_idle: how many lanes could run a batch now.
    """
    fair_tokens = math.ceil(sum(lengths) / num_idle)
    return replace(limits, max_tokens=min(limits.max_tokens, fair_tokens))


def pack(lengths: Sequence[int], limits: BatchLimits) -> list[int]:
    """Choose the texts of the next batch.

    Starting from the oldest text, take its neighbours in length, the nearer one first, until the next
    one on either side would break a limit.

    Args:
        lengths: the number of tokens of each waiting text, oldest first; not empty.
        limits: what a batch may hold.

    Returns:
        Indices into `lengths`, ascending; 0 is always among them.
    """
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    low = high = by_length.index(0)  # the batch is by_length[low : high + 1]
    live_tokens = max_length = lengths[0]
    while True:
        neighbours = []  # (position in by_length, longest length of the batch with it)
        if low > 0:
            neighbours.append((low - 1, max_length))
        if high + 1 < len(by_length):
            neighbours.append((high + 1, lengths[by_length[high + 1]]))
        fitting = [
            (abs(lengths[by_length[position]] - lengths[0]), position, longest)
            for position, longest in neighbours
            if limits.allow(high - low + 2, live_tokens + lengths[by_length[position]], longest)
        ]
        if not fitting:
            return sorted(by_length[low : high + 1])
        _, position, max_length = min(fitting)
        live_tokens += lengths[by_length[position]]
        low, high = min(low, position), max(high, position)
