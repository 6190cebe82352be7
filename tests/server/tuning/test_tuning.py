"""Candidate settings and the choice among them, random texts, and the throughput of simulated lanes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from attnlens_server.engine import Item, RequestedOutput
from attnlens_server.errors import GraphUnavailableError
from attnlens_server.tuning.settings import Setting, SettingResult, candidates, choose, near_best
from attnlens_server.tuning.throughput import measure_throughput
from attnlens_server.tuning.workload import Workload, draw_workload
from toy_models import make_model

MODEL = make_model()
WANTED = (RequestedOutput("x"),)
NUM_IN_FLIGHT = 8
TEXTS = Workload("made up", (np.ones(10, dtype=np.int64), np.ones(30, dtype=np.int64)))


def _result(threads: int, lanes: int, max_batch_tokens: int, *tokens_per_s: float) -> SettingResult:
    return SettingResult(Setting(threads, lanes, max_batch_tokens), tokens_per_s)


@pytest.mark.parametrize(
    ("results", "best"),
    [
        # The fastest by more than the margin.
        ([_result(2, 1, 128, 100.0), _result(2, 2, 1024, 104.0)], Setting(2, 2, 1024)),
        # Equivalent: smaller batches win.
        ([_result(2, 2, 1024, 103.0), _result(2, 2, 256, 100.5)], Setting(2, 2, 256)),
        # Same batches: one copy of the weights instead of two.
        ([_result(2, 2, 256, 103.0), _result(2, 1, 256, 101.0)], Setting(2, 1, 256)),
        # Batch size has priority over copies.
        ([_result(2, 2, 128, 101.0), _result(2, 1, 256, 101.0)], Setting(2, 2, 128)),
        # Same batches and copies: fewer threads, then higher throughput.
        ([_result(8, 8, 256, 103.0), _result(4, 4, 256, 101.0)], Setting(4, 4, 256)),
        ([_result(8, 4, 256, 101.0), _result(8, 8, 256, 103.0)], Setting(8, 8, 256)),
        # The median counts, not the fastest round.
        ([_result(2, 1, 256, 90.0, 91.0, 150.0), _result(2, 2, 512, 99.0, 100.0, 98.0)], Setting(2, 2, 512)),
        # A setting that was not repeated is never chosen.
        ([_result(2, 1, 128, 79.0), _result(2, 2, 256, 100.0, 70.0, 70.0)], Setting(2, 2, 256)),
    ],
)
def test_best_setting_is_chosen(results: list[SettingResult], best: Setting) -> None:
    assert choose(results).setting == best
    assert choose(results[::-1]).setting == best


def test_only_settings_near_the_best_are_measured_again() -> None:
    results = [_result(2, 1, 128, 79.9), _result(2, 1, 256, 80.0), _result(2, 1, 512, 100.0)]
    assert near_best(results, 0.2) == results[1:]


def test_several_lanes_on_several_threads_need_a_second_copy_of_the_weights() -> None:
    copies = [Setting(threads, lanes, 256).num_weight_copies for threads, lanes in ((4, 1), (4, 2), (1, 2))]
    assert copies == [1, 2, 1]


def test_each_batch_size_is_tried_with_one_lane_and_with_several() -> None:
    def lanes(thread_counts: Sequence[int]) -> list[tuple[int, int]]:
        settings = candidates(thread_counts, is_on_cpu=True)
        assert len(set(settings)) == len(settings)
        tried = {(setting.threads, setting.lanes) for setting in settings}
        assert {setting.max_batch_tokens for setting in settings} >= {128, 256, 512, 1024}
        assert len(settings) % len(tried) == 0
        return sorted(tried)

    assert lanes([1, 1]) == [(1, 1)]
    assert lanes([2]) == [(2, 1), (2, 2)]
    assert lanes([16, 8]) == [(8, 1), (8, 4), (8, 8), (16, 1), (16, 8), (16, 16)]


def test_random_texts_are_short_with_a_long_tail_and_reproducible() -> None:
    workload = draw_workload(MODEL)
    lengths = [len(text) for text in workload.input_ids]
    ids = np.concatenate(workload.input_ids)
    assert 28 <= np.median(lengths) <= 36
    assert (min(lengths), max(lengths)) == (3, 256)
    assert 0.01 <= np.mean([length == 256 for length in lengths]) <= 0.04
    assert set(ids) == set(range(50)) - {1}  # no token is padding
    again = draw_workload(MODEL)
    assert all(map(np.array_equal, workload.input_ids, again.input_ids))


class _SimulatedLanes:
    """Lanes with a simulated clock. They run a batch of four texts as soon as eight texts are waiting."""

    def __init__(self, num_slow_batches: int = 0, error: Exception | None = None) -> None:
        self.num_live_tokens = 0
        self.time_s = 0.0
        self._num_slow_batches, self._error = num_slow_batches, error
        self._waiting: list[Item] = []
        self.submitted: list[Item] = []

    def submit(self, items: list[Item]) -> None:
        self.submitted += items
        self._waiting += items
        if len(self._waiting) == NUM_IN_FLIGHT:
            batch, self._waiting = self._waiting[:4], self._waiting[4:]
            self.time_s += 0.03 if self._num_slow_batches > 0 else 0.02
            self._num_slow_batches -= 1
            self.num_live_tokens += sum(item.num_tokens for item in batch)
            for item in batch:
                if self._error is not None:
                    item.future.set_exception(self._error)
                else:
                    item.future.set_result(None)  # type: ignore[arg-type]


def _measure(lanes: Any, seconds: float) -> float:
    return measure_throughput(
        lanes,
        TEXTS,
        WANTED,
        num_lanes=2,
        num_in_flight=NUM_IN_FLIGHT,
        seconds=seconds,
        now=lambda: lanes.time_s,
    )


@pytest.mark.parametrize(("seconds", "num_slow_batches", "num_batches"), [(0.3, 2, 18), (1e-3, 0, 5)])
def test_throughput_excludes_the_warm_up_and_remaining_texts_are_cancelled(
    seconds: float, num_slow_batches: int, num_batches: int
) -> None:
    lanes = _SimulatedLanes(num_slow_batches)
    assert _measure(lanes, seconds) == pytest.approx(4000)  # 80 tokens in 20 ms
    assert all(item.future.done() for item in lanes.submitted)
    assert sum(not item.future.cancelled() for item in lanes.submitted) == 4 * num_batches


def test_error_of_a_text_is_raised() -> None:
    lanes = _SimulatedLanes(error=GraphUnavailableError("the graph is broken"))
    with pytest.raises(GraphUnavailableError, match="the graph is broken"):
        _measure(lanes, 60)
    assert all(item.future.done() for item in lanes.submitted)
