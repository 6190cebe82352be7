"""What a call has used up: told in its reply, and in the log."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds; over several batches, the longest of each."""

    tokenize_s: float
    queue_s: float
    compute_s: float


@dataclass(slots=True)
class Spent:
    """What a call has used so far, for whoever logs its end, however it ends.

    Attributes:
        num_inputs: texts, or pairs of them.
        num_tokens: of all texts that were tokenized; those of a prompt and of a target count.
        tokenize_s: seconds; these three are 0 until the model has run.
        queue_s: the longest wait for a batch.
        compute_s: the longest batch.
    """

    num_inputs: int = 0
    num_tokens: int = 0
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0

    def add(self, timings: Timings) -> Timings:
        """Note the times of one job, and return them."""
        self.tokenize_s += timings.tokenize_s
        self.queue_s += timings.queue_s
        self.compute_s += timings.compute_s
        return timings

    def at_least(self, timings: Timings) -> None:
        """Note the times of one batch of the only job."""
        self.tokenize_s = max(self.tokenize_s, timings.tokenize_s)
        self.queue_s = max(self.queue_s, timings.queue_s)
        self.compute_s = max(self.compute_s, timings.compute_s)
