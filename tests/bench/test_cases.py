"""What a case asks its process for, and what becomes of the answers."""

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
    """Takes a second a batch, and a second more where two of them run; vectors are off by `error`."""

    def __init__(self, error: float) -> None:
        self._error = error
        self.asked: list[dict[str, Any]] = []

    def ask(self, **request: Any) -> dict[str, Any]:
        self.asked.append(request)
        texts = request["texts"]
        answer: dict[str, Any] = {"seconds": len(texts) / max(request["batch_size"], 1)}
        if request.get("side_by_side"):
            answer["seconds"] += 1
        if request.get("one_by_one"):
            answer["seconds_by_text"] = [9.0] * 8 + [0.001, 0.003] * ((len(texts) - 8) // 2)
        if request.get("return_vectors"):
            answer["vectors"] = [[1.0, self._error] for _ in texts]
        return answer


def make_case(process: FakeProcess) -> InProcessCase:
    reference = Reference(cast("LineProcess", FakeProcess(0.0)))
    choices = (Choice(1), Choice(8), Choice(8, side_by_side=2))
    key = RowKey("a peer", "bf16", "embed", "sentences")
    return InProcessCase(cast("LineProcess", process), key, WORKLOAD, choices, SIZES, reference)


def test_a_peer_is_measured_with_its_best_choice_and_its_vectors_are_those_of_that_choice() -> None:
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
    with_vectors = [request for request in process.asked if request.get("return_vectors")]
    assert [request["batch_size"] for request in with_vectors] == [8]


def test_vectors_of_another_shape_fail_the_row() -> None:
    process = FakeProcess(0.0)
    process.ask = lambda **_: {"seconds": 1.0, "vectors": [[1.0]] * 80}  # type: ignore[method-assign]
    case = make_case(process)
    prepare_all([case])
    assert "vectors of shape (80, 1) where (80, 2) are expected" in case.row()["failure"]


def test_the_first_of_single_texts_warm_up_and_the_centiles_are_over_all_repetitions() -> None:
    key = RowKey("a peer", "fp32", "embed, one text a call", "sentences")
    reference = Reference(cast("LineProcess", FakeProcess(0.0)))
    case = OneByOneCase(cast("LineProcess", FakeProcess(0.0)), key, WORKLOAD, SIZES, reference)
    prepare_all([case])
    interleave([case], repetitions=3)
    row = case.row()
    assert row["latency_ms"] == pytest.approx({"p50": 2.0, "p95": 3.0, "p99": 3.0})
    assert row["texts_per_s"]["median"] == pytest.approx(64 / 0.128)
    assert row["accuracy"]["texts"] == 72


def test_each_text_is_a_call_of_its_own_and_has_its_own_seconds() -> None:
    calls: list[list[str]] = []

    def run(texts: list[str], _what: str, _batch_size: int) -> list[list[float]]:
        calls.append(texts)
        return [[float(len(text))] for text in texts]

    answer = timed(run)(texts=["a", "bb"], what="embed", batch_size=1, one_by_one=True, return_vectors=True)
    assert calls == [["a"], ["bb"]]
    assert answer["vectors"] == [[1.0], [2.0]]
    assert answer["seconds"] == sum(answer["seconds_by_text"])
    assert len(answer["seconds_by_text"]) == 2


def test_the_vectors_of_a_server_come_in_the_order_of_the_texts(minilm_server: ServerProcess) -> None:
    texts = ["a short text", "another one", "a text that is longer than both of the others", "the last"]
    aim: dict[str, Any] = {"texts": texts, "lengths": [5] * 4, "num_layers": 6, "texts_per_request": 1}
    aim |= {"check_every": 4, "protocol": "grpc", "what": "embed", "address": minilm_server.address}
    with asyncio.Runner() as runner:
        generator = LoadGenerator(runner)
        generator.handle(do="aim", key="key", **aim)
        answer = generator.handle(do="vectors", key="key", clients=2, requests=3)
    with Client(minilm_server.address) as client:
        expected = client.embed(texts[:3])
    np.testing.assert_array_equal(np.array(answer["vectors"], np.float32), expected)
