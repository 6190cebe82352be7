"""TLS and client certificates."""

import asyncio
import http.client
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.encoder_service_pb2_grpc import EncoderServiceStub
from attnlens_server.config import ServerConfig
from attnlens_server.errors import StartupError
from attnlens_server.listening.tls import ServerTls, expiry, tls_context
from attnlens_server.server import Server, _credentials
from served import ServerProcess


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls_args(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("tls")
    identity = authority.issue_cert("127.0.0.1", "localhost")
    identity.private_key_pem.write_to_path(directory / "key.pem")
    identity.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return ["--tls-cert", str(directory / "cert.pem"), "--tls-key", str(directory / "key.pem")]


def open_tls(cert: Path, key: Path) -> ServerTls:
    tls = ServerTls(cert, key, None)
    tls.use(tls.load())
    return tls


def test_invalid_certificate_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("garbage")
    with pytest.raises(StartupError, match=f"{path} has no PEM CERTIFICATE"):
        open_tls(path, path)


def test_incomplete_pem_file_is_reported_by_name(tls_args: list[str], tmp_path: Path) -> None:
    cert, key = Path(tls_args[1]), Path(tls_args[3])
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(other)
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for files, message in (
        ((key, key, None), f"^{key} has no PEM CERTIFICATE"),
        ((cert, cert, None), f"^{cert} has no PEM PRIVATE KEY"),
        ((cert, tmp_path / "none.pem", None), r"^cannot read the PEM file .*none\.pem: No such file"),
        ((cert, other, None), f"^{other} is not the private key of {cert}"),
        ((damaged, key, None), f"^{damaged} or {key} is not valid PEM"),
        ((cert, key, key), f"^{key} has no PEM CERTIFICATE"),
        ((cert, key, damaged), f"^{damaged} is not valid PEM"),
    ):
        with pytest.raises(StartupError, match=message):
            tls_context(*files)


def test_key_with_a_passphrase_is_rejected_without_a_prompt(tls_args: list[str], tmp_path: Path) -> None:
    cert, plain = Path(tls_args[1]), Path(tls_args[3])
    key = load_pem_private_key(plain.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    secret = BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    with pytest.raises(StartupError, match=r"locked\.pem is encrypted.*openssl pkey"):
        open_tls(cert, locked)


@pytest.mark.parametrize(
    ("from_days", "to_days", "message"),
    [(-2, -1, "certificate has expired"), (1, 2, "certificate is not yet valid"), (-1, 1, None)],
)
def test_expired_or_future_certificate_logs_a_warning(
    authority: trustme.CA,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    from_days: int,
    to_days: int,
    message: str | None,
) -> None:
    now = datetime.now(UTC)
    first, last = now + timedelta(days=from_days), now + timedelta(days=to_days)
    identity = authority.issue_cert("localhost", not_before=first, not_after=last)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    identity.cert_chain_pems[0].write_to_path(cert)
    identity.private_key_pem.write_to_path(key)
    assert _credentials(open_tls(cert, key)) is not None
    warnings = [f"clients will reject {cert}: {message}"] if message else []
    if to_days > 0:
        warnings.append(
            f"{cert} expires in {to_days}.0 days: replace it and its key, and the server will use them"
        )
    # OpenSSL 3.6 adds "or the system clock is incorrect".
    logged = [each.getMessage().removesuffix(" or the system clock is incorrect") for each in caplog.records]
    assert logged == warnings


def list_models(address: str, credentials: grpc.ChannelCredentials) -> int:
    with grpc.secure_channel(address, credentials) as channel:
        return len(EncoderServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20).models)


def test_server_with_a_certificate_accepts_only_tls(
    minilm_bundle: Path, authority: trustme.CA, tls_args: list[str]
) -> None:
    roots = authority.cert_pem.bytes()
    with ServerProcess(minilm_bundle, *tls_args) as server:
        assert list_models(server.address, grpc.ssl_channel_credentials(roots)) == 1
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError):
            EncoderServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20)


async def test_unix_socket_supports_tls(
    minilm_bundle: Path, authority: trustme.CA, tls_args: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("s") / "a.sock"
    cert, key = Path(tls_args[1]), Path(tls_args[3])
    server = Server(ServerConfig(bundle=minilm_bundle, address=f"unix:{path}", tls_cert=cert, tls_key=key))
    grpc_server, address = await server._listen()
    trusting = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    named = [("grpc.ssl_target_name_override", "localhost")]  # gRPC uses the path as the host name
    codes = []
    for channel in (grpc.aio.secure_channel(address, trusting, named), grpc.aio.insecure_channel(address)):
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await EncoderServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=20)
            codes.append(dict(caught.value.trailing_metadata()).get("attnlens-error-reason"))
    await server._shut_down(grpc_server)
    # The server, which is not warm yet, rejects the first call. The plaintext call does not reach it.
    assert codes == ["NOT_READY", None]
    assert not path.exists()


def test_client_authority_requires_client_certificates(
    minilm_bundle: Path, authority: trustme.CA, tls_args: list[str]
) -> None:
    roots = authority.cert_pem.bytes()
    client = authority.issue_cert("client.example")
    known = grpc.ssl_channel_credentials(
        roots, client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
    )
    client_ca = str(Path(tls_args[1]).with_name("ca.pem"))
    with ServerProcess(minilm_bundle, *tls_args, "--tls-client-ca", client_ca) as server:
        assert list_models(server.address, known) == 1
        with pytest.raises(grpc.RpcError):
            list_models(server.address, grpc.ssl_channel_credentials(roots))


def test_viewer_uses_tls_and_requires_the_same_certificates(
    minilm_bundle: Path, tls_args: list[str], authority: trustme.CA
) -> None:
    roots = str(Path(tls_args[1]).with_name("ca.pem"))
    args = [*tls_args, "--tls-client-ca", roots, "--http-port", "0"]
    stranger, known = ssl.create_default_context(cafile=roots), ssl.create_default_context(cafile=roots)
    authority.issue_cert("browser").configure_cert(known)
    with ServerProcess(minilm_bundle, *args) as server:
        url = server.http_url()
        assert url.startswith("https://127.0.0.1:")
        with urllib.request.urlopen(url, context=known, timeout=30) as reply:
            assert reply.status == 200
        with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionResetError)):
            urllib.request.urlopen(url, context=stranger, timeout=30)
        with pytest.raises((urllib.error.URLError, ConnectionResetError, http.client.BadStatusLine)):
            urllib.request.urlopen(url.replace("https", "http"), timeout=30)


NAMES: dict[str, list[x509.GeneralName]] = {
    "spiffe://example.org/import": [x509.UniformResourceIdentifier("spiffe://example.org/import")],
    "robot.example": [x509.RFC822Name("a@b.example"), x509.DNSName("robot.example")],
    "a@b.example": [x509.RFC822Name("a@b.example")],
    "search service": [],
}
"""Subject alternative names of a client certificate, by the name that the server uses."""


def client_files(
    authority: trustme.CA, names: Sequence[x509.GeneralName], directory: Path
) -> tuple[Path, Path]:
    """Write key and certificate of a client with the common name "search service"."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "search service")])
    builder = (
        x509.CertificateBuilder(authority._certificate.subject, subject, key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(authority._private_key, SHA256())
    key_file, certificate_file = directory / "client.key", directory / "client.pem"
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    certificate_file.write_bytes(certificate.public_bytes(Encoding.PEM))
    return key_file, certificate_file


@pytest.fixture(scope="module")
def guarded(
    minilm_bundle: Path, tls_args: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, ServerProcess]]:
    """Addresses of gRPC and HTTP of a server whose clients have certificates and no permissions."""
    policy = tmp_path_factory.mktemp("policy") / "policy.toml"
    policy.write_text("[default]\nmethods = []\n")
    client_ca = str(Path(tls_args[1]).with_name("ca.pem"))
    args = [*tls_args, "--tls-client-ca", client_ca, "--policy", str(policy), "--http-port", "0"]
    with ServerProcess(minilm_bundle, *args, "--lanes", "1") as server:
        yield server.address, server.http_url(), server


@pytest.mark.parametrize("name", NAMES)
def test_clients_are_named_after_their_certificate(
    guarded: tuple[str, str, ServerProcess], authority: trustme.CA, tmp_path: Path, name: str
) -> None:
    address, url, _ = guarded
    key, certificate = client_files(authority, NAMES[name], tmp_path)
    message = f"{name} may not call Embed: ask the operator of the server to change its policy"
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), key.read_bytes(), certificate.read_bytes()
    )
    with grpc.secure_channel(address, credentials) as channel, pytest.raises(grpc.RpcError) as caught:
        EncoderServiceStub(channel).Embed(pb.EmbedRequest(inputs=[pb.Input(text="a")]), timeout=20)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, message)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.load_cert_chain(certificate, key)
    request = urllib.request.Request(f"{url}v1/attnlens/embed", b'{"inputs": ["a"]}')
    with pytest.raises(urllib.error.HTTPError) as failed:
        urllib.request.urlopen(request, context=context, timeout=20)
    with failed.value:
        assert json.load(failed.value)["error"] == message


def shown_certificate(address: str, context: ssl.SSLContext) -> bytes:
    """Return the certificate that a server shows for a new connection, in DER format."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


def replace_certificate(authority: trustme.CA, tls_args: list[str]) -> bytes:
    """Replace key and certificate of a server, one after the other. Return the certificate in DER format."""
    identity = authority.issue_cert("127.0.0.1", "localhost")
    for path, blob in (
        (Path(tls_args[3]), identity.private_key_pem),
        (Path(tls_args[1]), identity.cert_chain_pems[0]),
    ):
        blob.write_to_path(path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    return ssl.PEM_cert_to_DER_cert(identity.cert_chain_pems[0].bytes().decode())


def test_new_connections_use_a_replaced_certificate_and_open_ones_continue(
    guarded: tuple[str, str, ServerProcess], authority: trustme.CA, tls_args: list[str], tmp_path: Path
) -> None:
    address, url, server = guarded
    key, certificate = client_files(authority, [], tmp_path)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2", "http/1.1"])
    credentials = grpc.ssl_channel_credentials(
        authority.cert_pem.bytes(), key.read_bytes(), certificate.read_bytes()
    )
    with grpc.secure_channel(address, credentials) as channel:
        stub = EncoderServiceStub(channel)
        calls = [stub.ListModels(pb.ListModelsRequest())]
        expected = replace_certificate(authority, tls_args)
        for each in (address, urlsplit(url).netloc):
            deadline = time.monotonic() + 30
            while shown_certificate(each, context) != expected:
                assert time.monotonic() < deadline
                calls.append(stub.ListModels(pb.ListModelsRequest()))
        calls.append(stub.ListModels(pb.ListModelsRequest()))
        assert all(reply.models for reply in calls)
    assert list_models(address, credentials) == 1
    Path(tls_args[1]).write_text("garbage")
    deadline = time.monotonic() + 30
    while "a changed file is not used" not in server.log():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for each in (address, urlsplit(url).netloc):
        assert shown_certificate(each, context) == expected
    log = [json.loads(line) for line in server.log().splitlines()]
    assert {"new certificate"} == {line["message"] for line in log if "certificate" in line["message"]}


def test_expiry_is_known_and_reported_once_a_day(
    authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = datetime.now(UTC).replace(microsecond=0) + timedelta(days=20)
    identity = authority.issue_cert("localhost", not_after=last)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    identity.cert_chain_pems[0].write_to_path(cert)
    identity.private_key_pem.write_to_path(key)
    tls = open_tls(cert, key)
    assert tls.expires_at == last.timestamp()
    for days in (5, 7, 7.5, 8.5, 30):
        monkeypatch.setattr("time.time", lambda days=days: last.timestamp() - (20 - days) * 86_400)
        tls.check_expiry()
    assert [record.getMessage() for record in caplog.records] == [
        f"{cert} expires in {days} days: replace it and its key, and the server will use them"
        for days in ("13.0", "11.5")
    ]


def test_expiry_of_an_expired_certificate_is_known(authority: trustme.CA, tmp_path: Path) -> None:
    last = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
    identity = authority.issue_cert("localhost", not_before=last - timedelta(days=1), not_after=last)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    identity.cert_chain_pems[0].write_to_path(cert)
    identity.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for client_ca in (None, tmp_path / "ca.pem"):
        assert expiry(tls_context(cert, key, client_ca), cert) == last.timestamp()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_replaced_client_authority_also_ends_sessions_that_clients_resume(
    authority: trustme.CA, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    files, client_ca = tmp_path / "server.pem", tmp_path / "ca.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(files)
    authority.cert_pem.write_to_path(client_ca)
    tls = ServerTls(files, files, client_ca)
    tls.use(tls.load())
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.maximum_version = version
    authority.issue_cert("robot").configure_cert(context)

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls.context)
    address = server.sockets[0].getsockname()

    def connect(session: ssl.SSLSession | None) -> tuple[bytes, bool | None, ssl.SSLSession | None]:
        with (
            socket.create_connection(address, timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
        ):
            return connection.recv(7), connection.session_reused, connection.session

    async with server:
        _, _, session = await asyncio.to_thread(connect, None)
        assert (await asyncio.to_thread(connect, session))[:2] == (b"welcome", True)
        trustme.CA().cert_pem.write_to_path(client_ca)
        tls.use(tls.load())
        try:
            greeting, *_ = await asyncio.to_thread(connect, session)
        except OSError:
            greeting = b""
        assert greeting == b""
