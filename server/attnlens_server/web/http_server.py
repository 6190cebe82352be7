"""A small HTTP/1.1 server for one page, with one request per connection.

h11 parses requests and rejects what RFC 9112 calls malformed. This module limits the duration of a request,
the size of its head and body, the number of headers and connections, and the time a client may take to read a
response. Everything
runs on the event loop.
"""

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import h11

from attnlens_server.errors import InternalError, SlowConsumerError
from attnlens_server.serving.request_log import RequestRecord, validate_request_id
from attnlens_server.serving.results import CallMetrics

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 10
MAX_HEADERS = 64
MAX_BODY_BYTES = 256 << 10
MAX_CONNECTIONS = 64
REQUEST_TIMEOUT_S = 10.0
_READ_BYTES = 16 << 10
_LINGER_S = 1.0  # time to read the rest of a rejected request, so that the client receives the response
_LINGER_BYTES = 1 << 20
_PROBE_INTERVAL_S = 0.25
_MAX_PATH = 64  # characters in the log
_METHODS = ("GET", "POST")


class HttpError(Exception):
    """A rejected request: status, machine-readable reason, message, and invalid form field."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.headers = headers or {}
        self.field = field


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A complete request. Header names are lowercase and unique."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    metrics: CallMetrics = field(default_factory=CallMetrics)
    """Resource use, for the log."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A response. The connection is closed once it is sent."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    on_close: Callable[[], None] | None = None
    """Called when the response has been sent or abandoned."""


Answer = Callable[[HttpRequest], Awaitable[HttpReply]]


class HttpServer:
    """HTTP server.

    Args:
        answer: Returns the response to a request, or raises HttpError.
        error_reply: Returns the response for an error.
        check: Validates the headers of each request, or raises HttpError.
        stall_timeout_s: Time in seconds that a client may take to read a response.
        log_requests: Whether to log each request.
    """

    def __init__(
        self,
        answer: Answer,
        error_reply: Callable[[HttpError], HttpReply],
        check: Callable[[Mapping[str, str]], None],
        *,
        stall_timeout_s: float,
        log_requests: bool = False,
    ) -> None:
        self._log_requests = log_requests
        self._answer = answer
        self._error_reply = error_reply
        self._check = check
        self._stall_timeout_s = stall_timeout_s
        self._connections: set[asyncio.Task[None]] = set()
        # Connections waiting for their client, oldest first. They are closed first if there are too many.
        self._idle: dict[asyncio.Task[None], None] = {}
        self._server: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None

    async def start(self, host: str, port: int, context: ssl.SSLContext | None) -> int:
        """Listen and return the port.

        Raises:
            OSError: The address cannot be bound.
        """
        # TLS starts in `_connected`, so that a connection counts against the limit during its handshake.
        self._tls = context
        self._server = await asyncio.start_server(
            self._connected, host, port, limit=_READ_BYTES, reuse_address=True
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, timeout_s: float) -> None:
        """Reject new connections, wait for running ones, and abort the rest."""
        if self._server is not None:
            self._server.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=timeout_s)
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS and not self._close_oldest_idle():
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs this in its own task
        self._connections.add(task)
        self._idle[task] = None
        record = RequestRecord("", _peer(writer))
        try:
            if self._tls is not None:
                await writer.start_tls(self._tls, ssl_handshake_timeout=REQUEST_TIMEOUT_S)
            await self._serve(reader, writer, record, task)
        except TimeoutError:
            record.end(SlowConsumerError.status, SlowConsumerError.reason)
        except (OSError, ssl.SSLError):
            record.disconnect()
        except asyncio.CancelledError:  # stopped or evicted; Python 3.11 logs cancelled tasks as errors
            record.disconnect()
        finally:
            self._connections.discard(task)
            self._idle.pop(task, None)
            writer.transport.abort()  # no effect if the connection was closed properly
            if self._log_requests and record.method:
                record.write()

    def _close_oldest_idle(self) -> bool:
        """Close the connection that has waited longest for its client. Return whether there was one."""
        task = next(iter(self._idle), None)
        if task is None:
            return False
        del self._idle[task]
        task.cancel()
        return True

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        record: RequestRecord,
        task: asyncio.Task[None],
    ) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        is_complete = False
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await self._request(connection, reader, writer)
            if request is None:
                return
            is_complete = True
            self._idle.pop(task, None)
            _fill_record(request, record)
            reply = await _answer_unless_disconnected(self._answer(request), connection, reader, writer)
            if reply is None:
                record.disconnect()
                return
        except TimeoutError:
            seconds = f"{REQUEST_TIMEOUT_S:g} s"
            timeout = HttpError(
                408, "REQUEST_TIMEOUT", f"the request was not received within {seconds}: send it faster"
            )
            reply = self._reject(timeout, record)
        except HttpError as error:
            reply = self._reject(error, record)
        except h11.RemoteProtocolError as error:
            malformed = HttpError(error.error_status_hint, "MALFORMED_REQUEST", str(error))
            reply = self._reject(malformed, record)
        except Exception as error:
            internal = InternalError(secrets.token_hex(6))
            logger.exception("the viewer failed, error id %s", internal.error_id, exc_info=error)
            reply = self._reject(HttpError(500, internal.reason, internal.message), record)
        record.reply_bytes = len(reply.body)
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await _send(connection, writer, reply)
                record.end(str(reply.status), "")
                self._idle[task] = None
                if not is_complete:
                    await _linger(reader)
                # Over TLS, `drain` does not wait for the socket. Aborting here would drop unsent bytes.
                writer.close()
                await writer.wait_closed()
        finally:
            if reply.on_close is not None:
                reply.on_close()

    def _reject(self, error: HttpError, record: RequestRecord) -> HttpReply:
        """Return the response for an error and record it."""
        record.method = record.method or "-"  # incomplete request
        record.end(str(error.status), error.reason)
        return self._error_reply(error)

    async def _request(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpRequest | None:
        """Read a request. Return None if the client has sent none.

        Raises:
            HttpError, h11.RemoteProtocolError: The request is rejected.
        """
        head: h11.Request | None = None
        headers: dict[str, str] = {}
        body = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                if connection.they_are_waiting_for_100_continue:
                    writer.write(
                        connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b""
                    )
                connection.receive_data(await reader.read(_READ_BYTES))
            elif isinstance(event, h11.Request):
                head, headers = event, self._checked_headers(event)
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return HttpRequest(head.method.decode(), head.target.decode(), headers, bytes(body))
            else:
                return None

    def _checked_headers(self, request: h11.Request) -> dict[str, str]:
        """Return the headers of an acceptable request."""
        if request.http_version not in (b"1.0", b"1.1"):
            raise HttpError(505, "WRONG_HTTP_VERSION", "use HTTP/1.1")
        if len(request.headers) > MAX_HEADERS:
            raise HttpError(431, "TOO_MANY_HEADERS", f"the limit is {MAX_HEADERS} headers: send fewer")
        headers: dict[str, str] = {}
        for raw_name, raw_value in request.headers:
            name = raw_name.decode()
            if name in headers:
                raise HttpError(400, "REPEATED_HEADER", f"the header {name} is repeated: send it once")
            headers[name] = raw_value.decode("latin-1")
        self._check(headers)
        if request.method.decode() not in _METHODS:
            allowed = ", ".join(_METHODS)
            raise HttpError(405, "METHOD_NOT_ALLOWED", f"use {allowed}", {"Allow": allowed})
        if int(headers.get("content-length", "0")) > MAX_BODY_BYTES:
            raise _too_large()
        return headers


def _peer(writer: asyncio.StreamWriter) -> str:
    host, port, *_ = writer.get_extra_info("peername") or ("", 0)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _fill_record(request: HttpRequest, record: RequestRecord) -> None:
    """Record a request without its query string, which may contain user text."""
    record.method = f"{request.method} {request.target.partition('?')[0][:_MAX_PATH]}"
    record.request_id = validate_request_id(request.headers.get("x-request-id"))
    record.request_bytes = len(request.body)
    record.metrics = request.metrics
    record.started = time.monotonic()


def _too_large() -> HttpError:
    return HttpError(
        413, "BODY_TOO_LARGE", f"request bodies are limited to {MAX_BODY_BYTES} bytes: shorten the texts"
    )


async def _answer_unless_disconnected(
    answer: Awaitable[HttpReply],
    connection: h11.Connection,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> HttpReply | None:
    """Return the response, or None if the client disconnects first, which cancels `answer`.

    The end of the input does not distinguish a closed connection from a half-closed one. Interim responses
    do: a closed peer answers them with a reset, and other clients ignore them (RFC 9110, 15.2).
    """
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(reader.read(1))
    can_probe = connection.their_http_version == b"1.1"  # HTTP/1.0 has no interim responses
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        has_ended = leaving.done() and (leaving.exception() is not None or not leaving.result())
        while has_ended and not answering.done():
            if writer.transport.is_closing():
                return None
            if can_probe:
                writer.write(connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            await asyncio.wait((answering,), timeout=_PROBE_INTERVAL_S)
        return await answering
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait((answering, leaving))


async def _send(connection: h11.Connection, writer: asyncio.StreamWriter, reply: HttpReply) -> None:
    headers = {
        "Content-Type": reply.content_type,
        "Content-Length": str(len(reply.body)),
        "Connection": "close",
        **reply.headers,
    }
    head = h11.Response(status_code=reply.status, headers=list(headers.items()))
    writer.write(connection.send(head) or b"")
    writer.write(reply.body)
    if writer.can_write_eof():
        writer.write_eof()
    # `drain` returns below the high-water mark. With a mark of 0, it waits until everything was passed to the
    # OS.
    writer.transport.set_write_buffer_limits(0)
    await writer.drain()


async def _linger(reader: asyncio.StreamReader) -> None:
    """Drain the rest of the request briefly. Closing with unread bytes would reset the connection."""
    left = _LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0 and (data := await reader.read(_READ_BYTES)):
                left -= len(data)
