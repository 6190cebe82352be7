"""Invalid, oversized and slow HTTP requests are rejected, and the server keeps running."""

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

import pytest
import trustme

from attnlens_server.web import http_server
from attnlens_server.web.http_server import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_HEADERS,
    HttpError,
    HttpReply,
    HttpRequest,
    HttpServer,
)

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"


class Small:
    """Returns the length of each body. `/wait` blocks until `go` is set; the `/large` response is large."""

    def __init__(self, *, log_requests: bool = False, large_bytes: int = 64 << 20) -> None:
        self.large_bytes = large_bytes
        self.go = asyncio.Event()
        self.waiting = 0
        self.over = 0
        self.server = HttpServer(
            self.answer, self.refuse, self.check, stall_timeout_s=0.3, log_requests=log_requests
        )
        self.port = 0

    async def answer(self, request: HttpRequest) -> HttpReply:
        if request.target == "/wait":
            self.waiting += 1
            try:
                await self.go.wait()
            finally:
                self.waiting -= 1
        if request.target == "/fault":
            raise RuntimeError("secret")
        size = self.large_bytes if request.target == "/large" else 0
        return HttpReply(200, "text/plain", str(len(request.body)).encode() + bytes(size), {}, self.done)

    def done(self) -> None:
        self.over += 1

    def refuse(self, error: HttpError) -> HttpReply:
        return HttpReply(error.status, "text/plain", f"{error.reason}: {error}".encode(), error.headers)

    def check(self, headers: Mapping[str, str]) -> None:
        if headers.get("host") == "evil":
            raise HttpError(421, "WRONG_HOST", "no")

    async def ask(self, request: bytes) -> tuple[int, str]:
        """Send bytes, and return the status and body of the response."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        reply = await reader.read()
        writer.close()
        head, _, body = reply.partition(b"\r\n\r\n")
        assert b"\r\nConnection: close" in head
        return int(head.split(b" ")[1]), body.decode()


async def sent_to(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes received before the connection was closed or reset."""
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""


@pytest.fixture
async def small() -> AsyncIterator[Small]:
    made = Small()
    made.port = await made.server.start("127.0.0.1", 0, None)
    yield made
    await made.server.stop(0)


async def test_body_is_received_completely(small: Small) -> None:
    assert await small.ask(HEAD + b"Content-Length: 3\r\n\r\nabc") == (200, "3")
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    assert await small.ask(chunked) == (200, "3")
    assert small.over == 2


MANY = b"".join(b"x-%d: 1\r\n" % number for number in range(MAX_HEADERS + 1))
INVALID_REQUESTS = {
    "large header": (HEAD + b"x: " + b"y" * 50_000 + b"\r\n\r\n", 431),
    "many headers": (HEAD + MANY + b"\r\n", 431),
    "repeated header": (HEAD + b"origin: a\r\norigin: b\r\n\r\n", 400),
    "two content lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    "content length and chunks": (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: x\r\n\r\na", 501),
    "missing host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "wrong host": (b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n", 421),
    "unsupported method": (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "long body by content length": (HEAD + b"Content-Length: 1000000000\r\n\r\n", 413),
    "long body in chunks": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + bytes(65536) + b"\r\n") * 5,
        413,
    ),
}


@pytest.mark.parametrize("case", INVALID_REQUESTS)
async def test_server_answers_after_an_invalid_request(small: Small, case: str) -> None:
    request, status = INVALID_REQUESTS[case]
    assert (await small.ask(request))[0] == status
    assert await small.ask(HEAD + b"Content-Length: 0\r\n\r\n") == (200, "0")


async def test_rejected_client_that_keeps_sending_gets_its_response(small: Small) -> None:
    length = MAX_BODY_BYTES + 1
    status, body = await small.ask(HEAD + b"Content-Length: %d\r\n\r\n" % length + bytes(length))
    assert status == 413
    assert "262144 bytes" in body


@pytest.mark.parametrize("begin", [b"", b"GET / HT", HEAD, HEAD + b"Content-Length: 5\r\n\r\nab"])
async def test_incomplete_request_times_out(
    small: Small, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.2)
    status, body = await small.ask(begin)
    assert (status, body) == (
        408,
        "REQUEST_TIMEOUT: the request was not received within 0.2 s: send it faster",
    )


async def test_header_sent_byte_by_byte_times_out(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)

    async def drip() -> None:
        writer.write(HEAD + b"x: ")
        while True:
            writer.write(b"y")
            await asyncio.sleep(0.02)

    dripping = asyncio.ensure_future(drip())
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    dripping.cancel()
    writer.close()


async def test_disconnect_cancels_the_call(small: Small) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while not small.waiting:
        await asyncio.sleep(0)
    writer.close()
    while small.waiting:
        await asyncio.sleep(0)
    assert not small.go.is_set()


async def test_client_that_does_not_read_is_disconnected(small: Small) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", small.port, limit=1)
    writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while not small.over:
        await asyncio.sleep(0.01)
    writer.transport.abort()


async def test_connections_over_the_limit_are_closed_until_others_end(small: Small) -> None:
    writers = []
    for _ in range(MAX_CONNECTIONS):
        _, writer = await asyncio.open_connection("127.0.0.1", small.port)
        writer.write(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
        writers.append(writer)
    while small.waiting < MAX_CONNECTIONS:
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    assert await sent_to(reader) == b""
    writer.close()
    small.go.set()
    while small.over < MAX_CONNECTIONS:
        await asyncio.sleep(0)
    assert await small.ask(HEAD + b"Content-Length: 0\r\n\r\n") == (200, "0")
    for each in writers:
        each.close()


SMALL_BUFFER = 32 << 10


async def tls_server(small: Small) -> ssl.SSLContext:
    """Start `small` with TLS and small send buffers. Return an SSL context that trusts it."""
    authority = trustme.CA()
    context, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(trusting)
    small.port = await small.server.start("127.0.0.1", 0, context)
    assert small.server._server is not None
    for listening in small.server._server.sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    return trusting


async def test_large_response_over_tls_is_complete() -> None:
    small = Small(large_bytes=3 << 20)
    trusting = await tls_server(small)
    for _ in range(10):
        raw = socket.create_connection(("127.0.0.1", small.port))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        reader, writer = await asyncio.open_connection(sock=raw, ssl=trusting, server_hostname="127.0.0.1")
        writer.write(HEAD.replace(b"POST / ", b"GET /large ") + b"\r\n")
        _, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert len(body) == 1 + (3 << 20)
        writer.close()
    await small.server.stop(0)


@pytest.mark.parametrize("has_tls", [False, True])
async def test_idle_connections_are_closed_for_a_new_request(small: Small, has_tls: bool) -> None:
    trusting = None
    if has_tls:
        await small.server.stop(0)
        small = Small()
        trusting = await tls_server(small)
    silent = [await asyncio.open_connection("127.0.0.1", small.port) for _ in range(MAX_CONNECTIONS + 2)]
    async with asyncio.timeout(http_server.REQUEST_TIMEOUT_S / 2):  # closed before they time out
        assert await sent_to(silent[0][0]) == await sent_to(silent[1][0]) == b""
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port, ssl=trusting)
    writer.write(HEAD + b"\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    for _, each in (*silent, (reader, writer)):
        each.close()
    await small.server.stop(0)


async def test_half_closed_client_gets_its_response(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
    writer.write_eof()
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 \r\n\r\n"
    small.go.set()
    assert b"HTTP/1.1 200 " in await reader.read()
    writer.close()


async def test_internal_error_exposes_only_an_id(small: Small, caplog: pytest.LogCaptureFixture) -> None:
    status, body = await small.ask(b"GET /fault HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status == 500
    assert "secret" not in body
    (error_id,) = re.findall(r"error id (\w{12})", body)
    assert f"error id {error_id}" in caplog.text
    assert "secret" in caplog.text


async def test_stop_ends_waiting_requests(small: Small) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small.port)
    writer.write(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while not small.waiting:
        await asyncio.sleep(0)
    await small.server.stop(0.05)
    assert await sent_to(reader) == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", small.port)


async def test_log_contains_the_outcome_of_each_request(caplog: pytest.LogCaptureFixture) -> None:
    small = Small(log_requests=True)
    small.port = await small.server.start("127.0.0.1", 0, None)
    caplog.set_level(logging.INFO)
    await small.ask(HEAD.replace(b" / ", b" /" + 99 * b"x" + b"?text=a ") + b"\r\n")
    await small.ask(b"no HTTP\r\n\r\n")
    _, waiting = await asyncio.open_connection("127.0.0.1", small.port)
    waiting.write(HEAD.replace(b"POST / ", b"GET /wait ") + b"\r\n")
    while not small.waiting:
        await asyncio.sleep(0.001)
    waiting.close()
    while small.waiting:
        await asyncio.sleep(0.001)
    reader, slow = await asyncio.open_connection("127.0.0.1", small.port)
    slow.write(HEAD.replace(b"POST / ", b"GET /large ") + b"\r\n")
    while small.over < 2:
        await asyncio.sleep(0.001)
    slow.close()
    await sent_to(reader)
    _, idle = await asyncio.open_connection("127.0.0.1", small.port)  # sends no request, so nothing is logged
    await small.server.stop(0)
    idle.close()
    logged = [(vars(record)["method"], vars(record)["status"]) for record in caplog.records]
    assert logged == [
        ("POST /" + 63 * "x", "200"),
        ("-", "400"),
        ("GET /wait", "CANCELLED"),
        ("GET /large", "ABORTED"),
    ]
