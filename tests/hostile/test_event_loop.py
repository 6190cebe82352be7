"""The event loop only awaits: no request, however large, occupies it for long."""

import gzip
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from attnlens.oip import open_inference_pb2 as oip
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1 import explanation_pb2 as explanations
from bench.studies.raw_http2 import RawClient, method, repeated_field
from hostile.watched_server import WatchedServer

MANY = 2048
ENCODER, INFERENCE = pb.DESCRIPTOR.services_by_name["EncoderService"], oip.DESCRIPTOR.services_by_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
SERVICES = (ENCODER, INFERENCE["GRPCInferenceService"], HEALTH)
METHODS = {method.name: method for service in SERVICES for method in service.methods}
ENTRY = b"\x00"  # an empty message
UNKNOWN_FIELDS = b"\xa8\x3e\x00"  # field 1,000 with the value 0
SMALL_BYTES = 65_000  # parsed on the event loop
LARGE_BYTES = 5 << 20
MAX_P99_S, INTERVAL_S, ATTACK_S = 0.25, 0.01, 10.0
CALL_S = 2.0  # enough to compute the first results


def texts(count: int, text: str = "hi") -> list[pb.Input]:
    return [pb.Input(text=text)] * count


WORDS = pb.AttentionReduction(level=pb.ATTENTION_LEVEL_WORDS, top_k=pb.TopK(k=1))
QUERIES = [pb.AttentionQuery(reduction=WORDS)] * 16
SHORT_PAIRS = [pb.ComparedPair(a=pb.Input(text="hi"), b=pb.Input(text="a b"))] * MANY
DOCUMENTS = [f"document {number}" for number in range(MANY)]
LEAVE_ONE_OUT = [explanations.EXPLAIN_METHOD_LEAVE_ONE_OUT]
TEXTS = oip.ModelInferRequest.InferInputTensor(
    name="text",
    datatype="BYTES",
    shape=[MANY],
    contents=oip.InferTensorContents(bytes_contents=[b"hi"] * MANY),
)
TEXT_TENSOR = oip.ModelInferRequest(
    inputs=[TEXTS],
    outputs=[
        oip.ModelInferRequest.InferRequestedOutputTensor(name=name)
        for name in ("sentence_embedding", "contributions", "attentions.0", "attentions.5")
    ],
)
LARGEST: dict[str, list[Any]] = {
    "Embed": [pb.EmbedRequest(inputs=texts(MANY))],
    "Encode": [
        pb.EncodeRequest(inputs=texts(MANY), attention=QUERIES),
        pb.EncodeRequest(inputs=texts(200), attention=QUERIES),
        pb.EncodeRequest(inputs=texts(MANY), last_hidden_state=True),
    ],
    "EncodeStream": [
        pb.EncodeStreamRequest(inputs=texts(MANY), attention=QUERIES),
        pb.EncodeStreamRequest(inputs=texts(MANY, "a b c d e f"), attention=[pb.AttentionQuery()] * 16),
    ],
    "Tokenize": [pb.TokenizeRequest(inputs=texts(MANY)), pb.TokenizeRequest(inputs=texts(1, "!" * 131_072))],
    "Explain": [
        pb.ExplainRequest(inputs=texts(MANY), head_contributions=True),
        pb.ExplainRequest(inputs=texts(MANY, "a b c d e f g h i j k l"), methods=LEAVE_ONE_OUT),
        pb.ExplainRequest(inputs=texts(250, "word " * 254), methods=LEAVE_ONE_OUT),
    ],
    "Compare": [
        pb.CompareRequest(pairs=SHORT_PAIRS),
        pb.CompareRequest(pairs=SHORT_PAIRS, matrix=explanations.PAIR_MATRIX_INTERACTION),
    ],
    "Score": [
        pb.ScoreRequest(query="who?", documents=DOCUMENTS, explanation=pb.ScoreExplanation()),
        pb.ScoreRequest(
            query="who?",
            documents=["a b c d e f"] * MANY,
            long_documents=pb.LONG_DOCUMENTS_SPLIT,
            max_tokens_per_document=1,
        ),
    ],
    "Classify": [pb.ClassifyRequest(inputs=texts(MANY))],
    "ModelInfer": [TEXT_TENSOR],
}
"""Legal requests that are expensive for their size. The other methods take a name or nothing."""
FIELDS = {
    "/": "inputs",
    "/api/embed": "input",
    "/classify": "input",
    "/decode": "ids",
    "/embed": "inputs",
    "/embed_all": "inputs",
    "/embed_sparse": "inputs",
    "/embeddings": "input",
    "/page": "text",
    "/predict": "inputs",
    "/rerank": "texts",
    "/score": "text_2",
    "/similarity": "inputs",
    "/tokenize": "inputs",
    "/v1/attnlens/compare": "pairs",
    "/v1/attnlens/score": "documents",
    "/v1/embeddings": "input",
    "/v1/rerank": "documents",
    "/v1/score": "text_2",
    "/v2/embed": "texts",
    "/v2/rerank": "documents",
    "/vectors": "texts",
} | {
    f"/v1/attnlens/{name}": "inputs"
    for name in ("attention", "classify", "embed", "encode", "encode_stream", "explain", "tokenize")
}
"""The field with the texts of each route."""


class Watched:
    """A watched server and its clients."""

    def __init__(self, server: WatchedServer, channel: grpc.Channel) -> None:
        self.server = server
        self.netloc = urlsplit(server.http_url()).netloc
        self._channel = channel

    def call(self, name: str, message: bytes) -> None:
        """Call a method, and cancel it after its first parts or CALL_S."""
        called = METHODS[name]
        path = f"/{called.containing_service.full_name}/{name}"
        with suppress(grpc.RpcError):
            if called.server_streaming:
                start: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(path)
                stream = start(message, timeout=CALL_S)
                for _ in islice(stream, 20 if name == "EncodeStream" else 1):
                    pass
                stream.cancel()
            else:
                call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(path)
                call(message, timeout=CALL_S)

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        """Return the status and the body of the response."""
        connection = http.client.HTTPConnection(self.netloc, timeout=60)
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, content

    def check(self, request: str) -> None:
        """Check that no callback was slow. The health check runs after all callbacks of the request."""
        self.call("Check", b"")
        slow = self.server.slow_callbacks
        self.server.forget()
        assert slow == [], request


@pytest.fixture(scope="module")
def watched(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    report = tmp_path_factory.mktemp("watched") / "report"
    options = [("grpc.max_receive_message_length", -1)]
    with (
        WatchedServer(minilm_bundle, report, "--http-port", "0") as server,
        grpc.insecure_channel(server.address, options=options) as channel,
    ):
        watched = Watched(server, channel)
        for name in ("Encode", "Explain"):  # opens their graphs
            watched.call(name, pb.EncodeRequest(inputs=texts(1)).SerializeToString())
        server.forget()
        yield watched


@pytest.mark.parametrize(
    "name", ["Embed", "Encode", "EncodeStream", "Tokenize", "Explain", "Compare", "ModelInfer"]
)
def test_event_loop_only_awaits_during_the_largest_calls(watched: Watched, name: str) -> None:
    for number, message in enumerate(LARGEST[name]):
        watched.call(name, message.SerializeToString())
        watched.check(f"{name} {number}")


def test_event_loop_only_awaits_during_the_largest_calls_of_a_reranker(
    classifier_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    with (
        WatchedServer(classifier_bundle("reranker"), tmp_path / "report", "--http-port", "0") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        watched = Watched(server, channel)
        for name in ("Score", "Classify"):
            for number, message in enumerate(LARGEST[name]):
                watched.call(name, message.SerializeToString())
                watched.check(f"{name} {number}")
        spans = {"query": "who?", "documents": DOCUMENTS, "relevant_spans": {}, "return_documents": True}
        assert watched.post("/v1/rerank", json.dumps(spans).encode())[0] == 200
        watched.check("relevant spans")


@pytest.mark.parametrize("name", METHODS)
def test_event_loop_only_awaits_if_messages_have_many_fields(watched: Watched, name: str) -> None:
    """Each list of the request has as many empty entries as fit, and so do unknown fields."""
    lists = [field.number for field in METHODS[name].input_type.fields if field.is_repeated]
    entries = [repeated_field(number, b"") for number in lists]
    for size in (SMALL_BYTES, LARGE_BYTES):
        for entry in (*entries, UNKNOWN_FIELDS):
            watched.call(name, entry * (size // len(entry)))
            watched.check(f"{name} {size} {entry!r}")


def test_event_loop_only_awaits_if_bodies_have_many_values(watched: Watched) -> None:
    paths = json.loads(get(watched, "/openapi.json"))["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == {*FIELDS} - {"/page"}
    for path, field in FIELDS.items():
        for value in (b"[]", b'""', b"1"):
            for size in (SMALL_BYTES, 4 << 20):
                body = b'{"%s": [%s]}' % (field.encode(), b",".join([value] * (size // (len(value) + 1))))
                status, content = watched.post(path, body)
                assert 400 <= status < 500 or value == b"1", (path, value, content)
                watched.check(f"{path} {value!r} {size}")


def test_body_of_many_values_is_rejected_before_it_is_parsed(watched: Watched) -> None:
    body = b'{"input": ["a"], "other": [%s]}' % b",".join([b"[]"] * 1_000_000)
    compressed = gzip.compress(body)
    assert len(compressed) < 6_000
    for sent, headers in ((body, {}), (compressed, {"Content-Encoding": "gzip"})):
        status, content = watched.post("/v1/embeddings", sent, **headers)
        assert status == 400
        assert b" lists, objects and strings: send several requests" in content


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/attnlens/encode_stream", "/embed_all"])
def test_event_loop_only_awaits_during_the_largest_http_requests(watched: Watched, path: str) -> None:
    body = json.dumps({FIELDS[path]: ["hi"] * MANY}).encode()
    assert watched.post(path, body)[0] == 200
    watched.check(path)


def get(watched: Watched, path: str) -> bytes:
    connection = http.client.HTTPConnection(watched.netloc, timeout=60)
    connection.request("GET", path)
    content = connection.getresponse().read()
    connection.close()
    return content


@pytest.mark.extended  # measures time, so it needs a machine without other load
@pytest.mark.skipif(sys.platform != "linux", reason="uses several loopback addresses")
def test_other_clients_are_answered_while_one_repeats_and_cancels_large_calls(watched: Watched) -> None:
    stop = threading.Event()
    attacks = [
        LARGEST[name][index].SerializeToString() for name, index in (("EncodeStream", 0), ("Explain", 2))
    ]

    def attack() -> None:
        while not stop.is_set():  # each connection is closed with its calls
            with RawClient(watched.server.address, source="127.0.0.2") as client:
                stream = client.call(method("EncodeStream"), attacks[0])
                client.wait_for_heads([stream])
                client.wait_for_ends([client.call(method("Explain"), attacks[1])])

    hello = pb.EmbedRequest(inputs=texts(1)).SerializeToString()
    victims: dict[str, Callable[[], object]] = {
        "health": lambda: watched.call("Check", b""),
        "/healthz": lambda: get(watched, "/healthz"),
        "Embed": lambda: watched.call("Embed", hello),
    }
    seconds: dict[str, list[float]] = {name: [] for name in victims}
    attacking = threading.Thread(target=attack)
    attacking.start()
    end = time.monotonic() + ATTACK_S
    while time.monotonic() < end:
        for name, ask in victims.items():
            started = time.monotonic()
            ask()
            elapsed = time.monotonic() - started
            # A client that asks at an interval would have asked several times while this one has waited.
            seconds[name] += [elapsed, *np.arange(elapsed - INTERVAL_S, 0, -INTERVAL_S).tolist()]
    stop.set()
    attacking.join()
    p99 = {name: float(np.quantile(each, 0.99)) for name, each in seconds.items()}
    assert max(p99.values()) <= MAX_P99_S, p99
