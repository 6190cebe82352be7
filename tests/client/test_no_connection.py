"""Messages of clients that cannot connect, or have lost their server: the cause, and how to fix it."""

import asyncio
import datetime as dt
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from attnlens_client import AsyncClient, AttnlensError, Client, UnavailableError, check_health
from attnlens_client.addresses import environment_proxy
from scripted import ScriptedServer
from served import ServerProcess

Call = Callable[..., Any]
NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)
CA, OTHER_CA = trustme.CA(), trustme.CA()
TRUST = grpc.ssl_channel_credentials(CA.cert_pem.bytes())


@contextmanager
def tls_server(certificate: trustme.LeafCert, *, client_ca: bytes | None = None) -> Iterator[int]:
    """Yield the port of a gRPC server with a certificate."""
    chain = b"".join(pem.bytes() for pem in certificate.cert_chain_pems)
    pair = (certificate.private_key_pem.bytes(), chain)
    credentials = grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextmanager
def http_server() -> Iterator[int]:
    """Yield the port of an HTTP server, which answers every request with an error."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def failure(call: Call) -> AttnlensError:
    """Return the error of a call for the model."""
    with pytest.raises(AttnlensError) as caught:
        call("get_model")
    return caught.value


CERTIFICATES = {
    "expired": (
        CA.issue_cert("localhost", "127.0.0.1", not_before=NOW - 9 * DAY, not_after=NOW - DAY),
        "has expired: renew it, or correct the clock",
    ),
    "not yet valid": (
        CA.issue_cert("localhost", "127.0.0.1", not_before=NOW + DAY),
        "is not valid yet: replace it, or correct the clock",
    ),
    "another name": (CA.issue_cert("encoder.test"), "is for another name: use an address in the certificate"),
    "another CA": (
        OTHER_CA.issue_cert("localhost", "127.0.0.1"),
        "is not signed by a trusted CA: use the certificate of the server's CA as root_certificates",
    ),
}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])  # gRPC also tries ::1 for the name
@pytest.mark.parametrize("kind", CERTIFICATES)
def test_invalid_certificate_is_reported_with_its_defect(connect: Call, kind: str, host: str) -> None:
    certificate, message = CERTIFICATES[kind]
    with tls_server(certificate) as port:
        address = f"{host}:{port}"
        with connect(address, credentials=TRUST, max_attempts=2) as call:
            error = failure(call)
        with pytest.raises(UnavailableError, match=message):
            check_health(address, credentials=TRUST)
    assert isinstance(error, UnavailableError)
    assert error.message.startswith(f"the certificate of {address} {message}")


def test_certificate_is_reported_even_if_the_deadline_has_passed_first(connect: Call) -> None:
    certificate, message = CERTIFICATES["expired"]
    with (
        tls_server(certificate) as port,
        connect(f"localhost:{port}", credentials=TRUST, timeout_s=0.1, wait_for_ready=True) as call,
    ):
        assert message in failure(call).message


def test_missing_and_superfluous_tls_are_reported(connect: Call, server: ScriptedServer) -> None:
    certificate = CA.issue_cert("localhost", "127.0.0.1")
    port = server.address.rpartition(":")[2]
    for host in ("127.0.0.1", "localhost"):
        with connect(f"{host}:{port}", credentials=TRUST, max_attempts=2) as call:
            assert "does not use TLS: omit the credentials" in failure(call).message
        with (
            tls_server(certificate) as tls_port,
            connect(f"{host}:{tls_port}", max_attempts=2) as call,
        ):
            assert "or use credentials for TLS" in failure(call).message
        with (
            tls_server(certificate, client_ca=CA.cert_pem.bytes()) as tls_port,
            connect(f"{host}:{tls_port}", credentials=TRUST, max_attempts=2) as call,
        ):
            assert "or use credentials with a valid client certificate" in failure(call).message


def test_http_port_is_reported_as_such(connect: Call) -> None:
    with http_server() as port, connect(f"localhost:{port}", max_attempts=2) as call:
        assert (
            "is not an attnlens server: use another address, such as the gRPC port" in failure(call).message
        )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nowhere.invalid:1", "the host name of nowhere.invalid:1 cannot be resolved: correct the name"),
        ("a.invalid:1,b.invalid:2", "the host name of a.invalid:1,b.invalid:2 cannot be resolved"),
        ("unix:{directory}/no.sock", "there is no socket at unix:{directory}/no.sock: start a server with"),
        ("unix:{directory}/file", "no server answers at unix:{directory}/file: start one"),
    ],
)
def test_wrong_address_is_reported(connect: Call, tmp_path: Path, address: str, message: str) -> None:
    (tmp_path / "file").touch()
    with connect(address.format(directory=tmp_path), max_attempts=1) as call:
        assert failure(call).message.startswith(message.format(directory=tmp_path))


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_proxy_of_the_environment_is_named(
    connect: Call, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    address = server.address.replace("127.0.0.1", "localhost")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with http_server() as port:
        for proxy in ("127.0.0.1:1", f"127.0.0.1:{port}", "nowhere.invalid:1"):
            monkeypatch.setenv(variable, f"http://user:secret@{proxy}")
            with connect(address, max_attempts=1) as call:
                error = failure(call)
            assert error.message.startswith(
                f"no connection to {address} through the proxy {proxy} of the environment variable "
                f"{variable}: start the server, or bypass the proxy: unset the variable, or add the host to "
                "no_proxy"
            )
            assert "secret" not in error.message
    monkeypatch.setenv("no_proxy", "localhost")
    with connect(address) as call:
        assert call("embed", ["a"]).shape == (1, 4)


@pytest.mark.parametrize(
    ("address", "no_proxy", "is_used"),
    [
        ("encoder.test:1", "", True),
        ("encoder.test:1", "other.test, .TEST", False),
        ("encoder.test:1", "*", True),  # gRPC knows no wildcard
        ("10.1.2.3:1", "10.1.0.0/16", False),
        ("ipv4:10.1.2.3:1", "10.1.2.3", False),
        ("dns:///encoder.test:1", "encoder.test", False),
        ("[::1]:1", "::1", False),
        ("unix:/tmp/a.sock", "", False),
    ],
)
def test_proxy_is_named_for_the_addresses_for_which_grpc_uses_it(
    monkeypatch: pytest.MonkeyPatch, address: str, no_proxy: str, is_used: bool
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.test:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    expected = "proxy.test:3128 of the environment variable http_proxy" if is_used else ""
    assert environment_proxy(address) == expected


def test_silent_program_is_not_reported_as_a_slow_server(connect: Call) -> None:
    with socket.socket() as silent:  # the kernel accepts connections, and nobody reads them
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with connect(address, timeout_s=0.2) as call:
            error = failure(call)
    assert error.message == (
        f"no server reachable at {address} for 0.2 s: start one with `attnlens serve DIR`, use another "
        "address, or see the server's log if it runs"
    )


def test_killed_server_is_reported_within_the_timeout_and_used_again_after_a_restart(
    minilm_bundle: Path,
) -> None:
    async def opened() -> AsyncClient:
        return AsyncClient(server.address, timeout_s=1.5)

    with (
        ServerProcess(minilm_bundle) as server,
        Client(server.address, timeout_s=1.5) as client,
        asyncio.Runner() as runner,
    ):
        asynchronous = runner.run(opened())
        calls: list[Call] = [
            lambda: client.embed(["a"]),
            lambda: runner.run(asynchronous.embed(["a"])),
        ]
        assert [call().shape for call in calls] == [(1, 384)] * 2
        server.process.kill()
        server.process.wait()
        for call in calls:
            start = time.monotonic()
            with pytest.raises(UnavailableError) as caught:
                call()
            assert time.monotonic() - start < 3
            assert caught.value.message.startswith(f"no server reachable at {server.address} for 1.")
            assert "larger timeout_s" not in caught.value.message
        client._session.timeout_s = asynchronous._session.timeout_s = 30
        with ServerProcess(minilm_bundle, "--port", server.address.rpartition(":")[2]):
            start = time.monotonic()
            assert [call().shape for call in calls] == [(1, 384)] * 2
            assert time.monotonic() - start < 10
        runner.run(asynchronous.close())


def test_async_client_is_created_anywhere_and_used_in_one_event_loop(server: ScriptedServer) -> None:
    client = AsyncClient(server.address)

    async def embed() -> tuple[int, ...]:
        return (await client.embed(["a"])).shape

    with asyncio.Runner() as runner:
        assert runner.run(embed()) == (1, 4)
        for _ in range(2):
            with pytest.raises(
                AttnlensError, match="belongs to another event loop: create an AsyncClient in"
            ):
                asyncio.run(embed())
        assert runner.run(embed()) == (1, 4)
        runner.run(client.close())
        with pytest.raises(AttnlensError, match="the client was closed: create another one"):
            runner.run(embed())


FORKING = """
import os, sys
from attnlens_client import AttnlensError, Client

used, unused = (Client(sys.argv[1], timeout_s=20) for _ in range(2))
used.get_model()
if (child := os.fork()) == 0:
    print(unused.embed(["a"]).shape)
    try:
        used.get_model()
    except AttnlensError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(used.embed(["a"]).shape)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_client_that_was_used_before_a_fork_says_so(server: ScriptedServer) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKING, server.address]
    result = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    first, message, last = result.stdout.splitlines()
    assert (first, last) == ("(1, 4)", "(1, 4)")
    assert message.endswith("do not survive a fork: create a client in each process")
