"""`embed_iter` of both clients, and its progress, against a scripted server."""

import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.error_pb2 import FieldViolation
from attnlens_client import AsyncClient, BadReplyError, Client, Embeddings, InvalidRequestError
from attnlens_client.progress import reporting
from scripted import ScriptedServer, refuse, vectors

Call = Callable[..., Any]


def _embed_requests(server: ScriptedServer) -> list[pb.EmbedRequest]:
    return [request for request in server.requests if isinstance(request, pb.EmbedRequest)]


def test_batches_keep_text_order(server: ScriptedServer, connect: Call) -> None:
    texts = ["a" * length for length in range(1, 12)]
    with connect(server.address, batch_size=4) as call:
        batches = call("embed_iter", iter(texts))
    assert [len(batch) for batch in batches] == [4, 4, 3]
    assert [int(vector[0]) for batch in batches for vector in batch] == list(range(1, 12))
    assert [usage.num_tokens for batch in batches for usage in batch.usages] == [1] * 11


def test_no_texts_yield_no_batches(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address) as call:
        assert call("embed_iter", []) == []


def test_endless_iterable_is_read_only_as_batches_are_consumed(server: ScriptedServer) -> None:
    read: list[int] = []

    def endless() -> Iterator[str]:
        for number in itertools.count():
            read.append(number)
            yield "a"

    with Client(server.address) as client:
        batches = client.embed_iter(endless(), batch_size=2, in_flight=3)
        assert read == []
        for taken in range(3):
            assert next(batches).vectors.shape == (2, 4)
            assert len(read) == 2 * (3 + taken)
        batches.close()
        assert len(_embed_requests(server)) <= 5


def test_several_calls_run_at_a_time(server: ScriptedServer, connect: Call) -> None:
    answer = server.embed

    def wait_for_the_second(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        server.waiting.release()
        if request.inputs[0].text == "a":  # the first reply is sent after the last request arrives
            assert all(server.waiting.acquire(timeout=30) for _ in range(3))
        return answer(request, context)

    server.embed = wait_for_the_second
    with connect(server.address) as call:
        batches = call("embed_iter", ["a", "bb", "ccc"], batch_size=1, in_flight=3)
    assert [int(batch.vectors[0, 0]) for batch in batches] == [1, 2, 3]


def test_batches_fit_the_server_limits(connect: Call) -> None:
    with ScriptedServer(max_inputs_per_request=2) as server, connect(server.address) as call:
        assert [len(batch) for batch in call("embed_iter", ["a"] * 6, batch_size=3)] == [2, 1, 2, 1]
    with (
        ScriptedServer(max_text_bytes=3) as server,
        connect(server.address) as call,
        pytest.raises(InvalidRequestError, match=r"^texts\[5\] has 4 bytes"),
    ):
        call("embed_iter", ["a"] * 5 + ["long"], batch_size=2)


def test_invalid_text_is_reported_with_its_index(server: ScriptedServer, connect: Call) -> None:
    with connect(server.address) as call:
        with pytest.raises(TypeError, match=r"^texts\[5\] is a missing value \(None\)"):
            call("embed_iter", ["a"] * 5 + [None], batch_size=2)
        with pytest.raises(TypeError, match="texts is one str"):
            call("embed_iter", "a")
        for name in ("batch_size", "in_flight"):
            with pytest.raises(ValueError, match=f"{name} is 0: use 1 or more"):
                call("embed_iter", ["a"], **{name: 0})

    def embed(request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        if any(text.text == "bad" for text in request.inputs):
            violation = FieldViolation(field="inputs[1].text", description="is bad", input_index=1)
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "is bad", violation)
        return vectors(request)

    server.embed = embed
    with connect(server.address) as call, pytest.raises(InvalidRequestError, match=r"^texts\[3\] is bad"):
        call("embed_iter", ["a", "a", "a", "bad"], batch_size=2)


def test_model_change_between_batches_is_detected(server: ScriptedServer, connect: Call) -> None:
    def embed(request: pb.EmbedRequest, _: grpc.ServicerContext) -> pb.EmbedResponse:
        reply = vectors(request)
        if len(_embed_requests(server)) > 2:
            reply.model_version = "another"
        return reply

    server.embed = embed
    with (
        connect(server.address) as call,
        pytest.raises(BadReplyError, match=r"version of texts\[2:3\] is 'another', expected '1a2b'"),
    ):
        call("embed_iter", ["a"] * 3, batch_size=1, in_flight=1)


def test_progress_counts_the_completed_texts(server: ScriptedServer, connect: Call) -> None:
    told: list[tuple[int, int | None]] = []

    def tell(done: int, total: int | None) -> None:
        told.append((done, total))

    with connect(server.address, batch_size=2, max_in_flight=1) as call:
        call("embed", ["a"] * 5, progress=tell)
        call("embed_iter", ["a"] * 3, progress=tell)
        call("embed_iter", iter(["a"]), progress=tell)
        with pytest.raises(TypeError, match="progress is 5: use True, False or a function"):
            call("embed", ["a"], progress=5)
    assert told == [(0, 5), (2, 5), (4, 5), (5, 5), (0, 3), (2, 3), (3, 3), (0, None), (1, None)]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_terminal_gets_a_progress_line_without_tqdm(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with reporting(progress=True) as report:
        report(0, 1200)
        report(1200, 1200)
    shown = capsys.readouterr().err
    assert shown == ("\r0 of 1,200 texts\r1,200 of 1,200 texts\n" if is_terminal else "")


def test_tqdm_bar_is_used_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Bar:
        n = 0

        def __init__(self, **options: Any) -> None:
            assert not options.get("unit_scale")  # floats would be shown as 0.00/50.0
            done.append(options["total"])

        def update(self, count: int) -> None:
            self.n += count
            done.append(self.n)

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    with reporting(progress=True) as report:
        report(0, None)
        report(128, None)
    assert done == [None, 0, 128, "closed"]


async def test_asynchronous_iterable_is_rejected_with_the_remedy(server: ScriptedServer) -> None:
    async def texts() -> Any:
        yield "a"

    async with AsyncClient(server.address) as client:
        with pytest.raises(
            TypeError, match=r"asynchronous: use a list, such as \[text async for text in texts\]"
        ):
            client.embed_iter(texts())


def test_embeddings_iterate_over_their_vectors() -> None:
    result = Embeddings(np.arange(6.0).reshape(2, 3), (), "m", "v")
    assert len(result) == 2
    assert [vector.tolist() for vector in result] == [[0, 1, 2], [3, 4, 5]]
