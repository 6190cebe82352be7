"""Whether a batch that has the machine to itself uses all threads, or only those of one lane.

Each operator wakes the threads, which for a small batch can take longer than they save, above all in int8.
This depends on the processor, the model and the precision, so it is measured while the server runs.
"""

import statistics
from collections import defaultdict, deque

SAMPLES = 5
SHORT_S = 0.005
"""A batch that takes longer than this with all threads uses them: one thread would save little."""
RETRY_INTERVAL = 256
"""Number of choices after which the slower way runs once, in case the machine has changed."""


class ThreadChoice:
    """Compares the compute times of batches that had the machine to themselves.

    Batches of a similar size (a power of two) are compared. They use all threads first, and then those of one
    lane, up to `SAMPLES` times each.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._num_choices = 0

    def uses_all(self, num_tokens: int) -> bool:
        """Return whether a batch with this number of computed tokens uses all threads."""
        size = num_tokens.bit_length()
        with_all, with_some = self._times[size, True], self._times[size, False]
        if len(with_all) < SAMPLES or (all_s := statistics.median(with_all)) > SHORT_S:
            return True
        if len(with_some) < SAMPLES and max(with_some, default=0.0) < 2 * all_s:
            return False
        self._num_choices += 1
        is_retry = self._num_choices % RETRY_INTERVAL == 0
        return (all_s <= statistics.median(with_some)) is not is_retry

    def add(self, num_tokens: int, compute_s: float, *, used_all: bool) -> None:
        """Add the compute time of a batch."""
        self._times[num_tokens.bit_length(), used_all].append(compute_s)
