"""Low-level gRPC client on top of HTTP/2 frames, for requests that a gRPC library cannot send.

It can withhold flow control, send malformed or compressed messages, and disconnect at any time. It uses one
socket and no threads; frames are only read while a method runs.
"""

import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.settings import SettingCodes

LARGEST_WINDOW_BYTES = (1 << 31) - 1
DEADLINE_S = 60.0
READ_BYTES = 1 << 16


@dataclass
class Reply:
    """Response data received so far for one call.

    Attributes:
        headers: Response headers and trailers.
        data: gRPC frames, each with a compression flag, a length and a message.
        reset: HTTP/2 error code if the server reset the stream.
        ended: Whether the stream has ended.
    """

    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    reset: int | None = None
    ended: bool = False

    @property
    def status(self) -> int | None:
        """Status code of the call, or None before the trailers."""
        status = self.headers.get("grpc-status")
        return None if status is None else int(status)

    @property
    def reason(self) -> str:
        """Name of the attnlens ErrorReason, or an empty string."""
        return self.headers.get("attnlens-error-reason", "")


class RawClient:
    """A connection with a flow control window of `window_bytes` per stream."""

    def __init__(self, address: str, window_bytes: int = LARGEST_WINDOW_BYTES, source: str = "") -> None:
        """Connect from the address `source` and send the HTTP/2 preface.

        Raises:
            OSError: The connection fails.
        """
        host, port = address.rsplit(":", 1)
        self._authority = address
        self._socket = socket.create_connection(
            (host, int(port)), timeout=DEADLINE_S, source_address=(source, 0)
        )
        self._http2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._http2.initiate_connection()
        self._http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window_bytes})
        self._http2.increment_flow_control_window(LARGEST_WINDOW_BYTES - READ_BYTES)
        self._replies: dict[int, Reply] = {}
        self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket without an HTTP/2 GOAWAY."""
        self._socket.close()

    def call(
        self,
        path: str | bytes,
        message: bytes,
        *,
        headers: Sequence[tuple[str, str]] = (),
        is_compressed: bool = False,
        announced_bytes: int | None = None,
    ) -> Reply:
        """Send a request and return its reply, which is filled as frames are read.

        Args:
            path: Path in the form `/SERVICE/METHOD`, as bytes if it is not UTF-8.
            message: Serialized message.
            headers: Additional headers.
            is_compressed: Value of the compression flag.
            announced_bytes: Declared length. If it exceeds the message, the request stays incomplete.
        """
        length = len(message) if announced_bytes is None else announced_bytes
        body = struct.pack(">BI", is_compressed, length) + message
        stream = self._http2.get_next_available_stream_id()
        reply = self._replies[stream] = Reply()
        fixed: dict[str, str | bytes] = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": self._authority,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        self._http2.send_headers(stream, [*fixed.items(), *headers])
        is_whole = length == len(message)
        while body and not reply.ended:
            available = self._http2.local_flow_control_window(stream)
            if available == 0:
                self._receive(time.monotonic() + DEADLINE_S)
                continue
            size = min(len(body), available, self._http2.max_outbound_frame_size)
            self._http2.send_data(stream, body[:size], end_stream=is_whole and size == len(body))
            body = body[size:]
            self._flush()
        return reply

    def allow(self, window_bytes: int) -> None:
        """Set the flow control window of current and future streams."""
        self._http2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window_bytes})
        self._flush()

    def wait_for_heads(self, replies: Iterable[Reply], timeout_s: float = DEADLINE_S) -> None:
        """Wait until each reply has headers or has ended.

        Raises:
            TimeoutError: If `timeout_s` passes.
            ConnectionError: If the server closes the connection.
        """
        end = time.monotonic() + timeout_s
        for reply in replies:
            while not (reply.headers or reply.ended):
                self._receive(end)

    def wait_for_ends(self, replies: Iterable[Reply], timeout_s: float = DEADLINE_S) -> None:
        """Wait until each reply has ended. Raises the same errors as `wait_for_heads`."""
        end = time.monotonic() + timeout_s
        for reply in replies:
            while not reply.ended:
                self._receive(end)

    def _receive(self, end: float) -> None:
        remaining = end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out while waiting for a reply")
        self._socket.settimeout(remaining)
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the server closed the connection")
        for event in self._http2.receive_data(data):
            self._on(event)
        self._flush()

    def _on(self, event: Event) -> None:
        match event:
            case ResponseReceived() | TrailersReceived():
                reply = self._replies[event.stream_id]
                reply.headers |= {str(name): str(value) for name, value in event.headers}
            case DataReceived():
                self._replies[event.stream_id].data += event.data
                self._http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case StreamReset():
                reply = self._replies[event.stream_id]
                reply.reset, reply.ended = int(event.error_code), True
            case StreamEnded():
                self._replies[event.stream_id].ended = True

    def _flush(self) -> None:
        self._socket.settimeout(DEADLINE_S)
        self._socket.sendall(self._http2.data_to_send())


def method(name: str) -> str:
    """Return the path of an attnlens method."""
    return f"/attnlens.v1.EncoderService/{name}"


def repeated_field(number: int, content: bytes) -> bytes:
    """Serialize a length-delimited protobuf field."""
    length, prefix = len(content), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | 2, *prefix, length]) + content
