"""Clients of the soak test. Each role is a process with several threads.

A role prints its counts as JSON when it ends.
"""

import argparse
import base64
import hashlib
import http.client
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens.v1.explanation_pb2 import EXPLAIN_METHOD_LEAVE_ONE_OUT, PAIR_MATRIX_INPUT
from bench.studies.attackers import ATTACKS
from bench.studies.fuzz import random_request
from bench.studies.raw_http2 import RawClient, method

ANSWER_S = 60.0  # a good client's answer that takes longer is lost
UNEXPECTED = {"UNKNOWN", "INTERNAL", "500", "502", "504"}
EXPLANATION_TOLERANCE = 1e-6
RETRYABLE = {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "429", "503"}
METHODS = [
    "Embed",
    "Encode",
    "EncodeStream",
    "Tokenize",
    "Explain",
    "Compare",
    "Score",
    "Classify",
    "GetModel",
]
TEXTS = [
    *("hello", "It rained all day.", "A man is playing a guitar on the stage.", "attention " * 60),
    *(f"Sentence {index} has {'many ' * index}words." for index in range(28)),
]
LONG = pb.Input(text="word " * 250)
STREAM = pb.EncodeStreamRequest(inputs=[LONG] * 4, attention=[pb.AttentionQuery()]).SerializeToString()
OPTIONS = [("grpc.enable_retries", 0), ("grpc.max_receive_message_length", -1)]


@dataclass
class Counts:
    """Outcome of the requests of one role.

    Attributes:
        requests: Number of requests, connections or frames.
        wrong: Number of answers that differ from the answer computed alone.
        lost: Number of requests of good clients without an answer within ANSWER_S.
        statuses: Number of responses by status.
    """

    requests: int = 0
    wrong: int = 0
    lost: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Counts") -> None:
        self.requests += other.requests
        self.wrong += other.wrong
        self.lost += other.lost
        self.statuses.update(other.statuses)

    @property
    def unexpected(self) -> int:
        """Number of responses that report a defect of the server."""
        return sum(number for status, number in self.statuses.items() if status in UNEXPECTED)


@dataclass(frozen=True)
class Role:
    """Arguments of one thread."""

    grpc_address: str
    http_address: str
    end: float
    chance: random.Random
    expected: dict[str, str]
    counts: Counts
    key: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Credentials, as metadata of gRPC calls and headers of HTTP requests."""
        return credentials(self.key)

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json", **dict(self.metadata)}

    @property
    def runs(self) -> bool:
        return time.monotonic() < self.end


def credentials(key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call. An empty key stands for none."""
    return (("authorization", f"Bearer {key}"),) if key else ()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


# --- good clients ---------------------------------------------------------------------------------


def grpc_answer(stub: EncoderServiceStub, name: str, index: int, key: str) -> str:
    """Return the digest of the response for one text. Raises RpcError."""
    options: dict[str, Any] = {"timeout": ANSWER_S, "metadata": credentials(key)}
    inputs = [pb.Input(text=TEXTS[index])]
    if name == "Embed":
        return digest(stub.Embed(pb.EmbedRequest(inputs=inputs), **options).embeddings.data)
    if name == "EncodeStream":
        stream = stub.EncodeStream(
            pb.EncodeStreamRequest(inputs=inputs * 3, last_hidden_state=True), **options
        )
        return digest(b"".join(without_timings(part) for part in stream))
    response: Any
    if name == "Encode":
        request = pb.EncodeRequest(inputs=inputs, attention=[pb.AttentionQuery(layers=[1])])
        response = stub.Encode(request, **options)
    elif name == "Explain":
        response = stub.Explain(pb.ExplainRequest(inputs=inputs), **options)
        return json.dumps(MessageToDict(response.results[0]), sort_keys=True)
    else:
        response = stub.Tokenize(pb.TokenizeRequest(inputs=inputs), **options)
    return digest(without_timings(response))


def is_same(received: Any, expected: Any) -> bool:  # noqa: ANN401 - JSON values
    """Return whether two answers are equal. The numbers of an explanation may differ in the last digits.

    On some processors, they depend on the batch (docs/protocol.md).
    """
    if isinstance(expected, dict) and isinstance(received, dict):
        return expected.keys() == received.keys() and all(
            close_tensors(received[name], value) if name == "data" else is_same(received[name], value)
            for name, value in expected.items()
        )
    if isinstance(expected, list) and isinstance(received, list):
        return len(expected) == len(received) and all(map(is_same, received, expected))
    if isinstance(expected, float) and isinstance(received, float | int):
        return abs(received - expected) <= EXPLANATION_TOLERANCE
    if isinstance(expected, str) and expected.startswith("{"):
        return received.startswith("{") and is_same(json.loads(received), json.loads(expected))
    return bool(received == expected)


def close_tensors(received: str, expected: str) -> bool:
    """Compare the data of two fp32 tensors, in base64."""
    if len(received) != len(expected):
        return False
    first, second = (np.frombuffer(base64.b64decode(data), "<f4") for data in (received, expected))
    return np.allclose(first, second, rtol=0, atol=EXPLANATION_TOLERANCE)


def without_timings(response: Message) -> bytes:
    """Serialize a response without the field that differs from call to call."""
    if "timings" in response.DESCRIPTOR.fields_by_name:
        response.ClearField("timings")
    return response.SerializeToString(deterministic=True)


def http_answer(
    connection: http.client.HTTPConnection, index: int, headers: dict[str, str]
) -> tuple[str, str]:
    """Return the status and the digest of the vector of one text."""
    body = json.dumps({"input": TEXTS[index]})
    connection.request("POST", "/v1/embeddings", body, headers)
    with connection.getresponse() as response:
        content = response.read()
    if response.status != http.HTTPStatus.OK:
        return str(response.status), ""
    vector = json.loads(content)["data"][0]["embedding"]
    return "200", digest(np.array(vector, "<f4").tobytes())


GOOD_METHODS = ["Embed", "Embed", "Embed", "Encode", "EncodeStream", "Tokenize", "Explain"]


def compute_expected(address: str, key: str) -> dict[str, str]:
    """Compute every answer of the good clients while no other client runs."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        stub = EncoderServiceStub(channel)
        names = sorted(set(GOOD_METHODS))
        return {
            f"{name} {index}": grpc_answer(stub, name, index, key)
            for name in names
            for index in range(len(TEXTS))
        }


def good_grpc(role: Role) -> None:
    """Send requests of all kinds, retry those that are rejected, and compare the answers."""
    with grpc.insecure_channel(role.grpc_address, options=OPTIONS) as channel:
        stub = EncoderServiceStub(channel)
        while role.runs:
            name, index = role.chance.choice(GOOD_METHODS), role.chance.randrange(len(TEXTS))

            def attempt(name: str = name, index: int = index) -> tuple[str, str]:
                try:
                    return "OK", grpc_answer(stub, name, index, role.key)
                except grpc.RpcError as error:
                    return status_of(error), ""

            answer(role, f"{name} {index}", attempt)


def good_http(role: Role) -> None:
    """The same over HTTP, for embeddings."""
    connection = http.client.HTTPConnection(role.http_address, timeout=ANSWER_S)
    while role.runs:
        index = role.chance.randrange(len(TEXTS))

        def attempt(index: int = index) -> tuple[str, str]:
            try:
                return http_answer(connection, index, role.headers)
            except (OSError, http.client.HTTPException) as error:  # the server closes idle connections
                connection.close()
                return ("timeout" if isinstance(error, TimeoutError) else "503"), ""

        answer(role, f"Embed {index}", attempt)
    connection.close()


def answer(role: Role, what: str, attempt: Callable[[], tuple[str, str]]) -> None:
    """Retry a request until it has an answer, and compare it."""
    expected = role.expected[what]
    role.counts.requests += 1
    give_up = time.monotonic() + ANSWER_S
    while True:
        status, received = attempt()
        role.counts.statuses[status] += 1
        if status in {"OK", "200"}:
            if not is_same(received, expected):
                role.counts.wrong += 1
                print(f"wrong: {what}, {received}, expected {expected}", file=sys.stderr)
            return
        if status not in RETRYABLE or time.monotonic() > give_up:
            role.counts.lost += 1
            print(f"lost: {what}, {status}", file=sys.stderr)
            return
        time.sleep(0.05 + 0.2 * role.chance.random())


def status_of(error: grpc.RpcError) -> str:
    """Return the name of the status of a failed call."""
    assert isinstance(error, grpc.Call)
    return error.code().name


# --- bad clients ----------------------------------------------------------------------------------


def stalled(role: Role) -> None:
    """Request streams and large responses, and read none of them for a while."""
    while role.runs:
        with suppress(OSError):
            with RawClient(role.grpc_address, window_bytes=0) as client:
                replies = [
                    client.call(method("EncodeStream"), STREAM, headers=role.metadata) for _ in range(2)
                ]
                with suppress(TimeoutError):
                    client.wait_for_ends(replies, min(3.0, max(0.1, role.end - time.monotonic())))
                count(role, [reply.status for reply in replies])
            connection = http.client.HTTPConnection(role.http_address, timeout=2)
            heavy = {"inputs": ["word " * 250], "attention": [{}], "truncate": True}
            connection.request("POST", "/v1/attnlens/encode", json.dumps(heavy), role.headers)
            time.sleep(role.chance.random())
            connection.close()


def cancelled(role: Role) -> None:
    """Cancel calls while they wait, run or respond."""
    many_words = json.dumps({"input": ["word " * 200] * 8})
    layer = [pb.AttentionQuery(layers=[0])]
    requests = [
        ("Encode", pb.EncodeRequest(inputs=[LONG], attention=layer)),
        ("Embed", pb.EmbedRequest(inputs=[LONG] * 8)),
        ("Explain", pb.ExplainRequest(inputs=[LONG])),
    ]
    with grpc.insecure_channel(role.grpc_address, options=OPTIONS) as channel:
        stub = EncoderServiceStub(channel)
        while role.runs:
            calls: list[Any] = [
                getattr(stub, name).future(request, metadata=role.metadata) for name, request in requests
            ]
            time.sleep(0.1 * role.chance.random())
            for call in calls:
                call.cancel()
            role.counts.requests += len(calls)
            role.counts.statuses.update(call.code().name for call in calls if call.done())
            connection = http.client.HTTPConnection(role.http_address, timeout=2)
            with suppress(OSError):
                connection.request("POST", "/v1/embeddings", many_words, role.headers)
                time.sleep(0.05 * role.chance.random())
            connection.close()


def oversized(role: Role) -> None:
    """Send requests beyond each limit."""
    requests = [
        ("Embed", pb.EmbedRequest(inputs=[pb.Input(text="a")] * 5000).SerializeToString()),
        ("Embed", pb.EmbedRequest(inputs=[pb.Input(text="word " * 27_000)]).SerializeToString()),
        ("Embed", pb.EmbedRequest(inputs=[pb.Input(text="word " * 20_000)] * 40).SerializeToString()),
        ("Encode", b"\x12\x00" * (4 << 20)),
        ("Tokenize", b"\x00" * (40 << 20)),
    ]
    while role.runs:
        name, message = role.chance.choice(requests)
        with suppress(OSError), RawClient(role.grpc_address) as client:
            reply = client.call(method(name), message, headers=role.metadata)
            client.wait_for_ends([reply], 30)
            count(role, [reply.status])
        connection = http.client.HTTPConnection(role.http_address, timeout=30)
        with suppress(OSError, http.client.HTTPException):
            body = b'{"input": "' + b"a" * (8 << 20) + b'"}'
            connection.request("POST", "/v1/embeddings", body, role.headers)
            role.counts.statuses[str(connection.getresponse().status)] += 1
        connection.close()
        time.sleep(0.1)


def malformed(role: Role) -> None:
    """Send messages of random bytes, and random HTTP requests."""
    while role.runs:
        with suppress(OSError), RawClient(role.grpc_address) as client:
            names = [role.chance.choice(METHODS) for _ in range(20)]
            replies = [
                client.call(
                    method(name), role.chance.randbytes(role.chance.randrange(60)), headers=role.metadata
                )
                for name in names
            ]
            client.wait_for_ends(replies, 30)
            count(role, [reply.status for reply in replies])
        connection = http.client.HTTPConnection(role.http_address, timeout=1)
        with suppress(OSError, http.client.HTTPException):
            connection.connect()
            connection.sock.sendall(random_request(role.chance))
            head = connection.sock.recv(100)
            if head:
                count(role, [])
                role.counts.requests += 1
                role.counts.statuses[head.split(b" ")[1].decode("latin-1")] += 1
        connection.close()
        time.sleep(0.02)


def heavy(role: Role) -> None:
    """Send expensive legal requests, one after another."""
    pair = pb.ComparedPair(a=LONG, b=LONG)
    requests: list[tuple[str, Any]] = [
        ("Encode", pb.EncodeRequest(inputs=[LONG], attention=[pb.AttentionQuery()])),
        ("Embed", pb.EmbedRequest(inputs=[LONG] * 256)),
        ("Explain", pb.ExplainRequest(inputs=[LONG], methods=[EXPLAIN_METHOD_LEAVE_ONE_OUT])),
        ("Compare", pb.CompareRequest(pairs=[pair], matrix=PAIR_MATRIX_INPUT)),
    ]
    with grpc.insecure_channel(role.grpc_address, options=OPTIONS) as channel:
        stub = EncoderServiceStub(channel)
        while role.runs:
            name, request = role.chance.choice(requests)
            role.counts.requests += 1
            try:
                timeout_s = max(1.0, role.end - time.monotonic())
                getattr(stub, name)(request, timeout=timeout_s, metadata=role.metadata)
                role.counts.statuses["OK"] += 1
            except grpc.RpcError as error:
                role.counts.statuses[status_of(error)] += 1
                time.sleep(0.1)


def unauthenticated(role: Role) -> None:
    """Send requests without a key, and with an invalid one. An answer is wrong."""
    request = pb.EmbedRequest(inputs=[pb.Input(text="hello")])
    with grpc.insecure_channel(role.grpc_address, options=OPTIONS) as channel:
        stub = EncoderServiceStub(channel)
        while role.runs:
            stolen = role.chance.choice(["", "a", "attnlens_" + "0" * 43])
            status = "OK"
            try:
                stub.Embed(request, timeout=30, metadata=credentials(stolen))
            except grpc.RpcError as error:
                status = status_of(error)
            connection = http.client.HTTPConnection(role.http_address, timeout=30)
            headers = dict(credentials(stolen))
            http_status = "503"
            with suppress(OSError, http.client.HTTPException):
                connection.request("POST", "/v1/embeddings", '{"input": "hello"}', headers)
                http_status = str(connection.getresponse().status)
            connection.close()
            role.counts.requests += 2
            role.counts.statuses.update((status, http_status))
            role.counts.wrong += (status == "OK") + (http_status == "200")
            time.sleep(0.02)


def count(role: Role, codes: Iterable[int | None]) -> None:
    """Count calls by status. None means that no response was awaited."""
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    for code in codes:
        role.counts.requests += 1
        if code is not None:
            role.counts.statuses[names[code]] += 1


def attack(name: str) -> Callable[[Role], None]:
    """Return the role of an attack at the level of connections, on both ports."""

    def run(role: Role) -> None:
        address = role.chance.choice([role.grpc_address, role.http_address])
        address = role.grpc_address if "connections" not in name else address
        role.counts.requests += ATTACKS[name](address, role.end, role.chance)

    return run


ROLES: dict[str, tuple[Callable[[Role], None], int]] = {
    "good, gRPC": (good_grpc, 12),
    "good, HTTP": (good_http, 12),
    "stalled readers": (stalled, 8),
    "cancelled": (cancelled, 6),
    "oversized": (oversized, 4),
    "malformed": (malformed, 6),
    "heavy": (heavy, 8),
    "unauthenticated": (unauthenticated, 4),
    **{name: (attack(name), 2 if name == "silent connections" else 1) for name in ATTACKS},
}
"""Functions and numbers of threads by role."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("role", "grpc_address", "http_address"):
        parser.add_argument(name)
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("facts", type=Path, help="Expected results, and the key of each role.")
    options = parser.parse_args()
    run = ROLES[options.role][0]
    if not options.role.startswith("good"):
        os.nice(15)  # leaves processor time to the server and its good clients
    facts = json.loads(options.facts.read_text("utf-8"))
    end = time.monotonic() + options.seconds
    roles = [
        Role(
            grpc_address=options.grpc_address,
            http_address=options.http_address,
            end=end,
            chance=random.Random(f"{options.seed} {options.role} {index}"),
            expected=facts["expected"],
            counts=Counts(),
            key=facts["keys"][options.role],
        )
        for index in range(options.threads)
    ]
    threads = [threading.Thread(target=run, args=[role]) for role in roles]
    for thread in threads:
        thread.start()
    total = Counts()
    for thread, role in zip(threads, roles, strict=True):
        thread.join()
        total.add(role.counts)
    print(json.dumps(vars(total)))


if __name__ == "__main__":
    main()
