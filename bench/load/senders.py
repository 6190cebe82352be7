"""Clients that send pre-serialized requests, and response parsing.

The load generator shares the CPU with the measured server, so requests are serialized in advance.
"""

import asyncio
import base64
import json
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb

MAX_MESSAGE_BYTES = 64 << 20


class RequestError(Exception):
    """A request failed. The message is the status."""


class Sender(Protocol):
    """One client's connection."""

    async def send(self, request: bytes) -> bytes:
        """Send a request and return the response. Raises RequestError on failure."""

    async def close(self) -> None:
        """Close the connection."""


class GrpcSender:
    """gRPC client with its own connection."""

    def __init__(self, address: str, what: str) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),  # one connection per channel
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        method = "Embed" if what == "embed" else "Encode"
        path = f"/attnlens.v1.EncoderService/{method}"
        self._call: Any = self._channel.unary_unary(path)  # no serializers: bytes in, bytes out

    async def send(self, request: bytes) -> bytes:
        try:
            reply: bytes = await self._call(request)
        except grpc.aio.AioRpcError as error:
            raise RequestError(error.code().name) from error
        return reply

    async def close(self) -> None:
        await self._channel.close()


class HttpSender:
    """Minimal HTTP/1.1 client for OpenAI's embeddings API, with a persistent connection.

    An HTTP library would use more CPU than the request itself.
    """

    def __init__(self, address: str) -> None:
        self._host, port = address.split(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=MAX_MESSAGE_BYTES)
        reader, writer = self._streams
        head = f"POST /embeddings HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(request)}\r\n\r\n".encode() + request)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        sizes = [field.split(":")[1] for field in fields if field.lower().startswith("content-length:")]
        body = await reader.readexactly(int(sizes[0]))
        if " 200 " not in status:
            raise RequestError(status)
        return body

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


def make_request(protocol: str, what: str, texts: list[str], num_layers: int) -> bytes:
    """Return a serialized request for `texts`. `http` is Infinity, `http float` and `http base64` ours."""
    if protocol == "http":
        return json.dumps({"model": "bundle", "input": texts}).encode()
    if protocol.startswith("http "):
        encoding = protocol.removeprefix("http ")
        return json.dumps({"input": texts, "encoding_format": encoding, "truncate": True}).encode()
    inputs = [pb.Input(text=text) for text in texts]
    if what == "embed":
        return pb.EmbedRequest(inputs=inputs, truncate=True).SerializeToString()
    request = pb.EncodeRequest(inputs=inputs, truncate=True)
    if what == "attention mean":
        request.attention.add(layers=[num_layers - 1], view=pb.ATTENTION_VIEW_HEAD_MEAN)
    elif what.startswith("attention"):
        request.attention.add()
    return request.SerializeToString()


def read_reply(protocol: str, what: str, reply: bytes) -> npt.NDArray[Any]:
    """Return the array in a response."""
    if protocol.startswith("http"):
        rows = [entry["embedding"] for entry in json.loads(reply)["data"]]
        if protocol == "http base64":
            return np.array([np.frombuffer(base64.b64decode(row), np.float32) for row in rows])
        return np.array(rows, dtype=np.float32)
    if what == "embed":
        return from_tensor(pb.EmbedResponse.FromString(reply).embeddings)
    [result] = pb.EncodeResponse.FromString(reply).results
    return from_tensor(result.last_hidden_state if what == "tokens" else result.attention[0].dense)
