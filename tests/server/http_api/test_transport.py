"""Invalid, oversized and slow HTTP requests are rejected, and the server keeps running."""

import asyncio
import gc
import gzip
import json
import logging
import re
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trustme
from uvicorn.protocols.http import h11_impl

from attnlens_server.access import Access
from attnlens_server.config import AccessLogSelection
from attnlens_server.core.admission import Admission
from attnlens_server.core.execution import Workers
from attnlens_server.errors import OverloadedError, RequestError
from attnlens_server.http_api import listener
from attnlens_server.http_api.app import MAX_HEADERS, HttpApp
from attnlens_server.http_api.exchange import EMBED, NATIVE, HttpRequest, HttpResponse, Route
from attnlens_server.http_api.identity import AccessGate
from attnlens_server.http_api.listener import MAX_HEAD_BYTES, HttpListener
from attnlens_server.http_api.origins import OriginPolicy
from attnlens_server.listening import TcpAddress
from attnlens_server.observing.access_log import AccessLog
from attnlens_server.observing.observer import Observer

MAX_BODY_BYTES, MAX_CONNECTIONS, LARGE_BYTES = 100_000, 8, 64 << 20
MAX_OF_CLIENT = 6  # two thirds of all connections
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
ALL = AccessLog(AccessLogSelection("all"))
EMPTY = HEAD + b"Content-Length: 0\r\n\r\n"


class Small:
    """Returns the length of each body. `/wait` blocks until `go` is set; the `/large` response is large."""

    def __init__(
        self, *, access_log: AccessLog | None = None, request_timeout_s: float = 60, large: int = LARGE_BYTES
    ) -> None:
        self.go = asyncio.Event()
        self.waiting = 0
        self.large = large
        self.num_lines = 0
        self.error: BaseException = RequestError("over")
        self.admission = Admission(1, 256 << 20, lambda _: 1.0)
        self.workers = Workers(1)
        service = SimpleNamespace(process=self)
        handlers = {"": self.length, "wait": self.wait, "large": self.send_large, "fault": self.fault}
        handlers |= {"busy": self.busy, "stream": self.stream}
        app = HttpApp(
            cast("Any", service),
            [
                Route(method, f"/{path}", handler, NATIVE, EMBED)
                for path, handler in handlers.items()
                for method in ("GET", "POST")
            ],
            OriginPolicy("http", public_origin=None, names=(), allowed_origins=()),
            AccessGate(Access("model")),
            max_body_bytes=MAX_BODY_BYTES,
            body_timeout_s=request_timeout_s,
            stall_timeout_s=0.3,
            observer=Observer(access_log),
        )
        self.listener = HttpListener(
            app, max_connections=MAX_CONNECTIONS, request_timeout_s=request_timeout_s
        )
        self.port = 0

    async def start(self, context: ssl.SSLContext | None = None) -> "Small":
        self.port = (await self.listener.start(TcpAddress("127.0.0.1", 0), context, "http-port")).port
        return self

    async def stop(self, timeout_s: float = 0) -> None:
        await self.listener.stop(timeout_s)
        self.workers.close()

    async def length(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(str(len(request.body)).encode(), content_type="text/plain")

    async def wait(self, request: HttpRequest) -> HttpResponse:
        self.waiting += 1
        try:
            await self.go.wait()
        finally:
            self.waiting -= 1
        return await self.length(request)

    async def send_large(self, request: HttpRequest) -> HttpResponse:
        request.budget.memory.grow(self.large)
        return HttpResponse(bytes(self.large))

    async def fault(self, _: HttpRequest) -> HttpResponse:
        raise RuntimeError("secret")

    async def busy(self, _: HttpRequest) -> HttpResponse:
        raise OverloadedError("full: try again later", retry_after_s=0.25)

    async def stream(self, _: HttpRequest) -> HttpResponse:
        async def lines() -> AsyncGenerator[bytes]:
            yield b"1\n"
            try:
                self.waiting += 1
                await self.go.wait()
            finally:
                self.waiting -= 1
            while self.num_lines:
                self.num_lines -= 1
                yield b"2\n"
            raise self.error

        return HttpResponse(lines(), content_type="application/x-ndjson")

    @property
    def reserved_bytes(self) -> int:
        return self.admission.memory.used

    def sockets(self) -> Sequence[Any]:
        assert self.listener._server is not None
        return self.listener._server.sockets

    async def ask(self, request: bytes) -> tuple[int, str]:
        """Send bytes, and return the status and body of the first response."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        status, body = await response_from(reader)
        writer.close()
        return status, body


async def response_from(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = re.search(r"content-length: (\d+)", head)
    assert length is not None
    return int(head.split(" ")[1]), (await reader.readexactly(int(length[1]))).decode()


async def received(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes received before the connection was closed or reset."""
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
async def small() -> AsyncIterator[Small]:
    made = await Small().start()
    yield made
    await made.stop()
    assert made.reserved_bytes == 0


async def test_body_is_received_completely(small: Small) -> None:
    assert await small.ask(HEAD + b"Content-Length: 3\r\n\r\nabc") == (200, "3")
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    assert await small.ask(chunked) == (200, "3")
    packed = gzip.compress(b"a" * MAX_BODY_BYTES)
    encoded = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
    assert await small.ask(encoded) == (200, str(MAX_BODY_BYTES))


async def test_connection_serves_several_requests(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    for count in range(3):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % count + bytes(count))
        assert await response_from(reader) == (200, str(count))
    writer.write(EMPTY + HEAD + b"Content-Length: 1\r\n\r\na")  # pipelined
    assert await response_from(reader) == (200, "0")
    assert await response_from(reader) == (200, "1")
    writer.close()


def gzipped(content: bytes) -> bytes:
    return HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(content) + content


MANY = b"".join(b"x-%d: 1\r\n" % number for number in range(MAX_HEADERS + 1))
INVALID_REQUESTS = {
    "large header": (HEAD + b"x: " + b"y" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n", 431),
    "many headers": (HEAD + MANY + b"\r\n", 431),
    "repeated header": (HEAD + b"origin: a\r\norigin: b\r\n\r\n", 400),
    "two content lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    "two lengths": (
        HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        400,
    ),
    "unknown transfer encoding": (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: x\r\n\r\na", 400),
    "missing host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "unsupported method": (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "unknown path": (b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404),
    "long body by content length": (HEAD + b"Content-Length: 1000000000\r\n\r\n", 413),
    "long body in chunks": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + bytes(65536) + b"\r\n") * 2,
        413,
    ),
    "body that is long after decompression": (gzipped(gzip.compress(bytes(MAX_BODY_BYTES + 1))), 413),
    "decompression bomb": (gzipped(gzip.compress(bytes(50 << 20))), 413),
    "invalid gzip": (gzipped(b"abc"), 400),
    "truncated gzip": (gzipped(gzip.compress(b"a" * 1000)[:-4]), 400),
    "unknown encoding": (HEAD + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\na", 415),
    "other site's page": (HEAD + b"Origin: http://evil.example\r\nContent-Length: 0\r\n\r\n", 403),
}


@pytest.mark.parametrize("case", INVALID_REQUESTS)
async def test_server_answers_after_an_invalid_request(small: Small, case: str) -> None:
    request, status = INVALID_REQUESTS[case]
    found, body = await small.ask(request)
    assert found == status
    assert set(json.loads(body)) >= {"error", "reason"}
    assert await small.ask(EMPTY) == (200, "0")


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
async def test_rejected_client_that_keeps_sending_gets_its_response(small: Small, header: bytes) -> None:
    length = 20 << 20
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(HEAD + header + b"Content-Length: %d\r\n\r\n" % length + bytes(length))
    await writer.drain()  # like urllib, which reads after it has sent everything
    status, body = await response_from(reader)
    assert status == 413
    assert f"{MAX_BODY_BYTES} bytes" in body
    writer.close()


async def test_rejected_body_that_never_ends_closes_the_connection(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_LINGER_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(HEAD + b"Content-Length: 1000000000\r\n\r\n")
    assert (await response_from(reader))[0] == 413
    await until(lambda: not small.listener.connections.used)
    writer.close()


async def test_get_request_holds_no_memory_for_its_body(small: Small) -> None:
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    assert await small.ask(head + b"Content-Length: 2\r\n\r\n{}") == (200, "2")
    status, body = await small.ask(head + b"Content-Length: %d\r\n\r\n" % MAX_BODY_BYTES)
    assert (status, json.loads(body)["error"]) == (413, "bodies are limited to 1024 bytes: omit the body")
    packed = gzip.compress(b"a" * 1025)
    encoded = head + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
    assert (await small.ask(encoded))[0] == 413


async def test_two_lengths_of_a_body_close_the_connection(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(INVALID_REQUESTS["two lengths"][0])
    assert b"\r\nconnection: close\r\n" in await received(reader)
    writer.close()


async def test_small_chunks_are_rejected(small: Small) -> None:
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    status, body = await small.ask(chunked + b"1\r\na\r\n" * (listener.MAX_SMALL_CHUNKS + 10))
    assert status == 400
    assert "small chunks" in json.loads(body)["error"]
    few = b"1\r\na\r\n" * listener.MAX_SMALL_CHUNKS
    assert await small.ask(chunked + few + b"0\r\n\r\n") == (200, str(listener.MAX_SMALL_CHUNKS))


async def test_malformed_body_of_a_head_request_is_rejected(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(b"HEAD / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n")
    head, _, body = (await received(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert not body
    assert not caplog.records
    writer.close()


async def test_connection_continues_after_a_rejected_body(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    length = MAX_BODY_BYTES + 1
    writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % length + bytes(length) + EMPTY)
    assert (await response_from(reader))[0] == 413
    assert await response_from(reader) == (200, "0")
    writer.close()


@pytest.mark.parametrize("begin", [b"", b"GET / HT", HEAD, HEAD + b"Content-Length: 5\r\n\r\nab"])
async def test_incomplete_request_times_out(begin: bytes) -> None:
    small = await Small(request_timeout_s=0.2).start()
    status, body = await small.ask(begin)
    assert status == 408
    assert "was not received within 0.2 s" in json.loads(body)["error"]
    await small.stop()


async def test_header_sent_byte_by_byte_times_out() -> None:
    small = await Small(request_timeout_s=0.5).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)

    async def drip() -> None:
        writer.write(HEAD + b"x: ")
        while True:
            writer.write(b"y")
            await asyncio.sleep(0.02)

    dripping = asyncio.ensure_future(drip())
    assert (await response_from(reader))[0] == 408
    dripping.cancel()
    writer.close()
    await small.stop()


async def test_second_request_of_a_connection_times_out_too() -> None:
    small = await Small(request_timeout_s=0.3).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(EMPTY)
    assert (await response_from(reader))[0] == 200
    await asyncio.sleep(0.5)  # an idle connection stays open
    writer.write(HEAD)
    assert (await response_from(reader))[0] == 408
    writer.close()
    await small.stop()


async def test_disconnect_cancels_the_call(small: Small) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(GET % b"wait")
    await until(lambda: small.waiting)
    writer.close()
    await until(lambda: not small.waiting)


async def test_disconnect_after_a_large_body_cancels_the_call(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h11_impl, "HIGH_WATER_LIMIT", 1)  # bytes after which uvicorn stops reading
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    head = b"POST /wait HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % 2)
    await reader.readuntil(b"100 Continue\r\n\r\n")  # the server waits for the body
    writer.write(bytes(2))
    await until(lambda: small.waiting)
    writer.close()
    await until(lambda: not small.waiting)


async def test_disconnect_cancels_a_stream(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(GET % b"stream")
    await reader.readuntil(b"1\n")
    await until(lambda: small.waiting)
    writer.close()
    await until(lambda: not small.waiting)


async def test_disconnection_that_a_server_reports_when_sending_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    small = Small(access_log=ALL)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(_: Any) -> None:
        raise BrokenPipeError

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    await small.listener._config.loaded_app(scope, receive, send)
    [record] = caplog.records
    assert vars(record)["status"] == "CANCELLED"
    assert small.reserved_bytes == 0
    await small.stop()


class Panic(BaseException):
    """Like a panic of Rust code."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OverloadedError, "OVERLOADED"), (KeyError, "INTERNAL"), (Panic, "INTERNAL")],
)
async def test_error_in_a_stream_is_its_last_line(
    small: Small, error: type[BaseException], reason: str
) -> None:
    small.error = error("over")  # a parameter would keep its traceback, and so the request
    small.go.set()
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(GET % b"stream" + GET % b"")
    content = await reader.readuntil(b"0\r\n\r\n")
    assert json.loads(content.splitlines()[-4])["reason"] == reason
    assert await response_from(reader) == (200, "0")
    writer.close()


@pytest.mark.parametrize("has_tls", [False, True])
async def test_client_that_does_not_read_is_disconnected(
    has_tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    small = Small(access_log=ALL)
    trusting = await start_with_tls(small) if has_tls else None
    if not has_tls:
        await small.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port, limit=1, ssl=trusting)
    writer.write(GET % b"large")
    await until(lambda: small.reserved_bytes)
    await until(lambda: not small.reserved_bytes)
    await until(lambda: not small.listener.connections.used)
    [record] = caplog.records
    assert vars(record)["status"] == "ABORTED"
    writer.transport.abort()
    del reader
    await small.stop()


async def test_pipelining_client_that_does_not_read_is_disconnected(small: Small) -> None:
    small.large = 60 << 10  # written without waiting for the client
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port, limit=1)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(GET % b"large" * 200)
    await until(lambda: small.reserved_bytes)
    await until(lambda: not small.listener.connections.used)
    writer.transport.abort()
    del reader


async def test_stream_to_a_client_that_has_reset_the_connection_ends(
    small: Small, caplog: pytest.LogCaptureFixture
) -> None:
    small.num_lines = 20
    client = socket.create_connection(("127.0.0.1", small.port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset
    client.sendall(GET % b"stream")
    await until(lambda: small.waiting)
    client.close()
    small.go.set()  # the lines are ready before the event loop notices the reset
    await until(lambda: not small.listener.connections.used)
    assert small.num_lines > 0
    assert not caplog.records  # asyncio logs each write after a reset


async def test_slow_client_gets_the_whole_response_before_the_connection_closes(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_LINGER_S", 0.05)
    small.large = 60 << 10
    for listening in small.sockets():
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", small.port))
    client.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    await until(lambda: any(each.transport.is_closing() for each in small.listener._state.connections))
    await asyncio.sleep(0.3)
    reader, writer = await asyncio.open_connection(sock=client)
    assert (await received(reader)).endswith(b"\r\n\r\n" + bytes(small.large))
    writer.close()


async def test_connections_over_the_limit_are_closed_until_others_end(small: Small) -> None:
    pairs = []
    for _ in range(MAX_OF_CLIENT):
        reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
        writer.write(GET % b"wait")
        pairs.append((reader, writer))
    await until(lambda: small.waiting == MAX_OF_CLIENT)
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    assert await received(reader) == b""
    writer.close()
    small.go.set()
    for reader, writer in pairs:
        assert (await response_from(reader))[0] == 200
        writer.close()
    assert await small.ask(EMPTY) == (200, "0")


SMALL_BUFFER = 32 << 10


async def start_with_tls(small: Small) -> ssl.SSLContext:
    """Start `small` with TLS and small send buffers. Return an SSL context that trusts it."""
    authority = trustme.CA()
    context, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(trusting)
    await small.start(context)
    for listening in small.sockets():
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    return trusting


async def test_large_response_over_tls_is_complete() -> None:
    small = Small(large=3 << 20)
    trusting = await start_with_tls(small)
    for _ in range(5):
        raw = socket.create_connection(("127.0.0.1", small.port))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        reader, writer = await asyncio.open_connection(sock=raw, ssl=trusting, server_hostname="127.0.0.1")
        writer.write(GET % b"large")
        assert len((await response_from(reader))[1]) == 3 << 20
        writer.close()
    await small.stop()


async def test_idle_connections_are_closed_for_a_new_request(small: Small) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", small.port) for _ in range(MAX_CONNECTIONS + 2)]
    async with asyncio.timeout(20):  # closed before they time out
        assert await received(silent[0][0]) == await received(silent[1][0]) == b""
    assert await small.ask(EMPTY) == (200, "0")
    for _, writer in silent:
        writer.close()


async def test_internal_error_exposes_only_an_id(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    status, body = await small.ask(GET % b"fault")
    assert status == 500
    assert "secret" not in body
    (error_id,) = re.findall(r"error id (\w{12})", body)
    assert f"error id {error_id}" in caplog.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("path", ["busy", "stream"])
async def test_failed_request_is_freed_without_a_garbage_collection(small: Small, path: str) -> None:
    small.go.set()
    gc.collect()
    gc.disable()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
        head = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % path.encode()
        writer.write(head + b"Content-Length: 1\r\n\r\na")
        assert b"rror" in await reader.read()
        writer.close()
        small.error = RequestError("")
        await asyncio.sleep(0)
        # `isinstance` reads `__class__`, which some objects of PyTorch answer with a warning.
        assert not any(type(each) is HttpRequest for each in gc.get_objects())
    finally:
        gc.enable()


async def test_overload_tells_when_to_retry(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(GET % b"busy")
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 429 ")
    assert "\r\nretry-after: 1\r\n" in head
    assert "\r\nretry-after-ms: 250\r\n" in head
    writer.close()


async def test_request_id_is_returned(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(HEAD + b"X-Request-Id: abc-1\r\nContent-Length: 0\r\n\r\n")
    assert b"\r\nx-request-id: abc-1\r\n" in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_stop_ends_waiting_requests(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(GET % b"wait")
    await until(lambda: small.waiting)
    await small.listener.stop(0.05)
    assert await received(reader) == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", small.port)


async def test_stop_lets_running_requests_end(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    idle, idle_writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(GET % b"wait")
    await until(lambda: small.waiting)
    stopping = asyncio.ensure_future(small.listener.stop(20))
    assert await received(idle) == b""
    small.go.set()
    assert (await response_from(reader))[0] == 200
    assert await received(reader) == b""
    await stopping
    for each in (writer, idle_writer):
        each.close()


async def test_log_contains_the_outcome_of_each_request(caplog: pytest.LogCaptureFixture) -> None:
    small = await Small(access_log=ALL).start()
    caplog.set_level(logging.INFO)
    await small.ask(HEAD.replace(b" / ", b" /" + 99 * b"x" + b"?text=a ") + b"\r\n")
    await small.ask(99 * b"X" + HEAD.removeprefix(b"POST") + b"\r\n")
    _, waiting = await asyncio.open_connection("127.0.0.1", small.port)
    waiting.write(GET % b"wait")
    await until(lambda: small.waiting)
    waiting.close()
    await until(lambda: not small.waiting)
    _, idle = await asyncio.open_connection("127.0.0.1", small.port)  # sends no request, so nothing is logged
    await small.stop()
    idle.close()
    logged = [(vars(record)["method"], vars(record)["status"]) for record in caplog.records]
    assert logged == [
        ("POST /" + 63 * "x", "404"),
        (16 * "X" + " /", "405"),
        ("GET /wait", "CANCELLED"),
    ]
    assert listener._unlogged.disabled


HALF_CLOSED = {
    "a request": (EMPTY, b"HTTP/1.1 200 OK\r\n", b"\r\n\r\n0"),
    "two requests": (EMPTY + HEAD + b"Content-Length: 1\r\n\r\na", b"HTTP/1.1 200 OK\r\n", b"\r\n\r\n1"),
    "a slow request": (GET % b"wait", b"HTTP/1.1 200 OK\r\n", b"\r\n\r\n0"),
    "HTTP/1.0": (b"GET /wait HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"\r\n\r\n0"),
    "a stream": (GET % b"stream", b"HTTP/1.1 200 OK\r\n", b"0\r\n\r\n"),
    "an invalid request": (GET % b"x", b"HTTP/1.1 404 Not Found\r\n", b"}"),
}


@pytest.mark.parametrize("probe_s", [0.0, 60.0])
@pytest.mark.parametrize("case", HALF_CLOSED)
async def test_client_that_closes_its_side_gets_its_response(
    small: Small, case: str, probe_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_PROBE_S", probe_s)
    request, first, last = HALF_CLOSED[case]
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(request)
    writer.write_eof()
    content = b""
    if b"wait" in request or b"stream" in request:
        await until(lambda: small.waiting)
        connections: Any = small.listener._state.connections
        await until(lambda: any(connection._is_half_closed for connection in connections))
        if probe_s == 0:  # a part of the response that is always the same
            content = await reader.readuntil(b"1\n\r\n0" if b"stream" in request else b"HTTP/1.1 ")
        small.go.set()
    content += await received(reader)
    assert content.startswith(first), content
    assert content.endswith(last), content
    assert content.count(b"HTTP/1.1 200 ") == (2 if case == "two requests" else case != "an invalid request")
    if case == "a stream":
        chunks = [int(size, 16) for size in re.findall(rb"\r\n([0-9a-f]+)\r\n", content)]
        assert chunks[-1] == 0
        assert b'"error":"over"' in content
    writer.close()
    await until(lambda: not small.listener.connections.used)


async def test_client_that_closes_its_side_too_early_is_disconnected(small: Small) -> None:
    for request in (b"", b"GET / HT", HEAD + b"Content-Length: 5\r\n\r\nab"):
        reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
        writer.write(request)
        writer.write_eof()
        assert await received(reader) == b""
        writer.close()


@pytest.mark.parametrize(
    "target",
    [b"http://localhost/wait", b"HTTP://localhost:8080/wait?a=b", b"https://[::1]/wait", b"/wait"],
)
async def test_target_in_absolute_form_is_that_of_its_path(small: Small, target: bytes) -> None:
    small.go.set()
    assert await small.ask(b"GET " + target + b" HTTP/1.1\r\nHost: other.example\r\n\r\n") == (200, "0")
    assert await small.ask(b"GET " + target + b" HTTP/1.0\r\n\r\n") == (200, "0")


async def test_target_without_a_path_is_the_root(small: Small) -> None:
    for target in (b"http://localhost", b"http://localhost?a=b"):
        assert await small.ask(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") == (200, "0")


async def test_host_of_a_target_in_absolute_form_replaces_the_header(small: Small) -> None:
    origin = b"Origin: http://localhost\r\n"
    request = b"POST http://%s/ HTTP/1.1\r\nHost: %s\r\n" + origin + b"Content-Length: 0\r\n\r\n"
    assert await small.ask(request % (b"localhost", b"evil.example")) == (200, "0")
    assert (await small.ask(request % (b"evil.example", b"localhost")))[0] == 421


@pytest.mark.parametrize("target", [b"http:///wait", b"http://user:secret@localhost/wait"])
async def test_target_without_a_host_or_with_credentials_is_rejected(
    small: Small, target: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await small.ask(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"))[0] == 400
    assert "secret" not in caplog.text


async def test_tls_connections_are_limited_before_their_handshake() -> None:
    small = Small()
    trusting = await start_with_tls(small)
    silent = [socket.create_connection(("127.0.0.1", small.port)) for _ in range(5 * MAX_CONNECTIONS)]
    for each in silent[::2]:
        with suppress(OSError):  # closed
            each.sendall(b"\x16\x03\x01")  # the first bytes of a handshake
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port, ssl=trusting)
    assert small.listener.connections.used <= MAX_CONNECTIONS
    writer.write(EMPTY)
    assert await response_from(reader) == (200, "0")
    writer.close()
    for each in silent:
        each.close()
    await until(lambda: not small.listener.connections.used)
    await small.stop()


async def test_tls_handshake_times_out() -> None:
    small = Small(request_timeout_s=0.2)
    await start_with_tls(small)
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    await until(lambda: small.listener.connections.used)
    async with asyncio.timeout(20):
        assert await received(reader) == b""
    await until(lambda: not small.listener.connections.used)
    writer.close()
    await small.stop()


async def test_silent_tls_connections_do_not_delay_the_shutdown() -> None:
    small = Small()
    await start_with_tls(small)
    _, writer = await asyncio.open_connection("127.0.0.1", small.port)
    await until(lambda: small.listener.connections.used)
    async with asyncio.timeout(20):
        await small.stop(60)
    assert not small.listener.connections.used
    writer.close()
