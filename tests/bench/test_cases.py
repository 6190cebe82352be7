"""Benchmark cases: the requests sent to a process and the rows computed from its responses."""

import asyncio
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from attnlens.v1.manifest_pb2 import Architecture
from attnlens_client import Client
from bench.cases import Choice, InProcessCase, OneByOneCase, Reference, RowKey, interleave, prepare_all
from bench.load.generator import LoadGenerator
from bench.peers.timing import timed
from bench.workloads import Workload
from served import ServerProcess

if TYPE_CHECKING:
    from bench.lines import LineProcess

WORKLOAD = Workload("sentences", [f"text {number}" for number in range(80)], [4] * 80)
SIZES = Architecture(num_layers=1, hidden_size=4, intermediate_size=8)


class FakeProcess:
    """A process that takes one second per batch, plus one when run side by side.

    Its vectors deviate from the reference by `error`.
    """

    def __init__(self, error: float) -> None:
        self._error = error
        self.requests: list[dict[str, Any]] = []

    def request(self, **request: Any) -> dict[str, Any]:
        self.requests.append(request)
        texts = request["texts"]
        response: dict[str, Any] = {"seconds": len(texts) / max(request["batch_size"], 1)}
        if request.get("side_by_side"):
            response["seconds"] += 1
        if request.get("one_by_one"):
            response["seconds_by_text"] = [9.0] * 8 + [0.001, 0.003] * ((len(texts) - 8) // 2)
        if request.get("return_vectors"):
            response["vectors"] = [[1.0, self._error] for _ in texts]
        return response


def make_case(process: FakeProcess) -> InProcessCase:
    reference = Reference(cast("LineProcess", FakeProcess(0.0)))
    choices = (Choice(1), Choice(8), Choice(8, side_by_side=2))
    key = RowKey("a peer", "bf16", "embed", "sentences")
    return InProcessCase(cast("LineProcess", process), key, WORKLOAD, choices, SIZES, reference)


def test_case_measures_speed_and_accuracy_with_the_fastest_choice() -> None:
    process = FakeProcess(0.1)
    case = make_case(process)
    prepare_all([case])
    interleave([case], repetitions=2)
    row = case.row()
    assert row["choice"] == "8"
    assert row["tokens_per_s_by_choice"] == {"1": 4, "8": 32, "2 x 8": pytest.approx(320 / 11)}
    assert row["tokens_per_s"]["all"] == [32, 32]
    assert row["accuracy"]["texts"] == 80
    assert row["accuracy"]["min_cosine"] == pytest.approx(1 / 1.01**0.5)
    assert row["accuracy"]["tier"] == "misses the int8 gate"
    with_vectors = [request for request in process.requests if request.get("return_vectors")]
    assert [request["batch_size"] for request in with_vectors] == [8]


def test_row_fails_if_vectors_have_the_wrong_shape() -> None:
    process = FakeProcess(0.0)
    process.request = lambda **_: {"seconds": 1.0, "vectors": [[1.0]] * 80}  # type: ignore[method-assign]
    case = make_case(process)
    prepare_all([case])
    assert "expected vectors of shape (80, 2), got (80, 1)" in case.row()["failure"]


def test_one_by_one_case_skips_warm_up_calls_and_pools_latencies_over_repetitions() -> None:
    key = RowKey("a peer", "fp32", "embed, one text a call", "sentences")
    reference = Reference(cast("LineProcess", FakeProcess(0.0)))
    case = OneByOneCase(cast("LineProcess", FakeProcess(0.0)), key, WORKLOAD, SIZES, reference)
    prepare_all([case])
    interleave([case], repetitions=3)
    row = case.row()
    assert row["latency_ms"] == pytest.approx({"p50": 2.0, "p95": 3.0, "p99": 3.0})
    assert row["texts_per_s"]["median"] == pytest.approx(64 / 0.128)
    assert row["accuracy"]["texts"] == 72


def test_timed_runs_and_times_each_text_separately_if_one_by_one() -> None:
    calls: list[list[str]] = []

    def run(texts: list[str], _what: str, _batch_size: int) -> list[list[float]]:
        calls.append(texts)
        return [[float(len(text))] for text in texts]

    response = timed(run)(texts=["a", "bb"], what="embed", batch_size=1, one_by_one=True, return_vectors=True)
    assert calls == [["a"], ["bb"]]
    assert response["vectors"] == [[1.0], [2.0]]
    assert response["seconds"] == sum(response["seconds_by_text"])
    assert len(response["seconds_by_text"]) == 2


def test_load_generator_returns_vectors_in_text_order(minilm_server: ServerProcess) -> None:
    texts = ["a short text", "another one", "a text that is longer than both of the others", "the last"]
    options: dict[str, Any] = {"texts": texts, "lengths": [5] * 4, "num_layers": 6, "texts_per_request": 1}
    options |= {"check_every": 4, "protocol": "grpc", "what": "embed", "address": minilm_server.address}
    with asyncio.Runner() as runner:
        generator = LoadGenerator(runner)
        generator.handle(do="prepare", key="key", **options)
        response = generator.handle(do="vectors", key="key", clients=2, requests=3)
    with Client(minilm_server.address) as client:
        expected = client.embed(texts[:3])
    np.testing.assert_array_equal(np.array(response["vectors"], np.float32), expected)
