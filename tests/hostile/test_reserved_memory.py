"""The memory that calls reserve covers the growth of the process, also while texts are tokenized."""

import http.client
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest

from attnlens.v1 import encoder_service_pb2 as pb
from bench.servers import RunningServer
from hostile.watched_server import WatchedServer
from http_client import HttpClient
from served import ServerProcess

MIB = 1 << 20
SLACK_MIB = 16
"""Memory that the process keeps, such as freed memory of several threads."""
LONGEST = "!" * 131_072  # each character is a token

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Measured:
    """A server whose memory is measured, and its clients."""

    def __init__(self, server: WatchedServer, channel: grpc.Channel) -> None:
        self._server = server
        self._process = RunningServer(server.address, server.process.pid)
        self._channel = channel
        self.http = HttpClient(server.http_url())

    def call(self, name: str, message: pb.TokenizeRequest | pb.EncodeRequest) -> None:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            f"/{pb.DESCRIPTOR.services_by_name['EncoderService'].full_name}/{name}"
        )
        call(message.SerializeToString(), timeout=60)

    def start(self) -> None:
        self._server.forget()
        self._process.forget_peak()
        self._rss_mib = self._process.rss_mib

    def check(self) -> None:
        """Check that calls have reserved at least the memory by which the process has grown since `start`."""
        grown_mib = self._process.peak_rss_mib - self._rss_mib
        reserved_mib = self._server.peak_reserved_bytes / MIB
        assert grown_mib <= reserved_mib + SLACK_MIB


@pytest.fixture(scope="module")
def measured(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    report = tmp_path_factory.mktemp("measured") / "report"
    options = [("grpc.max_receive_message_length", -1)]
    with (
        WatchedServer(minilm_bundle, report, "--http-port", "0", "--no-explain") as server,
        grpc.insecure_channel(server.address, options=options) as channel,
    ):
        measured = Measured(server, channel)
        measured.call("Tokenize", pb.TokenizeRequest(inputs=[pb.Input(text="a")]))
        yield measured


def test_memory_to_tokenize_the_longest_text_is_reserved(measured: Measured) -> None:
    measured.start()
    measured.call("Tokenize", pb.TokenizeRequest(inputs=[pb.Input(text=LONGEST)]))
    measured.check()


@pytest.mark.parametrize("path", ["/tokenize", "/v1/attnlens/tokenize"])
def test_memory_to_tokenize_the_longest_text_as_json_is_reserved(measured: Measured, path: str) -> None:
    measured.start()
    measured.http.post(path, {"inputs": [LONGEST]})
    measured.check()


def test_memory_to_truncate_the_longest_text_is_reserved(measured: Measured) -> None:
    measured.http.post("/embed", {"inputs": ["a " * 254]})  # the memory of batches is planned separately
    measured.start()
    measured.http.post("/embed", {"inputs": [LONGEST], "truncate": True})
    measured.check()


@pytest.mark.parametrize("path", ["/embed_all", "/v1/attnlens/encode"])
def test_memory_of_token_vectors_as_json_is_reserved(measured: Measured, path: str) -> None:
    options = {"last_hidden_state": True} if path == "/v1/attnlens/encode" else {}
    measured.http.post(path, options | {"inputs": ["a " * 254] * 16})  # the memory of batches
    measured.start()
    measured.http.post(path, options | {"inputs": ["a " * 254] * 64})
    measured.check()


def test_memory_of_many_attention_parts_is_reserved(measured: Measured) -> None:
    reduction = pb.AttentionReduction(level=pb.ATTENTION_LEVEL_WORDS, top_k=pb.TopK(k=1))
    query = pb.AttentionQuery(reduction=reduction, layers=[0, 1, 2])
    measured.call("Encode", pb.EncodeRequest(inputs=[pb.Input(text="hi")] * 64, attention=[query] * 16))
    measured.start()
    measured.call("Encode", pb.EncodeRequest(inputs=[pb.Input(text="hi")] * 700, attention=[query] * 16))
    measured.check()


def test_memory_of_a_body_with_wide_characters_is_reserved(measured: Measured) -> None:
    """One emoji makes Python store each character of a text in four bytes."""
    texts = ["\N{GRINNING FACE}" + "a " * 60_000] * 32
    for body in ({"inputs": texts}, json.dumps({"inputs": texts}, ensure_ascii=False).encode()):
        measured.start()
        status, _ = measured.http.ask("POST", "/v1/attnlens/embed", body)
        assert status == 400  # too many tokens
        measured.check()


def test_memory_of_relevant_spans_of_a_long_document_is_reserved(
    classifier_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    with (
        WatchedServer(classifier_bundle("reranker"), tmp_path / "report", "--http-port", "0") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        measured = Measured(server, channel)
        body = {"query": "who?", "documents": ["a"], "relevant_spans": {}}
        measured.http.post("/v1/rerank", body)
        measured.start()
        measured.http.post("/v1/rerank", body | {"documents": [LONGEST[:131_000]]})
        measured.check()


def test_lines_of_a_stream_reserve_memory_for_one_text(minilm_bundle: Path) -> None:
    """The tokens of all texts, as JSON, take more than the memory limit."""
    limits = ("--max-response-bytes", str(4 * MIB), "--max-call-memory-bytes", str(30 * MIB))
    body = {"inputs": ["a " * 254] * 400, "last_hidden_state": True}
    with ServerProcess(minilm_bundle, "--http-port", "0", *limits) as server:
        connection = http.client.HTTPConnection(urlsplit(server.http_url()).netloc, timeout=60)
        connection.request("POST", "/v1/attnlens/encode_stream", json.dumps(body))
        response = connection.getresponse()
        assert response.status == 200
        lines = [json.loads(response.readline()) for _ in range(40)]
        assert [line["input_index"] for line in lines] == list(range(40))
        connection.close()
