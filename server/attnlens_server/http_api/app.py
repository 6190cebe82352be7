"""ASGI application: lifecycle of a request, from its body to its response, the same for all routes.

All routes share the admission control, the limits and the errors of gRPC. A route only translates: it parses
the body, calls `ModelService` and serializes the result.
"""

import asyncio
import difflib
import logging
import math
import re
import secrets
import traceback
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

from attnlens_server import errors
from attnlens_server.clients import Client
from attnlens_server.core.admission import Admission, Budget, Reservation
from attnlens_server.core.request_record import RequestRecord, validate_request_id
from attnlens_server.core.stages import mark
from attnlens_server.http_api.exchange import (
    HEALTH,
    JSON_CONVERSION,
    NATIVE,
    PUBLIC,
    Dialect,
    HttpError,
    HttpRequest,
    HttpResponse,
    Route,
    encode_json,
)
from attnlens_server.http_api.identity import Gate
from attnlens_server.http_api.listener import ABORT, MAX_HEAD_BYTES
from attnlens_server.http_api.origins import OriginPolicy
from attnlens_server.observing.observer import Observer
from attnlens_server.operations.service import ModelService

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_HEADERS = 64
MAX_UNUSED_BODY_BYTES = 1 << 10
"""Maximum size of the body of a GET request. Some clients send one, which is ignored."""
MAX_GZIP_RATIO = 1032  # of Deflate
SENDING_COPIES = 3  # of a part that is being sent: the part, its frame, and the buffer of the connection
BODY_COPIES = 3  # the body, the parsed request without its texts, and texts that the response repeats
_CHUNK_BYTES = 1 << 18
_SMALL_BYTES = 1 << 16  # responses up to this size fit into the write buffer of a connection
_WORD = re.compile(r"[A-Za-z][A-Za-z_.-]{0,23}|[a-z.-]+|v[0-9]{1,2}|", re.ASCII)
_MAX_METHOD, _MAX_PATH = 16, 64  # characters in messages and in the log
_REQUEST_ID = b"x-request-id"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of all responses, unless a route replaces them."""


class HttpApp:
    """ASGI application for one model.

    Args:
        service: Service of the model.
        routes: Routes. The first one that matches is used.
        origins: Policy for requests of web pages.
        gate: Access control.
        max_body_bytes: Maximum size of a body, also after decompression.
        body_timeout_s: Maximum time in seconds to receive a body.
        stall_timeout_s: Time in seconds that a client may take to read a part of a response.
        observer: Notified of each request.
    """

    def __init__(
        self,
        service: ModelService,
        routes: Iterable[Route],
        origins: OriginPolicy,
        gate: Gate,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        stall_timeout_s: float,
        observer: Observer,
    ) -> None:
        self._service = service
        self._origins = origins
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._observer = observer
        self._gate = gate
        self._paths: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in routes:
            paths = self._prefixes if route.path.endswith("*") else self._paths
            paths.setdefault(route.path.removesuffix("*"), {}).setdefault(route.method, route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI connection."""
        if scope["type"] != "http":
            await _decline(scope["type"], receive, send)
            return
        headers = _headers(scope["headers"])
        record = RequestRecord(
            f"{_logged_method(scope)} {_logged_path(scope['path'])}",
            protocol="http",
            peer=_peer(scope.get("client")),
            request_id=validate_request_id(headers.get("x-request-id")) or secrets.token_hex(8),
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
        )
        self._observer.begin(record)
        memory = Reservation(self._service.process.admission)
        exchange = _Exchange(scope, receive, send, headers, record, memory, self._stall_timeout_s)
        try:
            await self._respond(exchange)
        except TimeoutError:
            record.end(errors.SlowConsumerError.status, errors.SlowConsumerError.reason)
            exchange.abort()
        except (_DisconnectedError, OSError):  # some servers raise OSError when the app sends
            record.disconnect()
        except asyncio.CancelledError:
            record.disconnect()
            raise
        finally:
            exchange.close()
            memory.release()
            if exchange.is_admitted:
                self._service.process.admission.calls.put_back(record.client, 1)
            self._observer.end(record)

    async def _respond(self, exchange: "_Exchange") -> None:
        """Answer a request. The response is sent with the dialect of the route, also if it is an error."""
        dialect, reason = NATIVE, ""
        try:
            route, path = self._route(exchange.scope["method"], _own_path(exchange.scope))
            dialect = route.dialect
            exchange.record.route = f"{route.method} {route.path}"
            exchange.record.method = f"{_logged_method(exchange.scope)} {route.path}"
            self._check(route, exchange)
            limit = self._max_body_bytes if route.method == "POST" else MAX_UNUSED_BODY_BYTES
            request = await self._request(path, exchange, limit)
            response = await exchange.unless_disconnected(route.handler(request))
            if isinstance(response.body, bytes):
                mark("build")
                exchange.reserve_sending(len(response.body))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, _DisconnectedError):
            raise
        except BaseException as error:  # noqa: BLE001 - the outermost frame, also for panics of Rust code
            response, reason = self._failed(request_error(error, exchange.record.method), exchange, dialect)
            traceback.clear_frames(error.__traceback__)
        await exchange.send(response, dialect)
        exchange.record.end(str(response.status), reason)

    def _failed(
        self, error: errors.RequestError, exchange: "_Exchange", dialect: Dialect
    ) -> tuple[HttpResponse, str]:
        """Record an error. Return its response and reason.

        The caller must not keep the error, whose traceback contains the caller's frame: the request would
        remain in memory until a garbage collection.
        """
        exchange.record.fail(error)
        self._service.process.admission.count_failure(error, exchange.record.client)
        return _error_response(error, dialect), error.reason

    def _route(self, method: str, path: str) -> tuple[Route, str]:
        """Return the route of a request, and the part of the path that it has not matched.

        Raises:
            HttpError: There is no such path, or not with this method.
        """
        methods, rest = self._paths.get(path), ""
        if methods is None:
            for prefix, candidates in self._prefixes.items():
                if path.startswith(prefix):
                    methods, rest = candidates, path.removeprefix(prefix)
                    break
            else:
                raise HttpError(404, "NO_SUCH_PATH", self._unknown_path(method, path))
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            message = f"{method[:_MAX_METHOD]} {path[:_MAX_PATH]} is not a route: use {allowed}"
            raise HttpError(405, "METHOD_NOT_ALLOWED", message, {"Allow": allowed})
        return route, rest

    def _unknown_path(self, method: str, path: str) -> str:
        """Return the message for an unknown path, with the nearest route."""
        path = path[:_MAX_PATH].encode("utf-8", "replace").decode()
        routes = {
            route.path: f"{route.method} {route.path}"
            for methods in (*self._paths.values(), *self._prefixes.values())
            for route in methods.values()
        }
        nearest = difflib.get_close_matches(path, routes, n=1)
        hint = f"the nearest route is {routes[nearest[0]]}, and " if nearest else ""
        return f"{method[:_MAX_METHOD]} {path} is not a route: {hint}/docs lists all routes"

    def _check(self, route: Route, exchange: "_Exchange") -> None:
        raw, headers = exchange.scope["headers"], exchange.headers
        size = sum(len(name) + len(value) for name, value in raw)
        if len(raw) > MAX_HEADERS or size > MAX_HEAD_BYTES:
            message = f"the limit is {MAX_HEADERS} headers of {MAX_HEAD_BYTES} bytes in total: send fewer"
            raise HttpError(431, "HEADERS_TOO_LARGE", message)
        for name in ("host", "origin", "content-type", "content-encoding", "authorization"):
            if sum(each == name.encode() for each, _ in raw) > 1:
                raise HttpError(400, "REPEATED_HEADER", f"the header {name} is repeated: send it once")
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may disagree about where the body ends.
            message = "the body has both Content-Length and Transfer-Encoding: send one of them"
            raise HttpError(400, "MALFORMED_REQUEST", message, {"Connection": "close"})
        needs_nothing = route.methods == PUBLIC or (route.methods == HEALTH and self._gate.has_open_health)
        is_open = route.methods != HEALTH and (needs_nothing or not self._gate.needs_key)
        self._origins.check(route.method, headers, needs_page=route.needs_page, is_open=is_open)
        if needs_nothing:
            return
        client = self._gate.identify(exchange.scope, headers, exchange.record.peer, route.methods)
        exchange.admit(client, self._service.process.admission)

    async def _request(self, path: str, exchange: "_Exchange", max_body_bytes: int) -> HttpRequest:
        """Receive the body.

        Raises:
            HttpError: It is too large, too slow, or in an unknown encoding.
            OverloadedError: Other calls use too much memory.
        """
        length = exchange.headers.get("content-length", "0")
        if length.isdigit() and int(length) > max_body_bytes:
            raise _too_large(max_body_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout_s):
                async for chunk in exchange.chunks():
                    exchange.memory.grow(BODY_COPIES * len(chunk))
                    body += chunk
                    if len(body) > max_body_bytes:
                        raise _too_large(max_body_bytes)
        except TimeoutError:
            seconds = f"{self._body_timeout_s:g} s"
            message = f"the body was not received within {seconds}: send it faster, or in several requests"
            raise HttpError(408, "REQUEST_TIMEOUT", message) from None
        exchange.record.request_bytes = len(body)
        encoding = exchange.headers.get("content-encoding", "identity").lower()
        if encoding == "gzip":
            reserved = BODY_COPIES * min(max_body_bytes, MAX_GZIP_RATIO * len(body))
            exchange.memory.grow(reserved)
            content = await self._service.process.workers.run(_gunzip, bytes(body), max_body_bytes)
            exchange.memory.shrink(reserved - BODY_COPIES * len(content))
        elif encoding == "identity":
            content = bytes(body)
        else:
            raise HttpError(
                415, "WRONG_CONTENT_ENCODING", f"{encoding[:40]!r} is not supported: use gzip, or no encoding"
            )
        exchange.request_memory = BODY_COPIES * (len(body) + len(content) * (encoding == "gzip"))
        budget = Budget(exchange.memory, None, exchange.record.metrics, JSON_CONVERSION)
        root_path = exchange.scope.get("root_path", "").rstrip("/")
        return HttpRequest(exchange.scope["method"], path, exchange.headers, content, budget, root_path)


class _DisconnectedError(Exception):
    """The client has disconnected."""


class _Exchange:
    """A request and its response, in terms of ASGI."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        headers: Mapping[str, str],
        record: RequestRecord,
        memory: Reservation,
        stall_timeout_s: float,
    ) -> None:
        self.scope = scope
        self.headers = headers
        self.record = record
        self.is_admitted = False
        self.memory = memory
        self.request_memory = 0
        self._receive = receive
        self._send = send
        self._stall_timeout_s = stall_timeout_s
        self._leaving: asyncio.Future[Message] | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body.

        Raises:
            _DisconnectedError: The client has disconnected.
        """
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _DisconnectedError
            yield message.get("body", b"")
            if not message.get("more_body"):
                return

    def admit(self, client: Client, admission: Admission) -> None:
        """Attribute the request to a client.

        Raises:
            OverloadedError: There are too many requests, or too many of this client.
        """
        self.record.client = self.memory.client = client
        admission.acquire_call(client)
        self.is_admitted = True

    async def unless_disconnected(self, awaitable: Awaitable[Result]) -> Result:
        """Return a result. If the client disconnects first, cancel it.

        Raises:
            _DisconnectedError: The client has disconnected.
        """
        if ABORT in self.scope:  # our own listener cancels this task
            return await awaitable
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._receive())
        running = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait((running, self._leaving), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise _DisconnectedError
            return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait((running,))

    def reserve_sending(self, size_bytes: int) -> None:
        """Keep only the memory that a response of this size needs until the client has read it.

        Raises:
            OverloadedError: Other calls use too much memory.
        """
        sending_bytes = SENDING_COPIES * min(size_bytes, _CHUNK_BYTES)
        if self.is_admitted:
            self.memory.shrink_to(self.request_memory + size_bytes + sending_bytes)
        elif size_bytes > _SMALL_BYTES:  # a public file, whose content is in memory anyway
            self.memory.grow(sending_bytes)

    def close(self) -> None:
        """Stop waiting for the client to disconnect."""
        if self._leaving is not None:
            self._leaving.cancel()

    async def send(self, response: HttpResponse, dialect: Dialect) -> None:
        """Send a response.

        Raises:
            TimeoutError: The client does not read it.
        """
        body = response.body
        headers = [(_REQUEST_ID, self.record.request_id.encode())]
        if response.content_type:
            headers.append((b"content-type", response.content_type.encode()))
        for name, value in {**_HEADERS, **dialect.headers, **response.headers}.items():
            headers.append((name.lower().encode(), value.encode("latin-1", "replace")))
        if isinstance(body, bytes) and response.status != 204:  # noqa: PLR2004 - no content
            headers.append((b"content-length", str(len(body)).encode()))
        head = {"type": "http.response.start", "status": response.status, "headers": headers}
        if not isinstance(body, bytes):
            await self._send_stream(head, body, dialect)
            return
        # This waits for the client to read the previous response of a connection, if requests are pipelined.
        await self._send_in_time(head)
        self.record.reply_bytes = len(body)
        if len(body) > _SMALL_BYTES:
            for start in range(0, len(body), _CHUNK_BYTES):
                await self._send_part(body[start : start + _CHUNK_BYTES])
            body = b""
        # uvicorn waits before it sends, until the client has read most of what was sent before.
        await self._send_part(body, is_last=True)

    async def _send_stream(self, head: Message, parts: AsyncGenerator[bytes], dialect: Dialect) -> None:
        """Send the parts of a body. An error is the last part."""
        async with aclosing(parts):
            await self._send_in_time(head)
            while True:
                try:
                    part = await self.unless_disconnected(anext(parts))
                except StopAsyncIteration:
                    break
                except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, _DisconnectedError):
                    raise
                except BaseException as error:  # noqa: BLE001 - as in `HttpApp._respond`
                    line = self._failed(request_error(error, self.record.method), dialect)
                    traceback.clear_frames(error.__traceback__)
                    await self._send_part(line)
                    break
                self.record.reply_bytes += len(part)
                await self._send_part(part)
        await self._send_part(b"", is_last=True)

    def _failed(self, error: errors.RequestError, dialect: Dialect) -> bytes:
        """Record the error of a stream. Return its last line."""
        self.record.fail(error)
        self.record.end(str(dialect.status(error)), error.reason)
        return encode_json(dialect.body(error)) + b"\n"

    async def _send_part(self, body: bytes, *, is_last: bool = False) -> None:
        await self._send_in_time({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _send_in_time(self, message: Message) -> None:
        async with asyncio.timeout(self._stall_timeout_s):
            await self._send(message)

    def abort(self) -> None:
        """Close the connection without sending the rest. Other ASGI servers have their own time limits."""
        abort = self.scope.get(ABORT)
        if abort is not None:
            abort()


def _gunzip(body: bytes, max_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        content = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise HttpError(400, "MALFORMED_REQUEST", f"the body is not valid gzip: {error}") from None
    if len(content) > max_bytes:
        raise _too_large(max_bytes)
    if not decompressor.eof or decompressor.unused_data:
        raise HttpError(400, "MALFORMED_REQUEST", "the body is not one complete gzip member")
    return content


def _too_large(max_bytes: int) -> HttpError:
    remedy = "omit the body" if max_bytes == MAX_UNUSED_BODY_BYTES else "send fewer or shorter texts"
    return HttpError(413, "REQUEST_TOO_LARGE", f"bodies are limited to {max_bytes} bytes: {remedy}")


def _logged_method(scope: Scope) -> str:
    method: str = scope["method"][:_MAX_METHOD]
    return method if re.fullmatch(r"[A-Z]+", method) else "-"  # not a key


def _logged_path(path: str) -> str:
    """Return a path for the log, with `*` for each part that may be a key, a name or a text."""
    parts = path[: 2 * _MAX_PATH].split("/")
    return "/".join(part if _WORD.fullmatch(part) else "*" for part in parts)[:_MAX_PATH]


def _own_path(scope: Scope) -> str:
    """Return the path without the prefix under which the application is mounted."""
    path: str = scope["path"]
    root_path = scope.get("root_path", "").rstrip("/")
    return path.removeprefix(root_path) if path.startswith(f"{root_path}/") else path


def _headers(raw: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}


def _peer(client: tuple[str, int] | None) -> str:
    if not client:
        return ""
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def request_error(error: BaseException, method: str) -> errors.RequestError:
    """Return the error for the client. Unexpected errors are logged, and the client gets only their ID."""
    if isinstance(error, errors.RequestError):
        return error
    internal = errors.InternalError(secrets.token_hex(6))
    logger.error("%s failed, error id %s", method, internal.error_id, exc_info=error)
    return internal


def _error_response(error: errors.RequestError, dialect: Dialect) -> HttpResponse:
    dialect.translate(error)
    headers = dict(getattr(error, "headers", {}))
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        headers["Retry-After-Ms"] = str(math.ceil(1000 * error.retry_after_s))
    elif error.http_status >= 500:  # noqa: PLR2004 - server errors
        headers["X-Should-Retry"] = str(isinstance(error, errors.ShuttingDownError)).lower()
    if isinstance(error, errors.UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    return HttpResponse(encode_json(dialect.body(error)), dialect.status(error), headers=headers)


async def _decline(kind: str, receive: Receive, send: Send) -> None:
    """Complete the lifespan protocol, and reject WebSockets."""
    if kind == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1002})
    while kind == "lifespan":
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
