"""HAProxy with deploy/haproxy.cfg verifies tokens and replaces each by the API key of its subject."""

import http.client
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from attnlens.v1.error_pb2 import ErrorDetails, ErrorReason
from attnlens_client import Client, UnauthenticatedError
from attnlens_server.access.keys import new_key
from bench.servers import attnlens_server
from bench.studies.proxied import Ports, Proxy, free_ports, haproxy
from hostile.haproxy import require_haproxy
from hostile.tokens import AUDIENCE, ISSUER, Issuer

pytestmark = pytest.mark.extended
KEY = "attnlens_0123456789"


class Headers(BaseHTTPRequestHandler):
    """Responds with the credentials that arrived."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = ", ".join(self.headers.get_all("Authorization", [])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """A server that ignores health checks whose connection is reset."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class Credentials(grpc.GenericRpcHandler):
    """Responds to every call with the credentials that arrived."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        metadata = handler_call_details.invocation_metadata
        values = [str(value) for name, value in metadata if name == "authorization"]
        return grpc.unary_unary_rpc_method_handler(lambda *_: ", ".join(values).encode())


@dataclass(frozen=True)
class Gateway:
    """A proxy in front of a server that responds with the credentials that arrived."""

    proxy: Proxy
    issuer: Issuer

    def get(self, *headers: tuple[str, str], path: str = "/v1/models") -> tuple[int, str]:
        """Send a request with these headers. Return status and content."""
        connection = http.client.HTTPConnection(self.proxy.address, timeout=10)
        connection.putrequest("GET", path)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        content = response.read().decode()
        connection.close()
        return response.status, content

    def call(self, *metadata: tuple[str, str]) -> str:
        """Make a gRPC call and return the credentials that arrived."""
        with grpc.insecure_channel(self.proxy.address) as channel:
            method: Any = channel.unary_unary("/attnlens.v1.EncoderService/ListModels")
            return bytes(method(b"", metadata=metadata, timeout=10)).decode()


@contextmanager
def servers() -> Iterator[Ports]:
    """Run the servers behind the proxy."""
    server = grpc.server(ThreadPoolExecutor(2))
    with Server(("127.0.0.1", 0), Headers) as http_server:
        threading.Thread(target=http_server.serve_forever).start()
        [port] = free_ports(1)
        server.add_generic_rpc_handlers((Credentials(),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield Ports(port, http_server.server_port, http_server.server_port)
        finally:
            server.stop(None).wait()
            http_server.shutdown()


@pytest.fixture(scope="module", params=["RS256", "ES256"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    require_haproxy()
    directory = tmp_path_factory.mktemp("tokens")
    issuer = Issuer(request.param)
    with servers() as ports, token_gateway(issuer, ports, directory, KEY) as proxy:
        yield Gateway(proxy, issuer)


@contextmanager
def token_gateway(issuer: Issuer, ports: Ports, directory: Path, key: str) -> Iterator[Proxy]:
    """Run a proxy that accepts tokens of an issuer. The subject `search-service` has the key."""
    issuer.write_public_key(directory / "jwt.pem")
    (directory / "attnlens-keys.map").write_text(f"search-service {key}\n")
    environment = {
        "ATTNLENS_JWT_KEY": str(directory / "jwt.pem"),
        "ATTNLENS_JWT_ALG": issuer.algorithm,
        "ATTNLENS_JWT_ISS": ISSUER,
        "ATTNLENS_JWT_AUD": AUDIENCE,
    }
    with haproxy(ports, None, directory / "haproxy.log", environment) as proxy:
        yield proxy


def test_server_counts_a_token_as_the_client_of_its_key(minilm_bundle: Path, tmp_path: Path) -> None:
    require_haproxy()
    issuer, ports = Issuer("ES256"), Ports(*free_ports(3))
    key, line = new_key("search")
    (tmp_path / "keys.txt").write_text(line)
    options = [*ports.options, "--api-keys", str(tmp_path / "keys.txt")]
    with (
        attnlens_server(minilm_bundle, "fp32", 0, tmp_path / "server.log", *options),
        token_gateway(issuer, ports, tmp_path, key) as proxy,
    ):
        with Client(proxy.address, api_key=issuer.token("search-service")) as client:
            assert client.embed(["hello"]).shape == (1, 384)
        with Client(proxy.address, api_key=key) as client, pytest.raises(UnauthenticatedError):
            client.embed(["hello"])
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{ports.operations}/metrics").read().decode()
    assert 'client="search"' in metrics


def bearer(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


def test_token_is_replaced_by_the_api_key_of_its_subject(gateway: Gateway) -> None:
    token = gateway.issuer.token("search-service")
    assert gateway.get(bearer(token)) == (200, f"Bearer {KEY}")
    assert gateway.call(bearer(token)) == f"Bearer {KEY}"


def test_second_credential_is_dropped(gateway: Gateway) -> None:
    token = gateway.issuer.token("search-service")
    assert gateway.get(bearer(token), bearer("stolen")) in {(200, f"Bearer {KEY}"), (401, "")}


WRONG: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "https://example.org"},
    "no issuer": {"iss": None},
    "another audience": {"aud": "attnlens2"},
    "no audience": {"aud": None},
    "several audiences": {"aud": [AUDIENCE, "other"]},
    "expired": {"exp": int(time.time()) - 1},
    "no expiry": {"exp": None},
    "no algorithm": {"alg": "none"},
    "a secret instead of a key": {"alg": "HS256"},
}


@pytest.mark.parametrize("claims", WRONG.values(), ids=WRONG)
def test_invalid_token_is_rejected(gateway: Gateway, claims: dict[str, Any]) -> None:
    assert gateway.get(bearer(gateway.issuer.token("search-service", **claims))) == (401, "")


def test_signature_of_another_key_is_rejected(gateway: Gateway) -> None:
    token = Issuer(gateway.issuer.algorithm).token("search-service")
    assert gateway.get(bearer(token))[0] == 401
    valid = gateway.issuer.token("search-service")
    for forged in ("", "a", "a.b.c", valid.rpartition(".")[0] + ".", KEY, token[:-9]):
        assert gateway.get(bearer(forged))[0] == 401
    assert gateway.get(("authorization", f"Basic {valid}"))[0] == 401
    assert gateway.get()[0] == 401


def test_grpc_client_reads_the_status_of_a_rejected_token(gateway: Gateway) -> None:
    for token, code, reason in (
        ("", grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
        (gateway.issuer.token("unknown"), grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            gateway.call(bearer(token))
        error: Any = caught.value
        assert error.code() == code
        metadata = dict(error.trailing_metadata())
        details = ErrorDetails.FromString(metadata["attnlens-error-bin"])
        assert ErrorReason.Name(details.reason) == f"ERROR_REASON_{metadata['attnlens-error-reason']}"
        assert metadata["attnlens-error-reason"] == reason


def test_health_needs_no_token_and_passes_none_on(gateway: Gateway) -> None:
    assert gateway.get(path="/readyz") == (200, "")
