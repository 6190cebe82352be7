"""The arithmetic of the benchmark: operations, latencies, ratios, targets."""

import numpy as np
import pytest

from attnlens.v1.manifest_pb2 import Architecture
from attnlens_server.tuning.traffic import poisson_arrivals
from bench.flops import text_flops, total_flops
from bench.load.calls import Call, finished_within, latencies_ms
from bench.peers.timing import sorted_batches
from bench.show.targets import Rows, Target, ratio, targets

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


def row(name: str, rates: list[float], **more: object) -> dict[str, object]:
    key = {"name": name, "precision": "fp32", "what": "embed", "workload": "passages", "clients": None}
    spread = {"median": sorted(rates)[len(rates) // 2], "all": rates}
    return key | {"tokens_per_s": spread, "gflop_per_s": spread} | more


def test_a_ratio_compares_within_each_repetition() -> None:
    # The machine was half as fast in the second repetition, for both.
    assert ratio(row("a", [20, 10, 20]), row("b", [10, 5, 10])) == 2
    assert ratio(None, row("b", [10])) is None


def test_the_best_peer_is_not_our_engine_and_computes_in_fp32() -> None:
    rows = Rows(
        [
            row("attnlens engine", [9.0]),
            row("slow", [3.0]),
            row("fast", [4.0]),
            row("faster in bf16", [8.0], precision="bf16"),
            row("a server", [7.0], clients=64),
            {"name": "failed", "failure": "no such package"},
        ]
    )
    best = rows.best_fp32_peer("embed", "passages")
    assert best is not None
    assert best["name"] == "fast"
    by_name = {target.what: target for target in targets(rows, {"padding_share": 0.03})}
    assert by_name["engine fp32 / best fp32 peer at its best setting"].value == pytest.approx(9 / 4)
    assert by_name["padding share of computed tokens on the mixed workload at 64 clients"].met == "yes"
    assert by_name["int8 within the gate / our fp32"].met == "unknown"


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
