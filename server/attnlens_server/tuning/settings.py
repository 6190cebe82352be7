"""Which settings to try, and which to take of those that were measured. No clock and no engine in here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

CPU_BATCH_TOKENS = (128, 256, 512, 1024, 2048)
GPU_BATCH_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
SAME = 0.03  # what is slower than the best by no more than this counts as good as the best
WORTH_REPEATING = 0.2  # what is slower by more, at the first try, is not measured again


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of `attnlens serve`, by their names."""

    threads: int
    lanes: int
    max_batch_tokens: int

    @property
    def num_weight_copies(self) -> int:
        """How often the weights of a graph are in memory: lanes that have a part of the threads add one."""
        return 1 if self.lanes == 1 or self.threads == 1 else 2


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of a setting.

    Attributes:
        setting: which.
        tokens_per_s: of each repetition, padding not counted.
        padding_share: padding tokens / all tokens that were computed.
    """

    setting: Setting
    tokens_per_s: tuple[float, ...]
    padding_share: float

    @property
    def median_tokens_per_s(self) -> float:
        """Of the repetitions."""
        return median(self.tokens_per_s)


def candidates(thread_counts: Iterable[int], *, is_on_cpu: bool) -> list[Setting]:
    """Return the settings to try: batches of every size in one lane, and in several side by side."""
    return [
        Setting(threads, lanes, tokens)
        for threads in sorted(set(thread_counts))
        for lanes in sorted({1, max(1, threads // 2), threads} if is_on_cpu else {1, 2})
        for tokens in (CPU_BATCH_TOKENS if is_on_cpu else GPU_BATCH_TOKENS)
    ]


def near_best(speeds: Sequence[Speed], margin: float) -> list[Speed]:
    """Return those whose median is below the best one by at most `margin`, a share of the best."""
    best = max(speed.median_tokens_per_s for speed in speeds)
    return [speed for speed in speeds if speed.median_tokens_per_s >= (1 - margin) * best]


def choose(speeds: Sequence[Speed]) -> Speed:
    """Return the setting to take.

    What was given up after a round can't be it. Of those that are as good as the best: the one with the
    smallest batches, since a text waits for the batch before its own; then that with the fewest copies of
    the weights; then that with the fewest threads.
    """
    most_rounds = max(len(speed.tokens_per_s) for speed in speeds)
    finalists = [speed for speed in speeds if len(speed.tokens_per_s) == most_rounds]
    return min(
        near_best(finalists, SAME),
        key=lambda speed: (
            speed.setting.max_batch_tokens,
            speed.setting.num_weight_copies,
            speed.setting.threads,
            -speed.median_tokens_per_s,
        ),
    )
