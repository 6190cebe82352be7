"""A client that opens streams and resets them immediately: few of them reach Python."""

import socket
import struct
from pathlib import Path
from typing import Any

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import PingAckReceived

from attnlens_server.config import ServerConfig
from attnlens_server.server import MAX_STREAMS, _channel_options

NUM_STREAMS = 2000


def reset_streams(port: int) -> None:
    """Send complete calls, each followed by a reset, and return once the server has read all of them."""
    http2 = H2Connection(H2Configuration(header_encoding="utf-8"))
    http2.initiate_connection()
    headers = {":method": "POST", ":scheme": "http", ":path": "/service/Method", ":authority": "here"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for _ in range(NUM_STREAMS):
            stream = http2.get_next_available_stream_id()
            http2.send_headers(stream, list(headers.items()))
            http2.send_data(stream, struct.pack(">BI", 0, 0), end_stream=True)
            http2.reset_stream(stream)
        http2.ping(b"all read")
        connection.sendall(http2.data_to_send())
        while not any(
            isinstance(event, PingAckReceived) for event in http2.receive_data(connection.recv(65536))
        ):
            pass


class Service(grpc.GenericRpcHandler):
    """A service that counts the calls processed by the event loop."""

    def __init__(self) -> None:
        self.num_calls = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        del handler_call_details
        self.num_calls += 1
        answer: Any = self.answer
        return grpc.unary_unary_rpc_method_handler(answer)

    async def answer(self, request: bytes, context: object) -> bytes:
        del context
        return request


async def test_few_of_thousands_of_reset_streams_reach_python() -> None:
    service = Service()
    server = grpc.aio.server(options=_channel_options(ServerConfig(bundle=Path())))
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reset_streams(port)  # keeps the event loop busy, as other calls would
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/service/Method")
        assert await call(b"a", timeout=60) == b"a"
    await server.stop(None)
    assert service.num_calls <= 2 * MAX_STREAMS, service.num_calls
