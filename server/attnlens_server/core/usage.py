"""Token counts and durations of a call."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnlens_server.core.stages import Ran
from attnlens_server.text import EncodedInput


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds. If there are several batches, the longest of each."""

    tokenize_s: float
    queue_s: float
    compute_s: float


@dataclass(slots=True)
class CallMetrics:
    """Resource use of a call, for the request log.

    Attributes:
        num_inputs: Number of texts or pairs.
        num_tokens: Number of tokens, including those of prompts and targets.
        tokenize_s: Tokenization time in seconds.
        queue_s: Longest wait for a batch in seconds. If the call has failed, the wait until then.
        compute_s: Longest batch in seconds. If the call has failed, its time until then.
        num_charged: Number of texts that were charged to the client.
        num_charged_tokens: Number of tokens that were charged to the client.
    """

    num_inputs: int = 0
    num_tokens: int = 0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    num_charged: int = 0
    num_charged_tokens: int = 0


class Clock:
    """Durations of a request so far, which it adds to the metrics of its call.

    Args:
        metrics: Metrics of the call, which may have several requests.

    Attributes:
        timings: Tokenization time, and the longest queue and compute times of the runs.
    """

    def __init__(self, metrics: CallMetrics) -> None:
        self.timings = Timings(0.0, 0.0, 0.0)
        self._metrics = metrics

    def add(self, runs: Sequence[Ran] = (), *, tokenize_s: float = 0.0) -> None:
        """Add tokenization time, and runs that have ended or were abandoned."""
        before, metrics = self.timings, self._metrics
        after = self.timings = Timings(
            before.tokenize_s + tokenize_s,
            max([before.queue_s, *(run.queue_s for run in runs)]),
            max([before.compute_s, *(run.compute_s for run in runs)]),
        )
        metrics.tokenize_s += tokenize_s
        metrics.queue_s += after.queue_s - before.queue_s
        metrics.compute_s += after.compute_s - before.compute_s


@dataclass(frozen=True, slots=True)
class Usage:
    """Number of tokens of an input.

    Attributes:
        num_tokens: Number of tokens after truncation.
        num_tokens_total: Number of tokens before truncation.
    """

    num_tokens: int
    num_tokens_total: int

    @property
    def truncated(self) -> bool:
        """Whether the input was truncated."""
        return self.num_tokens < self.num_tokens_total


def usage(encoded: EncodedInput) -> Usage:
    """Return the number of tokens of an input."""
    return Usage(encoded.num_tokens, encoded.num_tokens_total)
