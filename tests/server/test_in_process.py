"""Behavior only visible from inside: a server in the test process, called over a real connection."""

import asyncio
import errno
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.model_pb2 import MODEL_STATE_DEGRADED
from attnlens_server.config import ConfigError, ServerConfig
from attnlens_server.core.process import State
from attnlens_server.errors import StartupError
from attnlens_server.grpc_api.methods import SERVICE_NAME
from attnlens_server.server import ATTENTIONS_NAME, Ready, Server
from failures import Failure, read_failure
from tampered import ATTENTIONS, EMBEDDINGS, change_graph, copy_of, endless_loop, put_hashes_right, through

if TYPE_CHECKING:
    from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceAsyncStub

LONG = pb.Input(text="word " * 250)
ATTENTION = pb.EncodeRequest(inputs=[LONG] * 8, attention=[pb.AttentionQuery(layers=[0], heads=[0])])
OPTIONS = [("grpc.enable_retries", 0), ("grpc.max_receive_message_length", -1)]


class Running:
    """A listening server and a stub connected to it."""

    def __init__(self, server: Server, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.stub: EncoderServiceAsyncStub = EncoderServiceStub(channel)
        self.health_stub = HealthStub(channel)
        self.engine = server._engine
        self.service = server._service

    async def warm_up(self) -> None:
        await self.server._warm_up()
        await self.server._set_serving()

    async def embed(self, *texts: str) -> pb.EmbedResponse:
        request = pb.EmbedRequest(inputs=[pb.Input(text=text) for text in texts])
        return await self.stub.Embed(request, timeout=60)

    async def health(self, service: str) -> int:
        status: int = (await self.health_stub.Check(HealthCheckRequest(service=service))).status
        return status

    async def embed_failure(self) -> Failure:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.embed("a")
        return read_failure(caught.value)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def listening(bundle: Path, **options: float) -> AsyncIterator[Running]:
    server = Server(ServerConfig(bundle=bundle, port=0, **options))  # type: ignore[arg-type]
    grpc_server, address = await server._listen()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        yield Running(server, channel)
    await server._shut_down(grpc_server)


@pytest.mark.parametrize("first", [b"", b"PRI * HTTP/2.0\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_silent_connection_is_closed(minilm_bundle: Path, first: bytes) -> None:
    server = Server(ServerConfig(bundle=minilm_bundle, port=0, request_timeout_s=0.2))
    grpc_server, address = await server._listen()
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(first)
    async with asyncio.timeout(20):
        while await reader.read(4096):
            pass
    writer.close()
    await server._shut_down(grpc_server)


async def test_server_reports_unavailable_until_it_is_warm(minilm_bundle: Path) -> None:
    async with listening(minilm_bundle) as running:
        failure = await running.embed_failure()
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        assert failure.retry_delay_s == 0.5
        await running.warm_up()
        assert len((await running.embed("a")).usages) == 1


async def test_failing_attention_graph_changes_health_but_not_embeddings(
    small_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = copy_of(small_bundle("wordpiece"), tmp_path)
    change_graph(bundle, ATTENTIONS, through("attentions.0", *endless_loop("inner", "attentions.0")))
    async with listening(bundle, start_timeout_s=0.5) as running:
        await running.warm_up()
        assert await running.health(ATTENTIONS_NAME) == HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Encode(
                pb.EncodeRequest(inputs=[pb.Input(text="a")], attention=[pb.AttentionQuery()])
            )
        failure = read_failure(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "GRAPH_UNAVAILABLE")
        assert "model_attentions.onnx" in failure.message
        assert str(bundle.parent) not in failure.message
        assert failure.retry_delay_s is not None
        watch = running.health_stub.Watch(HealthCheckRequest(service=ATTENTIONS_NAME))
        async for response in watch:
            if response.status == HealthCheckResponse.NOT_SERVING:
                break
        model = (await running.stub.GetModel(pb.GetModelRequest())).model
        assert model.state == MODEL_STATE_DEGRADED
        assert await running.health(SERVICE_NAME) == await running.health("") == HealthCheckResponse.SERVING
        assert len((await running.embed("a")).usages) == 1


async def test_unread_ready_line_does_not_stop_the_server(
    small_bundle: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(ServerConfig(bundle=small_bundle("wordpiece"), port=0))

    def announce(_ready: Ready) -> None:
        os.kill(os.getpid(), signal.SIGHUP)  # stops the server once it has recovered from the error
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    await server.run(announce)
    assert "cannot write the ready line: [Errno 32] Broken pipe" in caplog.text


async def test_startup_that_never_finishes_is_stopped_by_a_signal(
    small_bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copy_of(small_bundle("wordpiece"), tmp_path)
    hidden = "last_hidden_state"
    change_graph(bundle, EMBEDDINGS, through(hidden, *endless_loop("inner", hidden)))
    server = Server(ServerConfig(bundle=bundle, port=0))
    start = server._engine.start

    def start_and_be_told_to_stop(max_tokens: int) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(max_tokens)

    monkeypatch.setattr(server._engine, "start", start_and_be_told_to_stop)
    await server.run(lambda _: pytest.fail("it is not ready"))


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no-such-host.invalid", "'no-such-host.invalid' is not an address of this machine"),
        ("127.0.0.1", "cannot listen on 127.0.0.1:{port}: another program listens there"),
    ],
)
async def test_address_that_cannot_be_bound_is_rejected(
    small_bundle: Callable[[str], Path], host: str, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError) as caught:
            await Server(ServerConfig(bundle=small_bundle("wordpiece"), host=host, port=port))._listen()
    assert message.format(port=port) in str(caught.value)


def test_token_limit_above_the_model_positions_is_rejected(small_bundle: Callable[[str], Path]) -> None:
    config = ServerConfig(bundle=small_bundle("wordpiece"), max_tokens=35)
    with pytest.raises(ConfigError, match="max_tokens is 35: use 1 to 34"):
        Server(config)


async def test_draining_server_rejects_calls_as_unavailable(minilm_bundle: Path) -> None:
    async with listening(minilm_bundle) as running:
        await running.warm_up()
        running.service.process.state = State.DRAINING
        failure = await running.embed_failure()
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


async def test_internal_error_is_reported_by_an_id_found_in_the_log(
    minilm_bundle: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(minilm_bundle) as running:
        await running.warm_up()

        def fail(items: object, **_: object) -> None:
            raise RuntimeError(f"secret {type(items)}")

        monkeypatch.setattr(running.engine, "submit", fail)
        with caplog.at_level(logging.ERROR):
            failure = await running.embed_failure()
        monkeypatch.undo()
    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert failure.metadata["error_id"] in failure.message
    assert "secret" not in failure.message
    [record] = [record for record in caplog.records if failure.metadata["error_id"] in record.getMessage()]
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])


async def test_texts_of_a_cancelled_call_do_not_run(minilm_bundle: Path) -> None:
    async with listening(minilm_bundle) as running:
        await running.warm_up()
        before = running.engine.lanes["embeddings"].num_live_tokens
        call = running.stub.Embed(pb.EmbedRequest(inputs=[LONG] * 400))
        await until(lambda: running.engine.lanes["embeddings"].num_waiting_tokens > 0)
        call.cancel()
        await running.embed("a")
        assert running.engine.lanes["embeddings"].num_live_tokens - before < 0.5 * 400 * 252


async def test_texts_past_their_deadline_do_not_run_and_free_their_slots(minilm_bundle: Path) -> None:
    async with listening(minilm_bundle, max_concurrent_inputs=400) as running:
        await running.warm_up()
        before = running.engine.lanes["embeddings"].num_live_tokens
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Embed(pb.EmbedRequest(inputs=[LONG] * 400), timeout=0.5)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not running.service.process.admission.num_texts("embeddings"))
        await running.embed("a")
        assert running.engine.lanes["embeddings"].num_live_tokens - before < 0.7 * 400 * 252


async def test_many_attention_requests_do_not_block_embeddings(minilm_bundle: Path) -> None:
    async with listening(minilm_bundle, max_concurrent_inputs=8) as running:
        await running.warm_up()
        attention = running.stub.Encode(ATTENTION)
        await until(lambda: running.service.process.admission.num_texts("attention") == 8)
        await running.embed("a")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Encode(ATTENTION)
        assert read_failure(caught.value).reason == "OVERLOADED"
        await attention


async def test_unread_responses_are_limited(minilm_bundle: Path) -> None:
    one = pb.EncodeRequest(inputs=[LONG], attention=[pb.AttentionQuery()])
    async with listening(
        minilm_bundle, max_call_memory_bytes=20 << 20, max_response_bytes=20 << 20
    ) as running:
        await running.warm_up()
        results = await asyncio.gather(*(running.stub.Encode(one) for _ in range(8)), return_exceptions=True)
        rejected = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert 1 <= len(rejected) <= 7
        assert {read_failure(error).reason for error in rejected} == {"OVERLOADED"}
        await until(lambda: not running.service.process.admission.memory.used)
        await running.stub.Encode(one)


async def test_unread_stream_is_ended(minilm_bundle: Path) -> None:
    request = pb.EncodeStreamRequest(inputs=[LONG] * 8, attention=[pb.AttentionQuery()])
    async with listening(minilm_bundle, stall_timeout_s=0.2) as running:
        await running.warm_up()
        stream = running.stub.EncodeStream(request)
        await anext(aiter(stream))
        await until(lambda: not running.service.process.admission.num_texts("attention"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [part async for part in stream]
        failure = read_failure(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ABORTED, "SLOW_CONSUMER")


async def test_client_that_leaves_a_stream_causes_no_error(
    minilm_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = pb.EncodeStreamRequest(inputs=[LONG] * 8, attention=[pb.AttentionQuery()])
    async with listening(minilm_bundle) as running:
        await running.warm_up()
        stream = running.stub.EncodeStream(request)
        await anext(aiter(stream))
        stream.cancel()
        await until(lambda: not running.service.process.admission.num_texts("attention"))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_text_without_tokens_is_rejected(minilm_bundle: Path, tmp_path: Path) -> None:
    bundle = copy_of(minilm_bundle, tmp_path)
    tokenizer = json.loads((bundle / "tokenizer.json").read_text())
    (bundle / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    put_hashes_right(bundle)
    async with listening(bundle) as running:
        await running.warm_up()
        assert (await running.embed("a cat")).usages[0].num_tokens == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.embed("a cat", "")
        assert read_failure(caught.value).violations == {"inputs[1].text": "has no tokens: send some text"}


async def test_tokenize_response_over_the_limit_is_rejected(minilm_bundle: Path) -> None:
    async with listening(
        minilm_bundle, max_response_bytes=1 << 17, max_request_text_bytes=1 << 17
    ) as running:
        await running.warm_up()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Tokenize(pb.TokenizeRequest(inputs=[pb.Input(text="! " * 4000)] * 4))
        assert read_failure(caught.value).reason == "RESPONSE_TOO_LARGE"


async def test_embed_response_over_the_limit_is_rejected(minilm_bundle: Path) -> None:
    async with listening(
        minilm_bundle, max_response_bytes=1 << 17, max_request_text_bytes=1 << 17
    ) as running:
        await running.warm_up()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.embed(*["a"] * 100)
        assert read_failure(caught.value).reason == "RESPONSE_TOO_LARGE"
