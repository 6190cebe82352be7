"""Senders of requests that are bytes already, and readers of replies.

The load generator shares the machine with the measured server, so it builds no messages while it measures.
"""

import asyncio
import json
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt

from attnlens.tensors import from_tensor
from attnlens.v1 import encoder_service_pb2 as pb

MAX_MESSAGE_BYTES = 64 << 20


class RequestError(Exception):
    """A request was refused or failed; the message is the status."""


class Sender(Protocol):
    """One client's connection."""

    async def send(self, request: bytes) -> bytes:
        """Send a request, return the reply; raises RequestError."""

    async def close(self) -> None:
        """Close the connection."""


class GrpcSender:
    """A channel of its own to attnlens."""

    def __init__(self, address: str, what: str) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),  # else all channels of a process share a connection
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        method = "Embed" if what == "embed" else "Encode"
        path = f"/attnlens.v1.EncoderService/{method}"
        self._call: Any = self._channel.unary_unary(path)  # without serializers: bytes to bytes

    async def send(self, request: bytes) -> bytes:
        """See Sender."""
        try:
            reply: bytes = await self._call(request)
        except grpc.aio.AioRpcError as error:
            raise RequestError(error.code().name) from error
        return reply

    async def close(self) -> None:
        """See Sender."""
        await self._channel.close()


class HttpSender:
    """A kept connection to Infinity: HTTP/1.1 without a library, which would cost more than the request."""

    def __init__(self, address: str) -> None:
        self._host, port = address.split(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes) -> bytes:
        """See Sender."""
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
        """See Sender."""
        if self._streams is not None:
            self._streams[1].close()


def make_request(protocol: str, what: str, texts: list[str], num_layers: int) -> bytes:
    """Return the bytes of a request for these texts."""
    if protocol == "http":
        return json.dumps({"model": "bundle", "input": texts}).encode()
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
    """Return the numbers of a reply."""
    if protocol == "http":
        return np.array([entry["embedding"] for entry in json.loads(reply)["data"]], dtype=np.float32)
    if what == "embed":
        return from_tensor(pb.EmbedResponse.FromString(reply).embeddings)
    [result] = pb.EncodeResponse.FromString(reply).results
    return from_tensor(result.last_hidden_state if what == "tokens" else result.attention[0].dense)
