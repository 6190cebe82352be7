"""The arithmetic of the benchmark: operations, latencies, ratios, targets."""

import numpy as np
import pytest

from attnlens.v1.manifest_pb2 import Architecture
from bench.flops import text_flops, total_flops
from bench.load.calls import Call, finished_within, latencies_ms, poisson_arrivals
from bench.peers.timing import sorted_batches
from bench.show.targets import Target, ratio
from bench_results import make_row

SMALL = Architecture(num_layers=2, hidden_size=6, intermediate_size=10)


def test_operations_are_those_of_the_matrix_products_counted_one_by_one() -> None:
    tokens, width, units = 5, 6, 10
    # (rows, inner, columns) of every product of a layer; attention as one head of the whole width.
    products = [
        *[(tokens, width, width)] * 4,
        (tokens, width, units),
        (tokens, units, width),
        (tokens, width, tokens),
        (tokens, tokens, width),
    ]
    expected = 2 * sum(2 * rows * inner * columns for rows, inner, columns in products)
    assert text_flops(SMALL, tokens) == expected
    assert total_flops(SMALL, [tokens, tokens]) == 2 * expected


def test_a_request_that_was_sent_late_has_waited_since_it_was_due() -> None:
    calls = [Call(0, due_at=1.0, done_at=1.010), Call(1, due_at=1.0, done_at=1.110)]
    assert latencies_ms(calls) == pytest.approx({"p50": 60, "p95": 105, "p99": 109})
    assert latencies_ms([]) == {}


def test_only_replies_within_the_time_count() -> None:
    calls = [Call(index, due_at=0.0, done_at=at) for index, at in enumerate([0.9, 1.0, 1.9, 2.0])]
    assert [call.index for call in finished_within(calls, 1.0, 2.0)] == [1, 2]


def test_arrivals_are_a_poisson_process() -> None:
    times = poisson_arrivals(rate=50, seconds=200, seed=1)
    gaps = np.diff(times)
    assert times == sorted(times)
    assert times[-1] < 200
    assert len(times) == pytest.approx(50 * 200, rel=0.03)  # 3 standard deviations
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential: both are 1 / rate
    assert times == poisson_arrivals(rate=50, seconds=200, seed=1)


def test_batches_have_every_text_once_and_texts_of_similar_length_together() -> None:
    assert sorted_batches([7, 1, 9, 2, 8], 2) == [[1, 3], [0, 4], [2]]


def test_a_ratio_compares_within_each_repetition() -> None:
    # The machine was half as fast in the second repetition, for both.
    assert ratio(make_row("a", [20, 10, 20]), make_row("b", [10, 5, 10])) == 2
    assert ratio(None, make_row("b", [10])) is None


@pytest.mark.parametrize(
    ("value", "lower_is_better", "met"),
    [
        (1.0, False, "no"),
        (1.1, False, "yes"),
        (1.5, False, "stretch"),
        (1.5, True, "no"),
        (1.0, True, "stretch"),
    ],
)
def test_a_target_is_met_on_the_right_side(value: float, lower_is_better: bool, met: str) -> None:
    bounds = (1.2, 1.05) if lower_is_better else (1.1, 1.5)
    assert Target("a ratio", value, *bounds, lower_is_better).met == met


def test_a_target_without_a_stretch_is_met_or_not() -> None:
    assert Target("a ratio", 9.0, 1.0, None).met == "yes"
    assert Target("a ratio", None, 1.0, None).met == "unknown"
