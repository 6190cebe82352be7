"""HAProxy with deploy/haproxy.cfg in front of a server: results, errors and attacks."""

import json
import socket
import ssl
import struct
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from h2.events import Event, ResponseReceived, StreamEnded
from hpack import Encoder

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_client import Client, InputTooLongError
from bench.servers import RunningServer, attnlens_server
from bench.studies.attackers import ATTACKS, HEADERS, attacking, connect, preface, send_headers
from bench.studies.proxied import Ports, Proxy, free_ports, haproxy, latencies
from hostile.haproxy import require_haproxy

pytestmark = pytest.mark.extended
SERVICE = pb.DESCRIPTOR.services_by_name["EncoderService"]
TEXTS = ["It rained all day.", "hello"]
OTHER_SOURCE = "127.0.0.3"
TIMEOUT_S = 10.0  # timeout http-request
STALLED_UPLOAD = struct.pack(">BI", 0, 1000) + b"ab"


@dataclass(frozen=True)
class Proxied:
    """A server and the proxy in front of it."""

    server: RunningServer
    ports: Ports
    proxy: Proxy
    ca: Path
    slow: dict[str, socket.socket]

    def channel(self, *, tls: bool) -> grpc.Channel:
        """Connect through the proxy."""
        if not tls:
            return grpc.insecure_channel(self.proxy.address)
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.secure_channel(self.proxy.tls_address, credentials)


@pytest.fixture(scope="module")
def proxied(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    require_haproxy()
    directory = tmp_path_factory.mktemp("proxy")
    authority = trustme.CA()
    ca, certificate = directory / "ca.pem", directory / "attnlens.pem"
    authority.cert_pem.write_to_path(ca)
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    ports = Ports(*free_ports(3))
    with (
        attnlens_server(minilm_bundle, "fp32", 0, directory / "server.log", *ports.options) as server,
        haproxy(ports, certificate, directory / "haproxy.log") as proxy,
        ExitStack() as stack,
    ):
        slow = {name: stack.enter_context(connect(proxy.address)) for name in SLOW}
        for name, connection in slow.items():
            connection.sendall(SLOW[name]())
        yield Proxied(server, ports, proxy, ca, slow)
        assert "Traceback" not in (directory / "server.log").read_text("utf-8")


def unfinished_upload() -> bytes:
    http2, first = preface()
    http2.send_data(send_headers(http2), STALLED_UPLOAD)
    return first + http2.data_to_send()


SLOW: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "a part of the preface": lambda: preface()[1][:10],
    "the preface": lambda: preface()[1],
    "a part of a head": lambda: b"POST /v1/embeddings HTTP/1.1\r\nX: ",
    "a part of a body": lambda: b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nab",
    "a part of a message": unfinished_upload,
}


INPUTS = [pb.Input(text=text) for text in TEXTS]
REQUESTS = {
    "Embed": pb.EmbedRequest(inputs=INPUTS),
    "Encode": pb.EncodeRequest(inputs=INPUTS, attention=[pb.AttentionQuery()]),
    "EncodeStream": pb.EncodeStreamRequest(inputs=INPUTS * 20, last_hidden_state=True),
    "Tokenize": pb.TokenizeRequest(inputs=INPUTS),
    "ListModels": pb.ListModelsRequest(),
    "GetModel": pb.GetModelRequest(),
    "Explain": pb.ExplainRequest(inputs=INPUTS),
    "Compare": pb.CompareRequest(pairs=[pb.ComparedPair(a=INPUTS[0], b=INPUTS[1])]),
    # MiniLM is not a classifier: these return an error.
    "Score": pb.ScoreRequest(query=TEXTS[0], documents=TEXTS),
    "Classify": pb.ClassifyRequest(inputs=INPUTS),
}


def outcome(stub: EncoderServiceStub, name: str) -> object:
    """Return the responses without the fields that differ from call to call, or the error."""
    try:
        call = getattr(stub, name)(REQUESTS[name], timeout=30)
        responses = list(call) if name == "EncodeStream" else [call]
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        details = dict(error.trailing_metadata())
        return (
            error.code(),
            error.details(),
            details["attnlens-error-bin"],
            details["grpc-status-details-bin"],
        )
    for response in responses:
        for field in {"timings"} & set(response.DESCRIPTOR.fields_by_name):
            response.ClearField(field)
    return responses


def test_every_method_is_compared() -> None:
    assert set(REQUESTS) == {method.name for method in SERVICE.methods}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("tls", [False, True])
def test_methods_return_the_results_and_errors_of_the_server(proxied: Proxied, tls: bool, name: str) -> None:
    with grpc.insecure_channel(proxied.server.address) as direct, proxied.channel(tls=tls) as channel:
        assert outcome(EncoderServiceStub(channel), name) == outcome(EncoderServiceStub(direct), name)


def test_client_reads_the_details_of_an_error(proxied: Proxied) -> None:
    with Client(proxied.proxy.address) as client, pytest.raises(InputTooLongError) as caught:
        client.embed(["hello", "a " * 300])
    assert caught.value.metadata == {"num_tokens": "302", "max_tokens": "256"}
    assert [violation.text_index for violation in caught.value.violations] == [1]


def test_health_and_reflection_pass(proxied: Proxied) -> None:
    with grpc.insecure_channel(proxied.proxy.address) as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        assert "attnlens.v1.EncoderService" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_http_passes_on_the_same_ports(proxied: Proxied) -> None:
    context = ssl.create_default_context(cafile=str(proxied.ca))
    for url, trust in (
        (f"http://{proxied.proxy.address}", None),
        (f"https://{proxied.proxy.tls_address}", context),
    ):
        body = json.dumps({"input": TEXTS}).encode()
        request = urllib.request.Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, context=trust, timeout=10) as response:
            rows = [row["embedding"] for row in json.load(response)["data"]]
        with Client(proxied.server.address) as direct:
            np.testing.assert_array_equal(np.array(rows, np.float32), direct.embed(TEXTS))


@pytest.mark.parametrize("attack", ATTACKS)
def test_client_is_answered_during_an_attack_through_the_proxy(proxied: Proxied, attack: str) -> None:
    address = proxied.proxy.address
    latencies(address, 0)
    proxied.server.forget_peak()
    before = proxied.server.rss_mib
    with attacking(attack, address, 1) as attacker:
        latencies(address, 1.2)
        assert attacker.stdout is not None
        assert int(attacker.stdout.read()) > 0
    assert proxied.server.peak_rss_mib - before < 150


def test_address_with_too_many_calls_is_told_to_wait(proxied: Proxied) -> None:
    with attacking("rapid reset", proxied.proxy.address, 1) as attacker:
        attacker.wait()
    http2, first = preface()
    stream = send_headers(http2)
    http2.send_data(stream, struct.pack(">BI", 0, 0), end_stream=True)
    with connect(proxied.proxy.address) as connection:  # from the address of the attack
        connection.sendall(first + http2.data_to_send())
        events: list[Event] = []
        while not any(isinstance(event, StreamEnded) for event in events):
            events += http2.receive_data(connection.recv(1 << 16))
    [response] = [event for event in events if isinstance(event, ResponseReceived)]
    headers = {str(name): str(value) for name, value in response.headers}
    assert (headers[":status"], headers["grpc-status"]) == ("429", "8")
    assert headers["attnlens-error-reason"] == "RATE_LIMITED"
    latencies(proxied.proxy.address, 0)  # from another address


def test_connections_of_an_address_are_limited(proxied: Proxied) -> None:
    with ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(connect(proxied.proxy.address, OTHER_SOURCE))
        with pytest.raises(ConnectionResetError), connect(proxied.proxy.address, OTHER_SOURCE) as one_more:
            one_more.recv(1)
        latencies(proxied.proxy.address, 0)


NUM_ATTACKERS, NUM_STREAMS = 33, 256


def test_calls_without_requests_disturb_nobody(proxied: Proxied) -> None:
    """With these connections and streams, calls that never send a request once filled a server."""
    head = Encoder().encode(list(HEADERS.items()))
    block = struct.pack(">I", len(head))[1:]
    streams = b"".join(
        block + b"\x01\x04" + struct.pack(">I", 1 + 2 * number) + head for number in range(NUM_STREAMS)
    )
    before = proxied.server.rss_mib
    with ExitStack() as stack:
        for _ in range(NUM_ATTACKERS):
            connection = stack.enter_context(connect(proxied.proxy.address))
            connection.sendall(preface()[1] + streams)
        for address in (proxied.proxy.address, proxied.server.address):
            latencies(address, 0)
            with grpc.insecure_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                response = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
                assert response.status == health_pb2.HealthCheckResponse.SERVING
        url = f"http://127.0.0.1:{proxied.ports.operations}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            assert b"\nattnlens_calls 0.0\n" in response.read()  # none has reached the server
    assert proxied.server.rss_mib - before < 50


def test_clients_are_told_that_no_server_runs(tmp_path: Path) -> None:
    require_haproxy()
    with (
        haproxy(Ports(*free_ports(3)), None, tmp_path / "haproxy.log") as proxy,
        grpc.insecure_channel(proxy.address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_slow_connections_end(proxied: Proxied) -> None:
    """The other tests run while these connections wait."""
    for name, connection in proxied.slow.items():
        connection.settimeout(TIMEOUT_S + 5)
        received = b""
        while b"408" not in received and (data := connection.recv(1 << 16)):
            received += data
        assert b"408" in received or not data, name
