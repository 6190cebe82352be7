"""Listens for HTTP connections on the event loop of the caller.

uvicorn parses HTTP. This module adds a limit on connections, which clients share, which counts connections
before their TLS handshake, and which closes idle ones first; a time limit for the head of a request; a limit
on small chunks; errors in JSON, which also reach clients that send a long body; a way to abort a connection
whose client does not read; request targets in absolute form; and responses to clients that close their side
of the connection after the request. `HttpApp` limits the size and the duration of bodies.

Everything runs on one event loop.
"""

import asyncio
import logging
import re
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from attnlens_server.clients import Client, client_at_host
from attnlens_server.core.admission import Pool
from attnlens_server.errors import StartupError
from attnlens_server.http_api.exchange import JSON, NATIVE, HttpError, encode_json
from attnlens_server.listening import TcpAddress
from attnlens_server.listening.bind_problems import bind_problem
from attnlens_server.listening.tcp import listen

MAX_HEAD_BYTES = 32 << 10
KEEP_ALIVE_S = 75  # longer than the idle timeout of common proxies and client pools
ABORT = "attnlens.abort"
"""Key of the ASGI scope with a function that closes the connection without sending buffered data.

If it is set, the application's task is cancelled when the client disconnects.
"""
SMALL_CONNECTIONS = 4
"""Number of connections up to which a client may use the reserve, see `Pool`."""
TLS = "attnlens.tls"
"""Key of the ASGI scope with the SSL object of the connection. None without TLS."""
MAX_SMALL_CHUNKS = 1024
_SMALL_CHUNK_BYTES = 256  # larger chunks are not limited
_LINGER_S = 2.0  # time to read the rest of a rejected body, so that the client receives the response
_POLL_S = 0.02
_PROBE_S = 0.5  # most responses are sent before, in one piece
_TLS_BUFFER_BYTES = 1 << 15  # instead of 256 KiB. A record of TLS has up to 16 KiB
_ACCEPT_PAUSE_S = 0.5  # after an error, such as too many open files
_STATUS_LINE = b"HTTP/1.1 "  # the same for all responses
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_ABSOLUTE_FORM = re.compile(rb"https?://(?P<authority>[^/?#]*)(?P<path>[^#]*).*", re.IGNORECASE)

# uvicorn logs a line for each malformed request, which clients could use to flood the log.
_unlogged = logging.getLogger(f"{__name__}.uvicorn")
_unlogged.disabled = True


class HttpListener:
    """Accepts connections for an ASGI application.

    Args:
        app: ASGI application.
        max_connections: Maximum number of open connections.
        request_timeout_s: Maximum time in seconds to receive the head of a request.

    Attributes:
        connections: Open connections.
        request_timeout_s: See above.
        idle: Connections that wait for their client, the one that has waited longest first.
        num_rejected: Number of connections that were closed at once because of the limit.
    """

    def __init__(self, app: Any, *, max_connections: int, request_timeout_s: float) -> None:  # noqa: ANN401
        self.connections = Pool(max_connections, SMALL_CONNECTIONS)
        self.request_timeout_s = request_timeout_s
        self.idle: dict[_Connection, None] = {}
        self.num_rejected = 0
        self._config = Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._config.load()
        self._state = ServerState()
        self._server: _Server | None = None

    async def start(self, address: TcpAddress, context: ssl.SSLContext | None, option: str) -> TcpAddress:
        """Listen and return the address with its port.

        Args:
            address: Address to listen on.
            context: TLS settings.
            option: Name of the option that specifies the port, for error messages.

        Raises:
            StartupError: The address cannot be bound.
        """
        try:
            sockets = await asyncio.get_running_loop().run_in_executor(None, listen, address)
        except OSError as error:
            reason = bind_problem(error, address, option)
            raise StartupError(f"cannot listen for HTTP on {address}: {reason}") from error
        if context is not None:
            SSLProtocol.max_size = _TLS_BUFFER_BYTES  # allocated for each connection
        self._server = _Server(sockets, lambda connection, sender: self._accept(connection, sender, context))
        return TcpAddress(address.host, sockets[0].getsockname()[1])

    def _accept(self, accepted: socket.socket, sender: Client, context: ssl.SSLContext | None) -> None:
        """Open a connection, unless there are too many."""
        if self.make_room(sender):
            self.connections.take(sender, 1)
            _Connection(self, self._config, self._state, sender).open(accepted, context)
        else:
            accepted.close()

    async def stop(self, timeout_s: float) -> None:
        """Reject new connections, let running requests end, and abort those that take longer."""
        if self._server is not None:
            await self._server.close()
        opening = [task for connection in self.idle if (task := connection.opening)]
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in list(self._state.connections):
            with suppress(h11.LocalProtocolError):  # in the middle of a malformed request
                connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._state.connections or self._state.tasks:  # noqa: ASYNC110 - uvicorn has no event
                    await asyncio.sleep(_POLL_S)
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in list(self._state.tasks):
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks)

    def make_room(self, client: Client) -> bool:
        """Make room for a connection of a client, if there are too many or too many of this client.

        The connection that has waited longest for its client is closed, preferably one of the same client.

        Returns:
            Whether there is room.
        """
        pool = self.connections
        if pool.available_to(client, has_other_calls=pool.held_by(client) > 0):
            return True
        others = iter(self.idle) if pool.used >= pool.capacity else iter(())
        connection = next((idle for idle in self.idle if idle.sender == client), next(others, None))
        if connection is None:
            self.num_rejected += 1
            return False
        del self.idle[connection]
        connection.abort()
        return True


class _Server:
    """Accepts connections from sockets.

    Args:
        sockets: Listening sockets.
        on_accept: Called with each connection and its sender.

    Attributes:
        sockets: See above.
    """

    def __init__(
        self, sockets: list[socket.socket], on_accept: Callable[[socket.socket, Client], None]
    ) -> None:
        self.sockets = sockets
        self._on_accept = on_accept
        self._tasks = [asyncio.create_task(self._accept(listening)) for listening in sockets]

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError:  # the client has left, or there are too many open files
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._on_accept(accepted, client_at_host(address[0]))
            await asyncio.sleep(0)  # `sock_accept` does not wait if there are further connections

    async def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self.sockets:
            listening.close()


class _Parser(h11.Connection):
    """Parser that rejects bodies in many small chunks, which would occupy the event loop.

    Attributes:
        has_small_chunks: Whether a body was rejected.
        has_begun_response: Whether `_STATUS_LINE` was sent before the rest of a response.
        sends_chunks: Whether the current response consists of chunks.
        has_head_request: Whether the current request has the method HEAD.
    """

    has_small_chunks = False
    has_begun_response = sends_chunks = has_head_request = False
    _num_chunks = _num_bytes = 0

    def send(self, event: Any) -> bytes | None:  # type: ignore[override]  # noqa: ANN401
        data: bytes | None = super().send(event)
        if isinstance(event, h11.Response) and data is not None:
            self.sends_chunks = _CHUNKED in data.lower()
            if self.has_begun_response:
                self.has_begun_response = False
                return data.removeprefix(_STATUS_LINE)
        return data

    def next_event(self) -> Any:  # noqa: ANN401 - types of h11
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            self.has_head_request = event.method == b"HEAD"
            return _in_origin_form(event)
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > MAX_SMALL_CHUNKS + self._num_bytes // _SMALL_CHUNK_BYTES:
                self.has_small_chunks = True
                raise h11.RemoteProtocolError("too many small chunks")
        return event


async def _until_readable(accepted: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(accepted, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(accepted)


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Replace a target in absolute form, and the host by that of the target (RFC 9112, section 3.2.2).

    Raises:
        h11.RemoteProtocolError: The target has no host, or credentials.
    """
    parts = _ABSOLUTE_FORM.fullmatch(request.target)
    if parts is None:
        return request
    authority, path = parts["authority"], parts["path"]
    if not authority or b"@" in authority:
        raise h11.RemoteProtocolError("the request target has no host, or credentials")
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        headers=[(b"host", authority), *headers],
        target=path if path.startswith(b"/") else b"/" + path,
        http_version=request.http_version,
    )


class _Connection(H11Protocol):
    """A connection. It is idle until a request has been received completely.

    Attributes:
        sender: Client at the address of the connection.
        opening: Task that waits for the TLS handshake. None afterwards.
    """

    conn: _Parser

    def __init__(self, listener: HttpListener, config: Config, state: ServerState, sender: Client) -> None:
        super().__init__(config, state, {})
        self.sender = sender
        self.opening: asyncio.Task[None] | None = None
        self._is_half_closed = False
        self.conn = _Parser(h11.SERVER, MAX_HEAD_BYTES)
        self.logger = _unlogged
        self.access_log = False
        self.app = self._run
        self._listener = listener
        self._application = config.loaded_app
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - types of ASGI
        scope[ABORT] = self.transport.abort
        scope[TLS] = self.transport.get_extra_info("ssl_object")
        self._task = asyncio.current_task()
        is_early = False

        async def receive_all() -> Any:  # noqa: ANN401
            message = await receive()
            if not message.get("more_body"):
                # Reading was paused if the body is large, and a disconnection would not be noticed.
                self.flow.resume_reading()
            return message

        async def send_part(message: Any) -> None:  # noqa: ANN401
            nonlocal is_early
            if self.transport.is_closing():
                await asyncio.sleep(0)  # `connection_lost` cancels this task
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and self.conn.their_state is h11.SEND_BODY:
                is_early, message = True, {**message, "more_body": True}
            await send(message)

        try:
            await self._application(scope, receive_all, send_part)
            if is_early:
                await self._discard_body(receive)
                await send({"type": "http.response.body"})
        finally:
            self._task = None

    async def _discard_body(self, receive: Any) -> None:  # noqa: ANN401
        """Read the rest of a rejected body: a client that is still sending would lose the response."""
        try:
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        except TimeoutError:
            self.transport.abort()

    def open(self, accepted: socket.socket, context: ssl.SSLContext | None) -> None:
        """Open an accepted connection, which is idle until the handshake has ended."""
        self._listener.idle[self] = None
        self.opening = self.loop.create_task(self._open(accepted, context))

    async def _open(self, accepted: socket.socket, context: ssl.SSLContext | None) -> None:
        timeout_s = self._listener.request_timeout_s
        try:
            if context is None:
                await self.loop.connect_accepted_socket(lambda: self, accepted)
                return
            async with asyncio.timeout(timeout_s):  # TLS takes memory, so it begins with the first byte
                await _until_readable(accepted)
            await self.loop.connect_accepted_socket(
                lambda: self, accepted, ssl=context, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # the handshake has failed, or took too long
            pass
        finally:
            self.opening = None
            if self.transport is None:
                accepted.close()
                self._release()

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def _release(self) -> None:
        self._listener.idle.pop(self, None)
        self._listener.connections.put_back(self.sender, 1)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and the running request."""
        self._set_timer(None)
        self._release()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse data. A request with a complete head has no time limit here."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._set_timer(None)
            if not self.cycle.more_body:
                self._listener.idle.pop(self, None)
        elif self.conn.our_state is h11.IDLE and self._timer is None:
            self._wait()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open if the client waits for a response. It sends nothing more.

        A client that has left cannot be distinguished until something is sent to it. Unless the response is
        ready soon, a part of it is sent that is always the same, see `_probe_client`.
        """
        cycle = self.cycle
        if self.scheme == "https" or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._set_timer(self.loop.call_later(_PROBE_S, self._probe_client))
        return True

    def _probe_client(self) -> None:
        """Send the first part of the head, or a zero before the size of a chunk."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.conn.has_begun_response = True
            self.transport.write(_STATUS_LINE)
        elif self.conn.sends_chunks:
            self.transport.write(b"0")
        self._check_client(_POLL_S)

    def _check_client(self, delay_s: float) -> None:
        """Close the connection once the client has answered that nobody waits for the response."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._set_timer(self.loop.call_later(delay_s, self._check_client, min(2 * delay_s, 1.0)))

    def on_response_complete(self) -> None:
        """Wait for the next request. If the connection closes, wait for the client to read the response."""
        cycle = self.cycle
        super().on_response_complete()
        if self.cycle is not cycle:
            return  # the next request has begun
        self._listener.idle.pop(self, None)
        self._listener.idle[self] = None
        self._set_timer(None)
        if self._is_half_closed:
            self.transport.close()
        if self.transport.is_closing():
            self._set_timer(self.loop.call_later(self._listener.request_timeout_s, self.transport.abort))

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if its client has not read the last response."""
        super().timeout_keep_alive_handler()
        self._set_timer(self.loop.call_later(_LINGER_S, self.transport.abort))

    def send_400_response(self, msg: str) -> None:
        """Reject a malformed request."""
        message = f"{msg.removesuffix('.')}: send HTTP/1.1"
        if self.conn.has_small_chunks:
            message = "the body has too many small chunks: send larger ones, or set Content-Length"
        self._reject(HttpError(400, "MALFORMED_REQUEST", message))

    def _wait(self) -> None:
        self._listener.idle[self] = None
        self._set_timer(self.loop.call_later(self._listener.request_timeout_s, self._time_out))

    def _time_out(self) -> None:
        seconds = f"{self._listener.request_timeout_s:g} s"
        message = f"the head of the request was not received within {seconds}: send it faster"
        self._reject(HttpError(408, "REQUEST_TIMEOUT", message))

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _reject(self, error: HttpError) -> None:
        """Send an error and close the connection. Only possible between two responses."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # discards the application's response
            self.cycle.message_event.set()
        is_head = self.conn.our_state is h11.SEND_RESPONSE and self.conn.has_head_request
        body = encode_json(NATIVE.body(error))
        head = h11.Response(
            status_code=error.http_status,
            headers=[("content-type", JSON), ("content-length", str(len(body))), ("connection", "close")],
            reason=STATUS_PHRASES[error.http_status],
        )
        for event in (head, h11.Data(data=b"" if is_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._set_timer(self.loop.call_later(_LINGER_S, self.transport.abort))
