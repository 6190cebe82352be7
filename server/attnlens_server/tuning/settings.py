"""Candidate settings of `attnlens serve`, and selection of the best one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

CPU_BATCH_TOKENS = (128, 256, 512, 1024, 2048)
GPU_BATCH_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
EQUIVALENT_MARGIN = 0.03  # Settings at most 3 % slower than the best are equivalent to it.
REPEAT_MARGIN = 0.2  # Settings more than 20 % slower than the best are not measured again.


@dataclass(frozen=True, slots=True)
class Setting:
    """Values of the `attnlens serve` options with the same names."""

    threads: int
    lanes: int
    max_batch_tokens: int

    @property
    def num_weight_copies(self) -> int:
        """Copies of the weights in memory: several lanes on several threads need a second session."""
        return 1 if self.lanes == 1 or self.threads == 1 else 2


@dataclass(frozen=True, slots=True)
class SettingResult:
    """Throughput of a setting in each round, padding excluded."""

    setting: Setting
    tokens_per_s: tuple[float, ...]

    @property
    def median_tokens_per_s(self) -> float:
        """Median over all rounds."""
        return median(self.tokens_per_s)


def candidates(thread_counts: Iterable[int], *, is_on_cpu: bool) -> list[Setting]:
    """Return the settings to measure."""
    return [
        Setting(threads, lanes, tokens)
        for threads in sorted(set(thread_counts))
        for lanes in sorted({1, max(1, threads // 2), threads} if is_on_cpu else {1, 2})
        for tokens in (CPU_BATCH_TOKENS if is_on_cpu else GPU_BATCH_TOKENS)
    ]


def near_best(results: Sequence[SettingResult], margin: float) -> list[SettingResult]:
    """Return the results whose median is at most the fraction `margin` below the best median."""
    best = max(result.median_tokens_per_s for result in results)
    return [result for result in results if result.median_tokens_per_s >= (1 - margin) * best]


def choose(results: Sequence[SettingResult]) -> SettingResult:
    """Return the best result among the settings that were measured in every round.

    Equivalent settings are ranked by batch size, since a text waits for the batch before it, then by copies
    of the weights, then by threads.
    """
    num_rounds = max(len(result.tokens_per_s) for result in results)
    finalists = [result for result in results if len(result.tokens_per_s) == num_rounds]
    return min(
        near_best(finalists, EQUIVALENT_MARGIN),
        key=lambda result: (
            result.setting.max_batch_tokens,
            result.setting.num_weight_copies,
            result.setting.threads,
            -result.median_tokens_per_s,
        ),
    )
