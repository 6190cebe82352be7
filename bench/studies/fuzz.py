"""Sends mutated requests and connections to a server: `python -m bench.studies.fuzz BUNDLE`.

Real requests of each gRPC method and HTTP route are mutated, and connections of both ports. The seed is
printed, so that a run can be repeated. Requires Linux.
"""

import argparse
import asyncio
import gzip
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from attnlens.oip import open_inference_pb2 as oip
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.explanation_pb2 import (
    EXPLAIN_METHOD_CONTRIBUTIONS,
    EXPLAIN_METHOD_LEAVE_ONE_OUT,
    PAIR_MATRIX_INTERACTION,
)
from bench.servers import RunningServer, attnlens_server
from bench.studies.attackers import connect, preface, send_headers
from bench.studies.hostile_http import GOOD, answer, request
from bench.studies.proxied import HELLO, Ports, free_ports
from bench.studies.raw_http2 import RawClient, method

HTTP_SHARE = 0.3
BATCH = 50
HTTP_CLIENTS = 16
CONNECTION_S = 0.02  # time for a response to the bytes of a connection
EXPECTED_HTTP = {
    200,
    204,
    400,
    401,
    403,
    404,
    405,
    408,
    411,
    413,
    415,
    421,
    422,
    424,
    429,
    431,
    501,
    503,
    505,
}
PATHS = (
    "/v1/embeddings",
    "/embed",
    "/embed_all",
    "/tokenize",
    "/v2/embed",
    "/vectors",
    "/api/embed",
    "/page",
    "/v1/attnlens/encode",
    "/v1/attnlens/explain",
    "/v1/attnlens/encode_stream",
    "/v1/models/a",
    "/nowhere",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1e400,
    2**70,
    "",
    "a",
    "\ud800",
    [],
    [[]],
    {},
    [None],
    ["a", 1],
    "word " * 300,
)


INPUTS = [pb.Input(text="hello"), pb.Input(text_pair=pb.TextPair(first="a", second="b"))]
IDS = pb.Input(token_ids=pb.TokenIds(input_ids=[101, 7592, 102]))
TENSOR = oip.ModelInferRequest.InferInputTensor(
    name="text", datatype="BYTES", shape=[1], contents=oip.InferTensorContents(bytes_contents=[b"hello"])
)
METHODS = [EXPLAIN_METHOD_CONTRIBUTIONS, EXPLAIN_METHOD_LEAVE_ONE_OUT]
INFERENCE = "/inference.GRPCInferenceService"
REQUESTS: dict[str, list[Any]] = {
    method("Embed"): [
        pb.EmbedRequest(inputs=INPUTS, dimensions=7),
        pb.EmbedRequest(inputs=[IDS], prompt=pb.Prompt(text="query: ")),
    ],
    method("Encode"): [
        pb.EncodeRequest(inputs=INPUTS, attention=[pb.AttentionQuery(layers=[0, 5], heads=[1])]),
        pb.EncodeRequest(inputs=[IDS], last_hidden_state=True),
    ],
    method("EncodeStream"): [pb.EncodeStreamRequest(inputs=INPUTS, attention=[pb.AttentionQuery()])],
    method("Tokenize"): [pb.TokenizeRequest(inputs=INPUTS)],
    method("ListModels"): [pb.ListModelsRequest()],
    method("GetModel"): [pb.GetModelRequest(model="all-MiniLM-L6-v2")],
    method("Explain"): [
        pb.ExplainRequest(inputs=INPUTS[:1], to=INPUTS[1], methods=METHODS),
        pb.ExplainRequest(inputs=[IDS], contrast=pb.Contrast(to=INPUTS[0], rather_than=IDS)),
    ],
    method("Compare"): [
        pb.CompareRequest(
            pairs=[pb.ComparedPair(a=INPUTS[0], b=IDS)], matrix=PAIR_MATRIX_INTERACTION, methods=METHODS[:1]
        )
    ],
    method("Score"): [pb.ScoreRequest(query="a", documents=["b", "c"])],
    method("Classify"): [pb.ClassifyRequest(inputs=INPUTS)],
    f"{INFERENCE}/ModelInfer": [oip.ModelInferRequest(model_name="all-MiniLM-L6-v2", inputs=[TENSOR])],
    f"{INFERENCE}/ModelMetadata": [oip.ModelMetadataRequest(name="all-MiniLM-L6-v2")],
    f"{INFERENCE}/ModelReady": [oip.ModelReadyRequest(name="all-MiniLM-L6-v2", version="1")],
}


# --- mutations ------------------------------------------------------------------------------------


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Change, insert, repeat or remove bytes at one or two positions."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 2)):
        start = chance.randrange(len(changed) + 1)
        stop = min(len(changed), start + chance.randint(1, 8))
        match chance.randrange(6):
            case 0:
                changed[start:stop] = chance.randbytes(stop - start)
            case 1:
                del changed[start:stop]
            case 2:
                changed[start:start] = changed[start:stop] * chance.choice((1, 2, 100))
            case 3:
                changed[start:start] = b"\xff" * chance.choice((1, 4, 9)) + b"\x01"  # a long varint
            case 4:
                changed[start:stop] = chance.choice((b"\x00", b"\x7f", b"\x80", b"\xed\xa0\x80"))
            case 5:
                del changed[start:]
    return bytes(changed)


def random_request(chance: random.Random) -> bytes:
    """Return a request that is valid, slightly wrong, or wrong in its framing."""
    path = chance.choice(PATHS)
    body = dict(GOOD if chance.random() < 0.5 else {"inputs": "a", "texts": ["b"], "text": "c"})
    for _ in range(chance.randrange(3)):
        key = chance.choice(
            ["input", "inputs", "model", "dimensions", "attention", "truncate", "to", "text", "x"]
        )
        body[key] = chance.choice(VALUES)
    content = json.dumps(body).encode()
    kind = chance.randrange(8)
    if kind == 0:
        content = content[: chance.randrange(len(content))] + chance.randbytes(chance.randrange(20))
    if kind == 1:
        packed = gzip.compress(content)
        return request(
            "POST", path, packed[: len(packed) - chance.choice((0, 0, 1, 9))], "Content-Encoding: gzip"
        )
    if kind == 2:
        size = chance.choice((b"%x" % len(content), b"zz", b"-1", b"%x;a=b" % len(content), b"ffffffffffff"))
        head = request("POST", path).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        return head + size + b"\r\n" + content + b"\r\n0\r\n\r\n"
    if kind == 3:
        return request(chance.choice(["GET", "HEAD", "DELETE", "OPTIONS", "PATCH", "BREW"]), path, content)
    if kind == 4:
        headers = [f"X-{index}: {'y' * chance.randrange(2000)}" for index in range(chance.randrange(80))]
        return request("POST", path, content, *headers)
    if kind == 5:
        raw = bytearray(request("POST", path, content))
        for _ in range(chance.randrange(1, 6)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        return bytes(raw)
    return request("POST", path, content)


# --- messages -------------------------------------------------------------------------------------


@dataclass
class Found:
    """Responses and defects.

    Attributes:
        sent: Number of messages or connections.
        statuses: Number of responses by status.
        defects: Statuses that report a defect of the server, with the request in hexadecimal notation.
    """

    sent: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)


def fuzz_grpc(address: str, number: int, chance: random.Random) -> Found:
    """Send mutated messages to all methods. Every call must end with a status that names the problem."""
    found = Found()
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    seeds = [(path, each.SerializeToString()) for path, messages in REQUESTS.items() for each in messages]
    while found.sent < number:
        batch = [chance.choice(seeds) for _ in range(min(BATCH, number - found.sent))]
        mutated = [(path, mutate(message, chance)) for path, message in batch]
        with RawClient(address) as client:
            replies = [client.call(path, message) for path, message in mutated]
            client.wait_for_ends(replies)
        found.sent += len(batch)
        for (path, message), reply in zip(mutated, replies, strict=True):
            status = "no status" if reply.status is None else names[reply.status]
            found.statuses[status] += 1
            if status in {"no status", "UNKNOWN", "INTERNAL"}:
                found.defects.append(f"{path} {status} {message.hex()}")
    return found


async def fuzz_http(address: str, number: int, chance: random.Random) -> Found:
    """Send random requests from several clients at a time."""
    clients = [random.Random(chance.random()) for _ in range(HTTP_CLIENTS)]
    shares = await asyncio.gather(*(one_client(address, number // HTTP_CLIENTS, each) for each in clients))
    found = Found()
    for share in shares:
        found.sent += share.sent
        found.statuses.update(share.statuses)
        found.defects += share.defects
    return found


async def one_client(address: str, number: int, chance: random.Random) -> Found:
    """Send random requests over connections that are kept as long as the server keeps them."""
    found = Found()
    host, port = address.split(":")
    connection = None
    while found.sent < number:
        if connection is None:
            connection = await asyncio.open_connection(host, int(port), limit=64 << 20)
        reader, writer = connection
        status, sent = 0, random_request(chance)
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1.0):  # requests with wrong framing wait for more data
                writer.write(sent)
                status = await answer(reader)
        found.sent += 1
        found.statuses[str(status or "closed")] += 1
        if status not in EXPECTED_HTTP | {0}:
            found.defects.append(f"HTTP {status} {sent.hex()}")
        if status in (0, 400, 408, 431, 505) or chance.random() < 0.05:
            writer.transport.abort()
            connection = None
    if connection is not None:
        connection[1].transport.abort()
    return found


# --- connections ----------------------------------------------------------------------------------


def random_bytes(chance: random.Random) -> bytes:
    """Return random bytes, a mutated HTTP/2 connection, or a mutated HTTP/1 request."""
    kind = chance.randrange(3)
    if kind == 0:
        return chance.randbytes(chance.randrange(200))
    if kind == 1:
        http2, first = preface()
        for _ in range(chance.randint(1, 3)):
            stream = send_headers(http2)
            http2.send_data(stream, chance.randbytes(chance.randrange(60)), end_stream=True)
            if chance.random() < 0.3:
                http2.reset_stream(stream)
        frames = http2.data_to_send()
        return mutate(first + frames, chance) if chance.random() < 0.3 else first + mutate(frames, chance)
    return mutate(random_request(chance), chance)


def fuzz_connections(addresses: list[str], number: int, chance: random.Random) -> Found:
    """Send random bytes over new connections to one of the addresses, and read the first response."""
    found = Found()
    while found.sent < number:
        found.sent += 1
        outcome = "open"
        try:
            with connect(chance.choice(addresses)) as connection:
                connection.sendall(random_bytes(chance))
                connection.settimeout(CONNECTION_S)
                while outcome == "open":
                    outcome = "open" if connection.recv(1 << 16) else "closed"
        except TimeoutError:
            pass
        except ConnectionError:
            outcome = "reset"
        found.statuses[outcome] += 1
    return found


def fuzz(
    bundle: Path, num_messages: int, num_connections: int, seed: int
) -> Iterator[tuple[str, Found, list[str]]]:
    """Fuzz a new server. Yield the name of each part, its responses, and defects of the server afterwards."""
    http_messages = int(HTTP_SHARE * num_messages)
    with tempfile.TemporaryDirectory() as directory:
        ports, log = Ports(*free_ports(3)), Path(directory) / "server.log"
        http_address = f"127.0.0.1:{ports.http}"
        with attnlens_server(bundle, "fp32", 0, log, *ports.options) as server:
            expected = vector(server)
            addresses = [server.address, http_address]
            parts: dict[str, Callable[[random.Random], Found]] = {
                "gRPC messages": lambda chance: fuzz_grpc(
                    server.address, num_messages - http_messages, chance
                ),
                "HTTP requests": lambda chance: asyncio.run(fuzz_http(http_address, http_messages, chance)),
                "connections": lambda chance: fuzz_connections(addresses, num_connections, chance),
            }
            for name, run in parts.items():
                found = run(random.Random(f"{seed} {name}"))
                defects = [] if vector(server) == expected else ["wrong vector"]
                content = log.read_text("utf-8")
                defects += ["traceback in the log"] * content.count("Traceback")
                yield name, found, found.defects + defects


def vector(server: RunningServer) -> bytes:
    """Embed one text. Raises RpcError if the server does not answer within a minute."""
    with grpc.insecure_channel(server.address) as channel:
        return EncoderServiceStub(channel).Embed(HELLO, timeout=60).embeddings.data


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.fuzz", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    options = parser.parse_args()
    print(
        f"seed {options.seed}\n| part | sent | defects | seconds | responses |\n|---|---|---|---|---|",
        flush=True,
    )
    all_defects = []
    started = time.monotonic()
    for name, found, defects in fuzz(options.bundle, options.messages, options.connections, options.seed):
        counted = ", ".join(f"{number:,} {status}" for status, number in found.statuses.most_common())
        elapsed = time.monotonic() - started
        print(f"| {name} | {found.sent:,} | {len(defects)} | {elapsed:.0f} | {counted} |", flush=True)
        all_defects += defects
        started = time.monotonic()
    print(*all_defects[:20], sep="\n")
    sys.exit(bool(all_defects))


if __name__ == "__main__":
    main()
