"""Benchmark arithmetic: FLOPs, latencies, ratios and targets."""

import numpy as np
import pytest

from attnlens.v1.manifest_pb2 import Architecture
from bench.flops import text_flops, total_flops
from bench.load.calls import Call, finished_within, latencies_ms, poisson_arrivals
from bench.peers.timing import sorted_batches
from bench.show.targets import Target, ratio
from bench_results import make_row

SMALL = Architecture(num_layers=2, hidden_size=6, intermediate_size=10)


def test_text_flops_equals_the_sum_over_all_matrix_products() -> None:
    tokens, width, units = 5, 6, 10
    # (rows, inner, columns) of each product in a layer, with attention as a single full-width head.
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


def test_latency_is_measured_from_the_due_time() -> None:
    calls = [Call(0, due_at=1.0, done_at=1.010), Call(1, due_at=1.0, done_at=1.110)]
    assert latencies_ms(calls) == pytest.approx({"p50": 60, "p95": 105, "p99": 109})
    assert latencies_ms([]) == {}


def test_finished_within_excludes_replies_outside_the_interval() -> None:
    calls = [Call(index, due_at=0.0, done_at=at) for index, at in enumerate([0.9, 1.0, 1.9, 2.0])]
    assert [call.index for call in finished_within(calls, 1.0, 2.0)] == [1, 2]


def test_poisson_arrivals_match_the_rate_and_are_reproducible() -> None:
    times = poisson_arrivals(rate=50, seconds=200, seed=1)
    gaps = np.diff(times)
    assert times == sorted(times)
    assert times[-1] < 200
    assert len(times) == pytest.approx(50 * 200, rel=0.03)  # 3 standard deviations
    assert gaps.std() == pytest.approx(
        gaps.mean(), rel=0.05
    )  # both are 1 / rate for an exponential distribution
    assert times == poisson_arrivals(rate=50, seconds=200, seed=1)


def test_sorted_batches_group_texts_by_length() -> None:
    assert sorted_batches([7, 1, 9, 2, 8], 2) == [[1, 3], [0, 4], [2]]


def test_ratio_compares_rows_within_each_repetition() -> None:
    # The second repetition was twice as slow for both rows.
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
def test_target_respects_its_direction(value: float, lower_is_better: bool, met: str) -> None:
    bounds = (1.2, 1.05) if lower_is_better else (1.1, 1.5)
    assert Target("a ratio", value, *bounds, lower_is_better).met == met


def test_target_without_stretch_is_met_or_unknown() -> None:
    assert Target("a ratio", 9.0, 1.0, None).met == "yes"
    assert Target("a ratio", None, 1.0, None).met == "unknown"
