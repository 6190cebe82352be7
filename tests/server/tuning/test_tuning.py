"""What `attnlens bench` tries and takes, on made-up measurements; and its two ways to send texts."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from attnlens_server.bundle import Layout, Output, OutputRole
from attnlens_server.engine import Item, Wanted
from attnlens_server.errors import GraphUnavailableError
from attnlens_server.tuning.grid import grid_shapes
from attnlens_server.tuning.settings import Setting, Speed, candidates, choose, near_best
from attnlens_server.tuning.traffic import Clock, poisson_arrivals, saturate, send_at_rate
from attnlens_server.tuning.workload import Workload, draw_workload
from toy_models import make_model

if TYPE_CHECKING:
    from concurrent.futures import Future

MODEL = make_model(
    *(
        Output(f"attentions.{layer}", OutputRole.ATTENTION_WEIGHTS, Layout.DENSE, layer, 12)
        for layer in range(6)
    )
)
WANTED = (Wanted("x"),)
TEXTS = Workload("made up", (np.ones(10, dtype=np.int64), np.ones(30, dtype=np.int64)))


def _speed(threads: int, lanes: int, max_batch_tokens: int, *tokens_per_s: float) -> Speed:
    return Speed(Setting(threads, lanes, max_batch_tokens), tokens_per_s, padding_share=0.02)


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        # Clearly the fastest, whatever it costs.
        ([_speed(2, 1, 128, 100.0), _speed(2, 2, 1024, 104.0)], Setting(2, 2, 1024)),
        # As good as the best: smaller batches.
        ([_speed(2, 2, 1024, 103.0), _speed(2, 2, 256, 100.5)], Setting(2, 2, 256)),
        # The same batches: one copy of the weights in place of two.
        ([_speed(2, 2, 256, 103.0), _speed(2, 1, 256, 101.0)], Setting(2, 1, 256)),
        # Smaller batches before fewer copies.
        ([_speed(2, 2, 128, 101.0), _speed(2, 1, 256, 101.0)], Setting(2, 2, 128)),
        # All of that the same: fewer threads, then the faster one.
        ([_speed(8, 8, 256, 103.0), _speed(4, 4, 256, 101.0)], Setting(4, 4, 256)),
        ([_speed(8, 4, 256, 101.0), _speed(8, 8, 256, 103.0)], Setting(8, 8, 256)),
        # The median counts, not one lucky repetition.
        ([_speed(2, 1, 256, 90.0, 91.0, 150.0), _speed(2, 2, 512, 99.0, 100.0, 98.0)], Setting(2, 2, 512)),
        # What was not repeated was too slow at first, however the others fell back later.
        ([_speed(2, 1, 128, 79.0), _speed(2, 2, 256, 100.0, 70.0, 70.0)], Setting(2, 2, 256)),
    ],
)
def test_the_choice_among_settings(speeds: list[Speed], best: Setting) -> None:
    assert choose(speeds).setting == best
    assert choose(speeds[::-1]).setting == best


def test_only_what_is_near_the_best_is_measured_again() -> None:
    speeds = [_speed(2, 1, 128, 79.9), _speed(2, 1, 256, 80.0), _speed(2, 1, 512, 100.0)]
    assert near_best(speeds, 0.2) == speeds[1:]


def test_a_second_copy_of_the_weights_comes_with_lanes_of_fewer_threads() -> None:
    copies = [Setting(threads, lanes, 256).num_weight_copies for threads, lanes in ((4, 1), (4, 2), (1, 2))]
    assert copies == [1, 2, 1]


def test_every_batch_is_tried_in_one_lane_and_in_several() -> None:
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


def test_drawn_texts_are_short_with_a_long_tail_and_always_the_same() -> None:
    workload = draw_workload(MODEL)
    lengths = [len(text) for text in workload.input_ids]
    ids = np.concatenate(workload.input_ids)
    assert 28 <= np.median(lengths) <= 36
    assert (min(lengths), max(lengths)) == (3, 256)
    assert 0.01 <= np.mean([length == 256 for length in lengths]) <= 0.04
    assert set(ids) == set(range(50)) - {1}  # no token is padding
    again = draw_workload(MODEL)
    assert all(map(np.array_equal, workload.input_ids, again.input_ids))


def test_the_grid_is_within_the_tokens_of_a_batch_and_the_bytes_of_its_attention() -> None:
    shapes = grid_shapes(MODEL, None, is_on_cpu=True)
    assert {length for _, length in shapes} == {16, 64, 128, 256}
    assert (4, 256) in shapes
    assert (64, 16) in shapes
    assert (16, 256) not in shapes  # 4096 tokens
    with_attention = grid_shapes(MODEL, 4 * 6 * 12 * 256**2, is_on_cpu=True)
    assert (1, 256) in with_attention
    assert (4, 256) not in with_attention
    assert (4, 128) in with_attention


class _Simulation(Clock):
    """Lanes and the time in them, which goes on only while somebody waits.

    They take `texts_a_batch` waiting texts at a time and `batch_s` for them, a tenth of it padding.
    """

    def __init__(self, texts_a_batch: int, batch_s: float, error: Exception | None = None) -> None:
        self.num_live_tokens = self.num_computed_tokens = 0
        self.most_inside = 0
        self._now = 0.0
        self._size, self._batch_s, self._error = texts_a_batch, batch_s, error
        self._waiting: list[Item] = []
        self._running: list[Item] = []
        self._done_at = math.inf

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        until = self._now + seconds
        while self._done_at <= until:
            self._end_batch()
        self._now = until

    def wait_for(self, changed: threading.Condition, is_met: Callable[[], bool]) -> None:
        del changed  # there is no other thread
        while not is_met():
            self._end_batch()

    def submit(self, items: list[Item]) -> None:
        self._waiting += items
        self.most_inside = max(self.most_inside, len(self._waiting) + len(self._running))
        if not self._running:
            self._begin_batch()

    def _begin_batch(self) -> None:
        self._running, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        self._done_at = self._now + self._batch_s if self._running else math.inf

    def _end_batch(self) -> None:
        assert self._running, "nothing that is waited for will come"
        self._now, done = self._done_at, self._running
        self.num_live_tokens += 9 * sum(item.num_tokens for item in done)
        self.num_computed_tokens += 10 * sum(item.num_tokens for item in done)
        self._begin_batch()
        for item in done:
            future: Future[Any] = item.future
            if not future.set_running_or_notify_cancel():
                continue
            if self._error is not None:
                future.set_exception(self._error)
            else:
                future.set_result(None)


def test_the_throughput_is_that_of_lanes_that_always_have_something_to_do() -> None:
    lanes: Any = _Simulation(texts_a_batch=4, batch_s=0.02)  # 80 tokens in 20 ms
    flow = saturate(lanes, TEXTS, WANTED, num_lanes=1, num_in_flight=8, seconds=0.3, clock=lanes)
    assert flow.tokens_per_s == pytest.approx(9 * 4000)
    assert flow.padding_share == pytest.approx(0.1)
    assert lanes.most_inside == 8


@pytest.mark.parametrize(
    ("rate", "seconds", "max_concurrent_inputs"), [(200, 0.4, 1000), (500, 0.3, 2), (20, 1.0, 3)]
)
def test_latency_counts_from_when_a_text_was_due_and_what_finds_it_full_is_refused(
    rate: float, seconds: float, max_concurrent_inputs: int
) -> None:
    due: list[float] = []
    done: list[float] = []
    num_refused = 0
    for arrival in poisson_arrivals(rate, seconds, seed=round(rate)):
        if sum(done_at > arrival for done_at in done) == max_concurrent_inputs:
            num_refused += 1
        else:
            due.append(arrival)
            done.append(max(done[-1], arrival) + 0.02 if done else arrival + 0.02)
    lanes: Any = _Simulation(texts_a_batch=1, batch_s=0.02)
    load = send_at_rate(
        lanes,
        TEXTS,
        WANTED,
        rate=rate,
        seconds=seconds,
        max_concurrent_inputs=max_concurrent_inputs,
        clock=lanes,
    )
    assert (load.num_texts, load.num_refused) == (len(due), num_refused)
    latencies_ms = 1000 * (np.array(done) - due)
    assert [load.p50_ms, load.p95_ms, load.p99_ms] == pytest.approx(np.percentile(latencies_ms, [50, 95, 99]))


def test_what_a_text_fails_with_is_raised() -> None:
    lanes: Any = _Simulation(
        texts_a_batch=1, batch_s=0.01, error=GraphUnavailableError("the graph is broken")
    )
    with pytest.raises(GraphUnavailableError, match="the graph is broken"):
        saturate(lanes, TEXTS, WANTED, num_lanes=1, num_in_flight=4, seconds=60, clock=lanes)
    with pytest.raises(GraphUnavailableError, match="the graph is broken"):
        send_at_rate(lanes, TEXTS, WANTED, rate=100, seconds=0.2, max_concurrent_inputs=10, clock=lanes)


def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = poisson_arrivals(1000, 50, seed=3)
    gaps = np.diff(times)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 50
    assert gaps.mean() == pytest.approx(1e-3, rel=0.02)
    assert gaps.std() == pytest.approx(1e-3, rel=0.03)  # exponential: as large as its mean
